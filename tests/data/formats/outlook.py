"""A message as Outlook saves it, with files and with a message in it."""

from __future__ import annotations

import struct

from tests.data.formats.compound_files import Tree, compound_file
from tests.data.formats.office_parts import Sample

_TEXT, _BYTES, _INT, _TIME = 0x001F, 0x0102, 0x0003, 0x0040
_2024 = 133_485_408_000_000_000  # 1 January, in units of 100 ns since 1601
_DATE = "Date: Mon, 01 Jan 2024 00:00:00 +0000"
_UNICODE = (0x340D, _INT, 0x40000)


def _storage(head: bytes, properties: list[tuple[int, int, str | bytes | int]], more: Tree) -> Tree:
    streams: dict[str, bytes | Tree] = dict(more)
    rows = b""
    for number, kind, value in properties:
        data = value.encode("utf-16-le") if isinstance(value, str) else value
        if isinstance(data, bytes):
            streams[f"__substg1.0_{number:04X}{kind:04X}"] = data
            own = struct.pack("<II", len(data) + 2 * (kind == _TEXT), 0)
        else:
            own = struct.pack("<q", data)
        rows += struct.pack("<HHI", kind, number, 6) + own
    streams["__properties_version1.0"] = head + rows
    return streams


def _file(name: str, data: bytes, kind: str = "", content_id: str = "") -> Tree:
    properties: list[tuple[int, int, str | bytes | int]] = [
        (0x3701, _BYTES, data),
        (0x3705, _INT, 1),
        (0x3707, _TEXT, name),
        (0x370E, _TEXT, kind),
    ]
    return _storage(bytes(8), [*properties, (0x3712, _TEXT, content_id)] if content_id else properties, {})


def _message(head: bytes, subject: str, body: str, more: Tree) -> Tree:
    properties: list[tuple[int, int, str | bytes | int]] = [
        _UNICODE,
        (0x0037, _TEXT, subject),
        (0x0C1A, _TEXT, "Ann"),
        (0x0C1F, _TEXT, "ann@example.com"),
        (0x0039, _TIME, _2024),
        (0x1000, _TEXT, body),
    ]
    return _storage(head, properties, more)


def _head(recipients: int, files: int, padding: int) -> bytes:
    return struct.pack("<8x4I", recipients, files, recipients, files) + bytes(padding)


def message() -> Sample:
    bo: list[tuple[int, int, str | bytes | int]] = [
        (0x3001, _TEXT, "Bo"),
        (0x39FE, _TEXT, "bo@example.com"),
        (0x0C15, _INT, 1),
    ]
    within = _message(_head(0, 0, 0), "Pay", "The pay is 900.", {})
    attached = _storage(bytes(8), [(0x3705, _INT, 5)], {"__substg1.0_3701000D": within})
    parts = {
        "__recip_version1.0_#00000000": _storage(bytes(8), bo, {}),
        "__attach_version1.0_#00000000": _file("depths.csv", b"name,depth\nOban,8.5\n", "text/csv"),
        "__attach_version1.0_#00000001": _file("logo.png", b"\x89PNG", "image/png", "logo@1"),
        "__attach_version1.0_#00000002": attached,
        "__nameid_version1.0": {},
    }
    data = compound_file(_message(_head(1, 3, 8), "Sailings – Überfahrt", "See the depths.\r\nAnn", parts))
    head = 'From: "Ann" <ann@example.com>'
    text = "\n\n".join(
        [
            f"Subject: Sailings – Überfahrt\n{head}\nTo: Bo <bo@example.com>\n{_DATE}",
            "See the depths.\nAnn",
            f"Subject: Pay\n{head}\n{_DATE}",
            "The pay is 900.",
            "Attachments: depths.csv, logo.png",
        ]
    )
    return Sample(data, text, "left out: 1 inline images")
