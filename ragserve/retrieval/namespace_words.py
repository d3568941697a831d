"""The words of namespaces, in bounded memory: 12 bytes a word.

Words are kept as they are written, without case, and without diacritics, too; the lexical index has only
stems. They are read from the change log: a question reads what is new, and a thread what is more than it can
wait for. Words of removed chunks stay until a tenth of the chunks is gone: the lexical index knows which are
there."""

from __future__ import annotations

import re
import threading
import time
import unicodedata
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ragserve.errors import RagserveError

if TYPE_CHECKING:
    from ragserve_index import IndexStore
    from ragserve_index.types import Position

LATIN = "a-z\u00df-\u00f6\u00f8-\u024f"
MIN_LETTERS, MAX_LETTERS = 4, 32
MAX_WORDS = 2**21  # of a namespace; of more, the rarest are forgotten
_MAX_ALL = 2**22  # of all namespaces; of more, those that were not asked about for longest
_MAX_NAMESPACES = 128
_AT_ONCE = 1024  # chunks read in one step, of which a question makes up to two
_PENDING = 4096  # words that are kept in a dictionary, which takes ten times as much; or a share of all
_PENDING_SHARE = 1 / 16
_STALE = 0.1
_REST = 1.0  # pause of the reading thread, as a share of the time that it read: half a core is left

_WORDS = re.compile(f"[{LATIN}]{{{MIN_LETTERS},}}")


def folded(text: str) -> str:
    """The text in lower case, its Latin letters without diacritics."""
    text = text.lower()
    if text.isascii():
        return text
    return "".join(c for c in unicodedata.normalize("NFD", text) if not unicodedata.combining(c))


class WordTable:
    """Numbers of chunks by word, for words of 4 to 32 Latin letters. Hashes of 64 bits stand for the words.
    One thread may add while others read."""

    def __init__(self) -> None:
        self._merged = np.empty(0, np.int64), np.empty(0, np.uint32)  # ascending hashes, counts
        self._pending: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._merged[0]) + len(self._pending)

    def add(self, texts: Iterable[str]) -> None:
        """Count the words of chunks."""
        for text in texts:
            text = unicodedata.normalize("NFC", text).lower()
            forms = (text,) if text.isascii() else (text, folded(text))
            self._pending.update({w for form in forms for w in _WORDS.findall(form) if len(w) <= MAX_LETTERS})
        if len(self._pending) > max(_PENDING, _PENDING_SHARE * len(self._merged[0])):
            self._merge()

    def counts(self, words: Sequence[str]) -> list[int]:
        """The number of chunks that had each of the words, given in lower case, and folded or not."""
        (hashes, counts), pending = self._merged, self._pending
        found = np.zeros(len(words), np.int64)
        if len(hashes):
            wanted = np.fromiter(map(hash, words), np.int64, len(words))
            at = np.minimum(np.searchsorted(hashes, wanted), len(hashes) - 1)
            found = np.where(hashes[at] == wanted, counts[at], 0)
        return [int(n) + pending.get(word, 0) for n, word in zip(found, words, strict=True)]

    def _merge(self) -> None:
        pending = self._pending
        hashes = np.fromiter(map(hash, pending), np.int64, len(pending))
        counts = np.fromiter(pending.values(), np.uint32, len(pending))
        merged, places = np.unique(np.concatenate([self._merged[0], hashes]), return_inverse=True)
        total = np.bincount(places, np.concatenate([self._merged[1], counts])).astype(np.uint32)
        if len(merged) > MAX_WORDS:
            frequent = np.sort(np.argpartition(total, -MAX_WORDS)[-MAX_WORDS:])
            merged, total = merged[frequent], total[frequent]
        self._merged, self._pending = (merged, total), Counter()


class JointTable:
    """The word tables of several namespaces as one."""

    def __init__(self, tables: Sequence[WordTable]) -> None:
        self._tables = tables

    def counts(self, words: Sequence[str]) -> list[int]:
        """See `WordTable.counts`."""
        return [sum(each) for each in zip(*(table.counts(words) for table in self._tables), strict=True)]


@dataclass(slots=True)
class _ReadSoFar:
    namespace_id: int
    table: WordTable = field(default_factory=WordTable)
    position: Position = (0, 0)
    n_read: int = 0
    is_complete: bool = False
    thread: threading.Thread | None = None

    @property
    def is_being_read(self) -> bool:
        return self.thread is not None and self.thread.is_alive()


class NamespaceWords:
    """The word tables of a store's namespaces. ``of`` is for one thread at a time; ``close`` ends the
    readers."""

    def __init__(self, store: IndexStore) -> None:
        self._store = store
        self._readings: OrderedDict[str, _ReadSoFar] = OrderedDict()
        self._closing = threading.Event()

    def of(self, namespace: str) -> WordTable | None:
        """The words of a namespace; None while they are read for the first time. Raises NotFound."""
        reading = self._current(namespace)
        if reading.is_being_read:
            return reading.table if reading.is_complete else None
        if self._read(namespace, reading) and self._read(namespace, reading):
            reading.thread = threading.Thread(
                target=self._read_all, args=(namespace, reading), name="namespace-words", daemon=True
            )
            reading.thread.start()
        else:
            reading.is_complete = True
        return reading.table if reading.is_complete else None

    def wait(self, namespace: str) -> None:
        """Return when a namespace has been read."""
        while self.of(namespace) is None:
            thread = self._readings[namespace].thread
            if thread is not None:
                thread.join()

    def close(self) -> None:
        self._closing.set()
        for reading in self._readings.values():
            if reading.thread is not None:
                reading.thread.join()

    def _current(self, namespace: str) -> _ReadSoFar:
        """The reading of the namespace as it is now, begun anew if it was dropped or much of it is gone."""
        reading = self._readings.get(namespace)
        now = self._store.added_chunks(namespace, (0, 0), 0)  # its id and size
        gone = 0 if reading is None else reading.n_read - now.n_chunks
        if (
            reading is None
            or reading.namespace_id != now.namespace_id
            or (gone > _STALE * reading.n_read and not reading.is_being_read)
        ):
            reading = self._readings[namespace] = _ReadSoFar(now.namespace_id)
        self._readings.move_to_end(namespace)
        while len(self._readings) > 1 and (
            len(self._readings) > _MAX_NAMESPACES
            or sum(len(each.table) for each in self._readings.values()) > _MAX_ALL
        ):
            self._readings.popitem(last=False)
        return reading

    def _read(self, namespace: str, reading: _ReadSoFar) -> bool:
        """Read the next chunks; False if there are none."""
        added = self._store.added_chunks(namespace, reading.position, _AT_ONCE)
        if added.namespace_id != reading.namespace_id or not added.n_added:
            return False
        reading.table.add(f"{chunk.title} {chunk.text}" for chunk in added.chunks)
        reading.n_read += added.n_added
        reading.position = added.position
        return True

    def _read_all(self, namespace: str, reading: _ReadSoFar) -> None:
        try:
            while True:
                started = time.perf_counter()
                if not self._read(namespace, reading):
                    break
                if self._closing.wait(_REST * (time.perf_counter() - started)):
                    return
                if self._readings.get(namespace) is not reading:
                    return
        except RagserveError:  # dropped, or the store is closing: the next question reads on
            return
        reading.is_complete = True
