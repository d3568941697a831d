"""Page format, version 4: a document's record, and the CRCs of its pages. Imports neither torch nor SGLang,
because the CLI reads it too.

A document file consists of its record, padded to 4,096 bytes, its pages, ``page_bytes`` each, and an optional
summary: opaque bytes that `sglang_ext.analysis` encodes, with their length and CRC in the record. Other
storage backends keep the record as values of its own. Integers are little-endian; README.md has the table."""

from __future__ import annotations

import hashlib
import re
import struct
import zlib
from array import array
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from sglang_ext.wire.protocol import NAMESPACE

MAGIC = b"RSKVDOC\0"
VERSION = 4
OLDEST = 3
"""The oldest version that is read: the same records, without pages of 8 bits. It names the place in a shared
store, where a removal has to find what other engines have stored, whatever their bits."""
ALIGN = 4096
_FIXED = struct.Struct("<8sIIII32s32sIIIIIIIIQHHII")
FIXED_BYTES = _FIXED.size
_CRC_OFFSET = 16
MAX_RECORD_BYTES = 64 * 2**20  # 14 million tokens: a larger length field is damage, not a document

_KEY = re.compile(r"[0-9A-Za-z_-]{1,128}")


def valid_key(key: str) -> bool:
    """True for 1 to 128 letters, digits, '_' or '-': a key becomes a file name."""
    return isinstance(key, str) and _KEY.fullmatch(key) is not None


def valid_namespace(namespace: str) -> bool:
    """True for a name that the protocol allows: it becomes a folder name."""
    return isinstance(namespace, str) and NAMESPACE.fullmatch(namespace) is not None


class PageError(Exception):
    """A record or page that must not be used. ``reason`` is a counter's label, listed in README.md."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class PageLayout:
    """Model, rank and shape that pages must have for this process to use them."""

    fingerprint: str
    rank: int
    world: int
    layers: int
    kv_heads: int
    head_dim: int
    block: int
    dtype_code: int
    page_bytes: int


@dataclass(frozen=True)
class Record:
    """A document's record: key, namespace, token ids (int32), the CRC-32 of every page (uint32), and length
    and CRC-32 of its summary.
    """

    key: str
    namespace: str
    token_ids: array[int]
    crcs: array[int]
    record_bytes: int
    page_bytes: int
    summary_bytes: int = 0
    summary_crc: int = 0

    @property
    def n_pages(self) -> int:
        return len(self.crcs)

    @property
    def file_bytes(self) -> int:
        return self.summary_start + self.summary_bytes

    @property
    def summary_start(self) -> int:
        """Offset of the summary in a document file."""
        return self.record_bytes + self.n_pages * self.page_bytes


def token_array(token_ids: Any) -> array[int]:
    """Convert a sequence of ints to an int32 array. Raises ValueError for an id that does not fit."""
    if isinstance(token_ids, array) and token_ids.typecode == "i":
        return token_ids
    if isinstance(token_ids, array) and token_ids.typecode == "q":
        wide = np.frombuffer(token_ids, dtype=np.int64)
        narrow = wide.astype(np.int32)
        if (narrow != wide).any():
            raise ValueError("token ids must be 32-bit integers")
        return array("i", narrow.tobytes())
    try:
        return array("i", token_ids)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids must be 32-bit integers: {error}") from error


def record_bytes(namespace: str, key: str, n_tokens: int, n_pages: int) -> int:
    """Size of a record in bytes, padding included."""
    used = FIXED_BYTES + 4 * n_pages + 4 * n_tokens + len(namespace.encode()) + len(key.encode())
    return -(-used // ALIGN) * ALIGN


def pages_of_file(size: int, namespace: str, key: str, *, block: int, page_bytes: int) -> int:
    """Largest number of pages that a document file of ``size`` bytes can have; exact where its summary is
    smaller than a page.
    """

    def least_bytes(pages: int) -> int:
        return record_bytes(namespace, key, (pages - 1) * block + 1, pages) + pages * page_bytes

    pages = size // page_bytes
    while pages > 0 and least_bytes(pages) > size:
        pages -= 1
    return pages


def page_crc(key: str, block: int, data: Any) -> int:
    """CRC-32 of a page's bytes, seeded with its document and number, so that a misplaced page fails it."""
    return zlib.crc32(data, zlib.crc32(f"{key}/{block}".encode()))


def summary_crc(key: str, data: Any) -> int:
    """CRC-32 of a summary's bytes, seeded with its document."""
    return zlib.crc32(data, zlib.crc32(f"{key}/summary".encode()))


def digest(text: str) -> bytes:
    """SHA-256, 32 bytes."""
    return hashlib.sha256(text.encode()).digest()


def encode(
    key: str,
    namespace: str,
    token_ids: array[int],
    crcs: array[int],
    layout: PageLayout,
    summary: bytes = b"",
) -> bytes:
    """Encode a padded record with its own CRC. ``summary`` will follow the pages. Raises ValueError."""
    n_tokens, n_pages = len(token_ids), len(crcs)
    total = record_bytes(namespace, key, n_tokens, n_pages)
    if total > MAX_RECORD_BYTES:
        raise ValueError(f"a document of {n_tokens} tokens is too long for a record")
    if n_pages != -(-n_tokens // layout.block):
        raise ValueError(f"{n_tokens} tokens do not fill {n_pages} pages of {layout.block}")
    name, key_text = namespace.encode(), key.encode()
    fixed = _FIXED.pack(
        MAGIC,
        VERSION,
        total,
        0,
        layout.dtype_code,
        digest(layout.fingerprint),
        digest(key),
        *astuple(layout)[1:-2],  # rank to block
        n_tokens,
        n_pages,
        layout.page_bytes,
        len(name),
        len(key_text),
        len(summary),
        summary_crc(key, summary) if summary else 0,
    )
    data = bytearray(
        b"".join((fixed, _little_endian(crcs), _little_endian(token_ids), name, key_text)).ljust(total, b"\0")
    )
    struct.pack_into("<I", data, _CRC_OFFSET, zlib.crc32(data))
    return bytes(data)


def record_length(fixed: bytes) -> int:
    """Length of the record that starts with these ``FIXED_BYTES``. Raises PageError if they start none."""
    if len(fixed) < FIXED_BYTES:
        raise PageError("truncated", f"{len(fixed)} bytes, a record starts with {FIXED_BYTES}")
    magic, version, total = _FIXED.unpack(fixed[:FIXED_BYTES])[:3]
    if magic != MAGIC:
        raise PageError("magic", "not a document file of this project")
    if not OLDEST <= version <= VERSION:
        raise PageError("version", f"format version {version}, this program reads {OLDEST} to {VERSION}")
    if total % ALIGN or not FIXED_BYTES <= total <= MAX_RECORD_BYTES:
        raise PageError("record", f"an impossible record length of {total} bytes")
    return int(total)


def decode(data: bytes, *, layout: PageLayout | None, key: str | None = None) -> Record:
    """Decode and check the record in ``data`` (at least ``record_length`` bytes), in the order of README.md's
    table. Raises PageError unless it is whole and, where given, has this layout and key.
    """
    total = record_length(data[:FIXED_BYTES])
    if len(data) < total:
        raise PageError("truncated", f"{len(data)} bytes of a record of {total}")
    body = bytearray(data[:total])
    fixed = _FIXED.unpack_from(body)
    crc, dtype_code, fingerprint, key_digest, *shape = fixed[3:13]  # as in the middle of PageLayout
    n_tokens, n_pages, page_bytes, name_bytes, key_bytes, summary_bytes, summary = fixed[13:]
    block = shape[-1]
    struct.pack_into("<I", body, _CRC_OFFSET, 0)
    if zlib.crc32(body) != crc:
        raise PageError("record", "the record fails its CRC")
    if layout is not None:
        if fingerprint != digest(layout.fingerprint):
            raise PageError("fingerprint", "pages of another model, tokenizer or dtype")
        if (*shape, dtype_code, page_bytes) != astuple(layout)[1:]:
            raise PageError("shape", "pages of another shape, number of bits or tensor-parallel rank")
    at = FIXED_BYTES + 4 * (n_pages + n_tokens)
    if at + name_bytes + key_bytes > total or n_tokens < 1 or block < 1 or n_pages != -(-n_tokens // block):
        raise PageError("record", "the record's counts do not agree")
    tail = bytes(body[at : at + name_bytes + key_bytes])
    namespace, found_key = (part.decode(errors="replace") for part in (tail[:name_bytes], tail[name_bytes:]))
    if key_digest != digest(found_key) or (key is not None and found_key != key):
        raise PageError("key", "pages of another document")
    return Record(
        key=found_key,
        namespace=namespace,
        token_ids=_from_little_endian("i", bytes(body[FIXED_BYTES + 4 * n_pages : at])),
        crcs=_from_little_endian("I", bytes(body[FIXED_BYTES : FIXED_BYTES + 4 * n_pages])),
        record_bytes=total,
        page_bytes=page_bytes,
        summary_bytes=summary_bytes,
        summary_crc=summary,
    )


def _little_endian(values: array[int]) -> bytes:
    return struct.pack(f"<{len(values)}{values.typecode}", *values)


def _from_little_endian(typecode: str, data: bytes) -> array[int]:
    return array(typecode, struct.unpack(f"<{len(data) // 4}{typecode}", data))
