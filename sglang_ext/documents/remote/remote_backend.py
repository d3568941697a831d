"""What a store that engines share has to do, and the error of one that cannot be reached."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any

import torch

from sglang_ext.documents.pages.page_format import Record


class StoreAway(OSError):
    """The store does not answer. Nothing is known about what it has, and nothing was confirmed."""


class RemoteBackend(ABC):
    """Whole documents of one rank in a store that other engines use, too.

    A document's name there has the page format's version, the model's digest, the rank and the namespace, so
    nobody finds a document of another model or namespace. Every method may block, is called from several
    threads and never from the scheduler's, and raises StoreAway. What the store drops is a miss."""

    @abstractmethod
    def find(self, key: str, namespace: str) -> Record | None:
        """The checked record; None for a miss. Raises PageError for a record that cannot be used."""

    @abstractmethod
    def write(self, record: Record, data: bytes, pages: Sequence[torch.Tensor], summary: bytes) -> bool:
        """Store a document, which nobody finds before all of it is there; False where it was refused. Raises
        OSError where the store's disk is full.

        Args:
            data: The encoded record.
            pages: All pages, uint8 [page_bytes] each.
            summary: Bytes kept with them; empty for none.
        """

    @abstractmethod
    def replace_summary(self, old: Record, record: Record, data: bytes, summary: bytes) -> bool:
        """Give a stored document another record and summary; False where it is gone. Raises OSError as
        ``write``."""

    @abstractmethod
    def read(self, record: Record, blocks: Sequence[int], targets: Sequence[torch.Tensor]) -> bool:
        """Fill the targets (uint8 [page_bytes]), unchecked; False where a page is gone."""

    @abstractmethod
    def read_summary(self, record: Record) -> bytes | None:
        """The summary's bytes, unchecked; None where it is gone."""

    @abstractmethod
    def remove(self, keys: Collection[str], namespace: str) -> None:
        """Delete documents. Nothing of them is in the store when this returns."""

    @abstractmethod
    def remove_namespace(self, namespace: str) -> None:
        """Delete all documents of a namespace, of this rank and model, whoever stored them."""

    @abstractmethod
    def clear(self) -> None:
        """Delete all documents of this rank and model, whoever stored them."""

    @abstractmethod
    def check(self) -> None:
        """Return if the store answers. Also what is to be done now and then, such as eviction."""

    def stat(self) -> dict[str, Any]:
        """JSON-safe figures."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Leave the store. What it has stays there, as far as it is not in this process's memory."""
