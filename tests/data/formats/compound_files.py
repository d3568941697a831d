"""Compound files (MS-CFB, version 3), as Outlook writes messages into: small streams only."""

from __future__ import annotations

import struct
from collections.abc import Mapping

Tree = Mapping[str, "bytes | Tree"]
_SECTOR, _SMALL = 512, 64
_FREE, _END, _FAT, _NONE = 0xFFFFFFFF, 0xFFFFFFFE, 0xFFFFFFFD, 0xFFFFFFFF


def compound_file(tree: Tree) -> bytes:
    """A file of these streams and storages; no stream may have 4,096 bytes or more."""
    entries: list[list[object]] = []  # name, type, left, right, child, start, size
    small = bytearray()
    small_fat: list[int] = []

    def add(name: str, kind: int, content: bytes | Tree) -> int:
        number = len(entries)
        entry: list[object] = [name, kind, _NONE, _NONE, _NONE, _END if kind == 2 else 0, 0]
        entries.append(entry)
        if isinstance(content, bytes):
            if content:
                n = -(-len(content) // _SMALL)
                entry[5], entry[6] = len(small_fat), len(content)
                small_fat.extend([*range(len(small_fat) + 1, len(small_fat) + n), _END])
                small.extend(content.ljust(n * _SMALL, b"\0"))
        else:
            names = sorted(content, key=lambda each: (len(each), each.upper()))
            numbers = [
                add(each, 2 if isinstance(content[each], bytes) else 1, content[each]) for each in names
            ]
            entry[4] = balanced(numbers)
        return number

    def balanced(numbers: list[int]) -> int:
        if not numbers:
            return _NONE
        middle = len(numbers) // 2
        entries[numbers[middle]][2] = balanced(numbers[:middle])
        entries[numbers[middle]][3] = balanced(numbers[middle + 1 :])
        return numbers[middle]

    add("Root Entry", 5, tree)
    n_directory = -(-len(entries) // 4)
    n_small, n_small_fat = -(-len(small) // _SECTOR), -(-len(small_fat) // 128) or 1
    chains = [n_directory, n_small_fat, n_small]  # behind the sector of the FAT
    fat = [_FAT]
    starts = []
    for n in chains:
        starts.append(len(fat))
        fat += [*range(len(fat) + 1, len(fat) + n), _END] if n else []
    assert len(fat) <= 128
    entries[0][5], entries[0][6] = starts[2], len(small)
    header = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(16)
    header += struct.pack(
        "<HHHHH6xIIIIIIIII", 0x3E, 3, 0xFFFE, 9, 6, 0, 1, starts[0], 0, 4096, starts[1], n_small_fat, _END, 0
    )
    header += struct.pack("<109I", 0, *[_FREE] * 108)
    directory = b"".join(_entry(*entry) for entry in entries).ljust(n_directory * _SECTOR, b"\0")  # type: ignore[arg-type]
    tables = [
        _numbers(fat, 1),
        directory,
        _numbers(small_fat, n_small_fat),
        bytes(small).ljust(n_small * _SECTOR, b"\0"),
    ]
    return header + b"".join(tables)


def _numbers(numbers: list[int], sectors: int) -> bytes:
    return struct.pack(f"<{sectors * 128}I", *numbers, *[_FREE] * (sectors * 128 - len(numbers)))


def _entry(name: str, kind: int, left: int, right: int, child: int, start: int, size: int) -> bytes:
    encoded = name.encode("utf-16-le")
    return struct.pack(
        "<64sHBBIII16xI8x8xIQ", encoded, len(encoded) + 2, kind, 1, left, right, child, 0, start, size
    )
