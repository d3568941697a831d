"""A shared store that is Mooncake Store: memory of many machines behind one master.

A document is one object for its record and summary, and one for each page:

    ragserve/v3/<model digest>/<rank>-<world>/<namespace>/<document key>/{r, 0, 1 ...}

The record is stored last and carries every page's CRC, so an unfinished document is not found, and pages that
the store drops or overwrites are misses."""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from sglang_ext.documents.pages import page_format
from sglang_ext.documents.pages.page_format import PageLayout, Record
from sglang_ext.documents.remote.mooncake_client import MooncakeClient
from sglang_ext.documents.remote.remote_backend import RemoteBackend

MOST_PAGES = 1024
"""Pages of the longest document that is stored. Deletion names every page that a document may have: the
record that says how many there are may have been dropped before them."""
_LENGTHS = struct.Struct("<II")  # of the record and the summary


class MooncakeBackend(RemoteBackend):
    """Documents in Mooncake Store, by a process of our own (see `MooncakeClient`). Thread-safe."""

    def __init__(self, layout: PageLayout, options: Mapping[str, Any]) -> None:
        """``options``: see `mooncake_options`. Raises ValueError for wrong ones."""
        model = page_format.digest(layout.fingerprint).hex()[:32]
        self._layout = layout
        self._prefix = f"ragserve/v{page_format.OLDEST}/{model}/{layout.rank}-{layout.world}"
        self._client = MooncakeClient(options, layout.page_bytes)

    def find(self, key: str, namespace: str) -> Record | None:
        data = self._client.get(self._name(key, namespace, "r"))
        if data is None or len(data) < _LENGTHS.size:
            return None
        length, _ = _LENGTHS.unpack_from(data)
        return page_format.decode(data[_LENGTHS.size : _LENGTHS.size + length], layout=self._layout, key=key)

    def write(self, record: Record, data: bytes, pages: Sequence[torch.Tensor], summary: bytes) -> bool:
        if record.n_pages > MOST_PAGES:
            return False
        names = self._pages(record, range(record.n_pages))
        return self._client.put_pages(names, pages) and self._client.put(
            self._name(record.key, record.namespace, "r"),
            _LENGTHS.pack(len(data), len(summary)) + data + summary,
        )

    def replace_summary(self, old: Record, record: Record, data: bytes, summary: bytes) -> bool:
        name = self._name(record.key, record.namespace, "r")
        if self._client.get(name) is None:
            return False
        return self._client.put(name, _LENGTHS.pack(len(data), len(summary)) + data + summary)

    def read(self, record: Record, blocks: Sequence[int], targets: Sequence[torch.Tensor]) -> bool:
        return self._client.get_pages(self._pages(record, blocks), targets)

    def read_summary(self, record: Record) -> bytes | None:
        data = self._client.get(self._name(record.key, record.namespace, "r"))
        if data is None or len(data) < _LENGTHS.size:
            return None
        length, size = _LENGTHS.unpack_from(data)
        return data[_LENGTHS.size + length : _LENGTHS.size + length + size]

    def remove(self, keys: Collection[str], namespace: str) -> None:
        for key in keys:
            parts = ["r", *map(str, range(MOST_PAGES))]
            self._client.remove([self._name(key, namespace, part) for part in parts])

    def remove_namespace(self, namespace: str) -> None:
        self._client.remove_matching(f"{self._prefix}/{namespace}/")

    def clear(self) -> None:
        self._client.remove_matching(f"{self._prefix}/")

    def check(self) -> None:
        self._client.check()

    def stat(self) -> dict[str, Any]:
        return {"path": self._client.address}

    def close(self) -> None:
        self._client.close()

    def _name(self, key: str, namespace: str, part: str) -> str:
        return f"{self._prefix}/{namespace}/{key}/{part}"

    def _pages(self, record: Record, blocks: Sequence[int]) -> list[str]:
        return [self._name(record.key, record.namespace, str(block)) for block in blocks]
