"""A record says exactly what was written, or it is refused."""

from __future__ import annotations

import struct
import zlib
from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.documents.pages import page_format
from sglang_ext.documents.pages.page_format import PageError, PageLayout

LAYOUT = PageLayout(
    fingerprint="model-a",
    rank=0,
    world=1,
    layers=2,
    kv_heads=2,
    head_dim=4,
    block=4,
    dtype_code=1,
    page_bytes=512,
)
KEY = "ab" * 32
names = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")
token_lists = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=3000)


def _encode(
    token_ids: list[int], namespace: str = "default", key: str = KEY, layout: PageLayout = LAYOUT
) -> bytes:
    pages = -(-len(token_ids) // layout.block)
    crcs = array("I", [(i * 2654435761) % 2**32 for i in range(pages)])
    return page_format.encode(key, namespace, array("i", token_ids), crcs, layout)


@given(token_lists, names, st.from_regex(r"\A[0-9a-f]{16,64}\Z"), st.integers(0, 4096))
def test_record_comes_back_as_it_was_written(
    token_ids: list[int], namespace: str, key: str, more: int
) -> None:
    data = _encode(token_ids, namespace, key)
    record = page_format.decode(data + b"\xff" * more, layout=LAYOUT, key=key)
    assert (record.key, record.namespace, list(record.token_ids)) == (key, namespace, token_ids)
    assert record.n_pages == -(-len(token_ids) // LAYOUT.block)
    assert (
        record.record_bytes
        == len(data)
        == page_format.record_bytes(namespace, key, len(token_ids), record.n_pages)
    )
    assert len(data) % page_format.ALIGN == 0


@given(st.integers(1, 5000), names, st.sampled_from([512, 4096, 163_840]))
def test_page_count_follows_from_the_file_size(n_tokens: int, namespace: str, page_bytes: int) -> None:
    pages = -(-n_tokens // 4)
    size = page_format.record_bytes(namespace, KEY, n_tokens, pages) + pages * page_bytes
    assert page_format.pages_of_file(size, namespace, KEY, block=4, page_bytes=page_bytes) == pages


@given(st.data())
def test_any_flipped_bit_is_refused(data: st.DataObject) -> None:
    record = bytearray(_encode(list(range(100))))
    bit = data.draw(st.integers(0, len(record) * 8 - 1))
    record[bit // 8] ^= 1 << bit % 8
    with pytest.raises(PageError):
        page_format.decode(bytes(record), layout=LAYOUT, key=KEY)


@given(st.integers(0, 4095))
def test_any_truncation_is_refused(length: int) -> None:
    with pytest.raises(PageError):
        page_format.decode(_encode([1, 2, 3])[:length], layout=LAYOUT, key=KEY)


@given(st.binary(min_size=0, max_size=600))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(PageError):
        page_format.decode(data.ljust(8192, b"\0"), layout=None)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"fingerprint": "model-b"}, "fingerprint"),
        ({"rank": 1, "world": 2}, "shape"),
        ({"layers": 3, "page_bytes": 768}, "shape"),
        ({"dtype_code": 3}, "shape"),
        ({"head_dim": 8, "kv_heads": 1}, "shape"),
    ],
)
def test_foreign_records_are_told_apart(other: dict[str, object], reason: str) -> None:
    with pytest.raises(PageError) as caught:
        page_format.decode(_encode([1, 2, 3]), layout=replace(LAYOUT, **other), key=KEY)  # type: ignore[arg-type]
    assert caught.value.reason == reason


def test_another_document_and_another_version_are_told_apart() -> None:
    with pytest.raises(PageError) as caught:
        page_format.decode(_encode([1, 2, 3], key="cd" * 32), layout=LAYOUT, key=KEY)
    assert caught.value.reason == "key"
    data = bytearray(_encode([1, 2, 3]))
    data[8] = page_format.VERSION + 1
    with pytest.raises(PageError) as caught:
        page_format.decode(bytes(data), layout=LAYOUT, key=KEY)
    assert caught.value.reason == "version"


def test_records_of_version_3_are_read() -> None:
    """They differ in nothing but the number."""
    data = bytearray(_encode([1, 2, 3]))
    data[8] = 3
    data[16:20] = bytes(4)
    struct.pack_into("<I", data, 16, zlib.crc32(data))
    assert list(page_format.decode(bytes(data), layout=LAYOUT, key=KEY).token_ids) == [1, 2, 3]


def test_a_page_in_anothers_place_fails_its_check() -> None:
    data = bytes(512)
    checks = {page_format.page_crc(key, block, data) for key in (KEY, "cd" * 32) for block in (0, 1)}
    assert len(checks) == 4


def test_impossible_documents_are_refused() -> None:
    with pytest.raises(ValueError, match="32-bit"):
        page_format.token_array([2**40])
    with pytest.raises(ValueError, match="do not fill"):
        page_format.encode(KEY, "default", array("i", [1, 2, 3]), array("I", [0, 0]), LAYOUT)
