"""BM25 of one large namespace by tantivy, whose search skips what cannot be among the best (block-max WAND).
FTS5 and Postgres cannot: they score every match.

The index is a folder, derived from the registry. It follows the change log as the vector index does. A commit
of tantivy is atomic and has the namespace's version in a document of its own, so a killed process leaves an
index of an earlier version, which is caught up with. It answers for exactly one version, or not at all."""

from __future__ import annotations

import json
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np

from ragserve_index import registry
from ragserve_index.bm25 import WordScores, large_weight
from ragserve_index.database import Connection
from ragserve_index.lexical_search import MAX_TERMS, MAX_WORDS, Scored
from ragserve_index.structures.base import IdSelection
from ragserve_index.word_cutting import VERSION, distinct_words, words

_FORMAT = f"2, words {VERSION}"
_STATE_ID = 0  # of the document with the version; ids of chunks start at 1
_HEAP = 64 << 20  # bytes of words in memory before tantivy writes a segment
_FEW = 256  # a filter that selects less than this part of a namespace is looked up by ids
_MAGIC = 1337  # at the end of tantivy's files
_FOOT = struct.Struct("<II")
_ADDED = (
    "SELECT c.chunk_id, d.title, c.text FROM vectors v"
    " CROSS JOIN chunks c CROSS JOIN documents d WHERE v.namespace_id = ? AND v.version > ?"
    " AND c.chunk_id BETWEEN v.first_id AND v.first_id + v.n - 1 AND d.id = c.document"
)


class Unusable(Exception):
    """The folder has no whole index of this namespace; the message says why. Internal: it is built again."""


@cache
def load_tantivy() -> Any:
    """Import tantivy at the first use."""
    import tantivy

    return tantivy


@cache
def _by_blanks() -> Any:
    tantivy = load_tantivy()
    return tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.whitespace()).build()


def folder_of(directory: Path, namespace_id: int) -> Path:
    """Path of a namespace's index."""
    return directory / f"ns-{namespace_id:06d}.words"


class LexicalIndex:
    """Thread-safe. ``version`` is the committed version that it answers for; -1 for none. Who changes the
    index holds ``updating``."""

    def __init__(self, path: Path, namespace_uid: str) -> None:
        self.updating = RLock()
        self._path = path
        self._uid = namespace_uid
        self._removed = False
        self._index: Any = None
        self._writer: Any = None
        self._seen: tuple[int, Any] = (-1, None)  # version and searcher, replaced together

    @property
    def version(self) -> int:
        return self._seen[0]

    # following the registry

    def open(self, connection: Connection, ns: registry.Namespace) -> None:
        """Open the folder, if it is there, or look for a newer commit of another process. Raises Unusable."""
        with self.updating:
            if self._removed or self._writer is not None or not (self._path / "meta.json").exists():
                return
            if self._index is None:
                _check_files(self._path)
                self._index = self._opened()
            self._index.reload()
            self._seen = self._committed(connection, ns)

    def follow(self, connection: Connection, ns: registry.Namespace, stopped: Callable[[], bool]) -> None:
        """Bring the index to ``ns``, the version of this read transaction, with one commit; build it where it
        is of no use. Raises Unusable, and ValueError or OSError of tantivy, among others if another process
        writes it. Does nothing if ``stopped`` says so meanwhile."""
        with self.updating:
            if self._removed or self.version >= ns.version:
                return
            if self._index is None:
                shutil.rmtree(self._path, ignore_errors=True)
                self._path.mkdir(parents=True)
                self._index = self._opened()
            if self._writer is None:
                self._writer = self._index.writer(heap_size=_HEAP, num_threads=1)
            try:
                if not self._change(connection, ns, stopped):
                    self._writer.rollback()
                    return
                self._writer.commit()
            except BaseException:
                self._writer = None  # with what it has not committed
                raise
            self._index.reload()
            self._seen = ns.version, self._index.searcher()

    def _change(self, connection: Connection, ns: registry.Namespace, stopped: Callable[[], bool]) -> bool:
        tantivy, writer, version = load_tantivy(), self._writer, self.version
        if version < 0:
            writer.delete_all_documents()
        else:
            gone = [*self._gone(connection, ns), _STATE_ID]
            # delete_documents_by_term takes numbers for signed ones, and finds nothing
            writer.delete_documents_by_query(tantivy.Query.term_set_query(self._index.schema, "id", gone))
        for chunk_id, title, text in connection.stream(_ADDED, (ns.id, version)):
            document = tantivy.Document()
            document.add_unsigned("id", chunk_id)
            document.add_text("words", " ".join(words(title) + words(text)))
            writer.add_document(document)
            if self._removed or stopped():
                return False
        stamp = registry.stamp_of(connection, ns.id, ns.version)
        state = {"format": _FORMAT, "uid": self._uid, "version": ns.version, "stamp": stamp}
        document = tantivy.Document()
        document.add_unsigned("id", _STATE_ID)
        document.add_text("state", json.dumps(state))
        writer.add_document(document)
        return True

    def _gone(self, connection: Connection, ns: registry.Namespace) -> list[int]:
        """Chunks in the index that the namespace has no more: from the change log, or by comparing ids where
        the log does not reach back that far."""
        version, searcher = self._seen
        if version >= ns.log_floor:
            removed = connection.execute(
                "SELECT first_id, n FROM removals WHERE namespace_id = ? AND version > ?", (ns.id, version)
            )
            return registry.expand(removed.fetchall()).tolist()
        ranges = connection.execute(
            "SELECT first_id, n_chunks FROM documents WHERE namespace_id = ? AND n_chunks > 0", (ns.id,)
        )
        there = _hits(searcher, load_tantivy().Query.all_query(), searcher.num_docs)
        return np.setdiff1d([chunk for chunk, _ in there], registry.expand(ranges.fetchall())).tolist()

    def _opened(self) -> Any:
        tantivy = load_tantivy()
        schema = tantivy.SchemaBuilder()
        schema.add_text_field("words", tokenizer_name="ragserve", index_option="freq")
        schema.add_unsigned_field("id", indexed=True, fast=True)
        schema.add_text_field("state", stored=True, tokenizer_name="raw", index_option="basic")
        try:
            index = tantivy.Index(schema.build(), path=str(self._path))
        except (ValueError, OSError) as error:
            raise Unusable(str(error)) from error
        index.register_tokenizer("ragserve", _by_blanks())
        return index

    def _committed(self, connection: Connection, ns: registry.Namespace) -> tuple[int, Any]:
        """The version that the folder has, and its searcher. Raises Unusable for one of another registry."""
        searcher = self._index.searcher()
        tantivy = load_tantivy()
        query = tantivy.Query.term_query(self._index.schema, "id", _STATE_ID)
        hits = searcher.search(query, 1).hits
        if not hits:
            return -1, None  # nothing was committed yet
        state = json.loads(searcher.doc(hits[0][1]).get_first("state"))
        version = int(state["version"])
        stamp = registry.stamp_of(connection, ns.id, version)
        if (state["format"], state["uid"]) != (_FORMAT, self._uid) or stamp is None:
            return -1, None
        if stamp != state["stamp"]:
            raise Unusable(f"its version {version} is not the registry's")
        return version, searcher

    # searching

    def search(self, text: str, k: int, selection: IdSelection | None, version: int) -> Scored | None:
        """The k best chunks (of the selection) that share a word with the text; None if the index is not at
        this version.

        Words in more than half of the chunks add nothing, as in FTS5, as long as others find k chunks."""
        at, searcher = self._seen
        if at != version:
            return None
        wanted = distinct_words(text, MAX_WORDS)
        counted = sorted((n, word) for word in wanted if (n := searcher.doc_freq("words", word)))[:MAX_TERMS]
        if not counted or (selection is not None and not len(selection)):
            return []
        every = [word for _, word in counted]
        telling = [word for n, word in counted if 2 * n < searcher.num_docs]
        found = self._best(searcher, telling, k, selection) if telling else []
        return found if len(found) >= k or telling == every else self._best(searcher, every, k, selection)

    def _best(self, searcher: Any, wanted: Sequence[str], k: int, selection: IdSelection | None) -> Scored:
        query = self._any(wanted)
        if selection is None:
            return _sorted(_hits(searcher, query, k), k)
        share = len(selection) / searcher.num_docs
        if share * _FEW < 1:
            return _sorted(_hits(searcher, self._within(query, selection.ids.tolist()), k), k)
        limit = int(2 * k / share) + 1
        while True:
            found = _hits(searcher, query, limit)
            inside = np.isin([chunk for chunk, _ in found], selection.ids)
            chosen = [one for one, fits in zip(found, inside.tolist(), strict=True) if fits]
            if len(chosen) >= min(k, len(selection)) or len(found) < limit:
                return _sorted(chosen, k)
            limit *= 4

    def word_scores(self, wanted: Sequence[str], ids: Sequence[int], version: int) -> list[WordScores] | None:
        """BM25 of these chunks for each word alone; None if the index is not at this version."""
        at, searcher = self._seen
        if at != version:
            return None
        found: list[WordScores] = []
        for word in wanted:
            n = searcher.doc_freq("words", word)
            hits = _hits(searcher, self._within(self._any([word]), ids), len(ids)) if n and ids else []
            found.append(WordScores(large_weight(searcher.num_docs, n), dict(hits)))
        return found

    def _any(self, wanted: Sequence[str]) -> Any:
        tantivy, schema = load_tantivy(), self._index.schema
        terms = (tantivy.Query.term_query(schema, "words", word, "freq") for word in wanted)
        return tantivy.Query.boolean_query([(tantivy.Occur.Should, term) for term in terms])

    def _within(self, query: Any, ids: Sequence[int]) -> Any:
        tantivy = load_tantivy()
        chosen = tantivy.Query.term_set_query(self._index.schema, "id", ids)
        unscored = tantivy.Query.const_score_query(chosen, 0.0)
        return tantivy.Query.boolean_query([(tantivy.Occur.Must, unscored), (tantivy.Occur.Must, query)])

    # maintenance

    def n_chunks(self) -> int:
        """Number of chunks in it."""
        return int(self._seen[1].num_docs) - 1

    def close(self) -> None:
        """Let other processes write the folder."""
        with self.updating:
            self._index = self._writer = None
            self._seen = (-1, None)

    def remove(self) -> None:
        """Remove the folder, for good: this object has no index any more."""
        self._removed = True  # ends an update
        with self.updating:
            self.close()
            shutil.rmtree(self._path, ignore_errors=True)


def _hits(searcher: Any, query: Any, limit: int) -> Scored:
    hits = searcher.search(query, limit, count=False).hits
    ids = searcher.fast_field_values("id", [address for _, address in hits])
    return [(chunk, score) for chunk, (score, _) in zip(ids, hits, strict=True)]


def _sorted(found: Scored, k: int) -> Scored:
    return sorted(found, key=lambda one: (-one[1], one[0]))[:k]


def _check_files(path: Path) -> None:
    """Compare the checksum of every file of the last commit, which tantivy's reader trusts. Raises
    Unusable."""
    try:
        meta = json.loads((path / "meta.json").read_bytes())
        for file in _files(path, [each["segment_id"].replace("-", "") for each in meta["segments"]]):
            content = file.read_bytes()
            length, magic = _FOOT.unpack(content[-_FOOT.size :])
            end = len(content) - _FOOT.size - length
            footer = json.loads(content[end : -_FOOT.size])
            if magic != _MAGIC or zlib.crc32(memoryview(content)[:end]) != footer["crc"]:
                raise Unusable(f"{file.name} is damaged")
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise Unusable(f"it cannot be read: {error}") from error


def _files(path: Path, segments: Sequence[str]) -> Iterator[Path]:
    for segment in segments:
        files = sorted(path.glob(f"{segment}.*"))
        if not files:
            raise Unusable(f"segment {segment} is missing")
        yield from files
