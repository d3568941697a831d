"""People's changes of chunks: a text is checked as ingestion checks one, counted and embedded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from ragserve.config import Settings
from ragserve.errors import Conflict, InvalidRequest, TooManyRequests
from ragserve.ingest.chunk_embedding import DocumentEmbedder, embed_chunks
from ragserve.ingest.parsers.base import has_words, joined_notes, without_controls
from ragserve.ingest.tokenizer import Counter, TokenizerSource
from ragserve.retrieval.embedder import flag_of
from ragserve.retrieval.remote_embedder import RefusedText, RemoteEmbedder
from ragserve_index import IndexStore
from ragserve_index.chunk_changes import ChunkState, LostCorrection, NewText
from ragserve_index.text_forms import storable
from ragserve_index.types import Document, NewChunk
from ragserve_index.viewers import EVERYTHING, Viewer

MOST_AT_ONCE = 2
"""Texts that a remote embedder is given at a time: each waits in a thread of the server."""
_NAMED_LOST = 3  # in a note
_QUOTED = 40  # characters of each


class ChunkEditor:
    """Thread-safe. ``embedder`` and the tokenizer, by name, are loaded when a text first needs them."""

    def __init__(
        self, settings: Settings, store: IndexStore, embedder: Callable[[], DocumentEmbedder], tokenizer: str
    ) -> None:
        self._settings = settings
        self._store = store
        self._embedder = embedder
        self._name = tokenizer
        self._lock = threading.Lock()
        self._free = threading.BoundedSemaphore(MOST_AT_ONCE)
        self._source: TokenizerSource | None = None
        self._counter: Counter | None = None

    def tokenizer(self) -> TokenizerSource:
        """The tokenizer. Raises ``InvalidRequest`` if there is none."""
        with self._lock:
            if self._source is None:
                self._source = TokenizerSource.load(self._name)
            return self._source

    def count(self, text: str) -> int:
        """Tokens of a text."""
        return self._counted([text])[0]

    def change(
        self,
        namespace: str,
        doc_id: str,
        ordinal: int,
        version: str,
        *,
        text: str | None = None,
        disabled: bool | None = None,
        viewer: Viewer = EVERYTHING,
    ) -> ChunkState:
        """Change a chunk of a viewer's document as `ChunkChanges.change` does.

        Raises ``NotFound``, ``Conflict`` (another version, another embedder than the namespace's),
        ``InvalidRequest`` for a text that ingestion would not take, or of more tokens than a chunk. With a
        remote embedder also ``ModelUnavailable``, and ``TooManyRequests`` beside `MOST_AT_ONCE` others."""
        changes = self._store.chunk_changes.seen_by(viewer)
        now = changes.state(namespace, doc_id, ordinal)
        new = None
        if text is not None and now.version == version:
            text = storable(without_controls(text))
            if text != now.chunk.text:
                new = self._new_text(namespace, now, text)
        return changes.change(namespace, doc_id, ordinal, version, text=new, disabled=disabled)

    def _new_text(self, namespace: str, now: ChunkState, text: str) -> NewText:
        if not has_words(text):
            hint = "To take a chunk out of every search, disable it."
            message = "The text of a chunk needs a letter or a digit."
            raise InvalidRequest(message, hint=hint, code="empty_chunk", param="text")
        n_tokens, most = self.count(text), self._settings.chunk_tokens
        if n_tokens > most and text != now.original:
            raise InvalidRequest(
                f"The text has {n_tokens:,} tokens; a chunk has {most:,} at most (chunk_tokens).",
                hint="Shorten it, or split it over the chunks beside it.",
                code="chunk_too_long",
                param="text",
            )
        embedder = self._embedder()
        if not isinstance(embedder, RemoteEmbedder):
            return self._embedded_text(embedder, namespace, now, text, n_tokens)
        if not self._free.acquire(blocking=False):
            raise TooManyRequests(
                f"{MOST_AT_ONCE} corrections wait for the remote embedder already.",
                hint="Send it again when they are done.",
                code="corrections_busy",
            )
        try:
            return self._embedded_text(embedder.awaited(), namespace, now, text, n_tokens)
        except RefusedText as error:
            message = f"The text cannot be embedded: {error}."
            raise InvalidRequest(message, code="text_refused", param="text") from None
        finally:
            self._free.release()

    def _embedded_text(
        self, embedder: DocumentEmbedder, namespace: str, now: ChunkState, text: str, n_tokens: int
    ) -> NewText:
        info = self._store.namespace(namespace)
        if (info.embedder, info.dim) != (embedder.name, embedder.dim):
            raise Conflict(
                f"Namespace {namespace!r} is embedded with {info.embedder!r}, not with {embedder.name!r}.",
                hint=f"Use {flag_of(info.embedder)}.",
                code="embedder_mismatch",
                param="embedder",
            )
        return _embedded(embedder, now.chunk.title, [(text, n_tokens)], self._settings.sentence_bytes)[0]

    def _counted(self, texts: list[str]) -> list[int]:
        source = self.tokenizer()
        with self._lock:
            if self._counter is None:
                self._counter = Counter(source)
            return self._counter.counts(texts)

    def prepare(self, namespace: str, titles: Mapping[str, str]) -> Callable[[Sequence[Document]], list[str]]:
        """Before documents are written again, ``titles`` by source: embed their corrections as parts of their
        new editions. Returns the function that notes, for the report, what became of them: a text for each
        written document, mostly empty."""
        changes = self._store.chunk_changes
        before = changes.rows_of(namespace, list(titles))
        for source, rows in before.items():
            texts = [row.text for row in rows]
            counted = list(zip(texts, self._counted(texts), strict=True))
            new = _embedded(self._embedder(), titles[source], counted, self._settings.sentence_bytes)
            changes.embed_again(list(zip(rows, new, strict=True)))

        def notes(written: Sequence[Document]) -> list[str]:
            if not before:
                return [""] * len(written)
            since = min(document.updated_at for document in written)
            lost = changes.lost(namespace, [document.doc_id for document in written], since=since)
            kept = changes.rows_of(namespace, list(titles))
            return [
                _note(
                    sum(row.lost_at is None for row in kept.get(each.source, ())), lost.get(each.doc_id, ())
                )
                for each in written
            ]

        return notes


def embed_corrections(
    store: IndexStore,
    embedder: DocumentEmbedder,
    namespace: str,
    titles: Mapping[str, str],
    sentence_bytes: int,
) -> None:
    """Embed the corrections of documents again, ``titles`` by source."""
    for source, rows in store.chunk_changes.rows_of(namespace, list(titles)).items():
        counted = [(row.text, row.n_tokens) for row in rows]
        new = _embedded(embedder, titles[source], counted, sentence_bytes)
        store.chunk_changes.embed_again(list(zip(rows, new, strict=True)))


def _embedded(
    embedder: DocumentEmbedder, title: str, texts: Sequence[tuple[str, int]], sentence_bytes: int
) -> list[NewText]:
    """``texts``: each with its tokens."""
    chunks = [NewChunk(text, 0, len(text), n_tokens) for text, n_tokens in texts]
    ((own, vectors),) = embed_chunks(embedder, [(title, chunks)], sentence_bytes, lambda: False)
    return [
        NewText(chunk.text, chunk.n_tokens, vector, chunk.sentences)
        for chunk, vector in zip(own, vectors, strict=True)
    ]


def _note(kept: int, lost: Sequence[LostCorrection]) -> str:
    """The note for the report of a job."""
    named = [f"chunk {one.ordinal} ({_quoted(one.original)})" for one in lost[:_NAMED_LOST]]
    more = f" and {len(lost) - _NAMED_LOST:,} more" if len(lost) > _NAMED_LOST else ""
    return joined_notes(
        f"{_corrections(kept)} kept" if kept else "",
        f"{_corrections(len(lost))} lost, because the file no longer has the text: {', '.join(named)}{more}"
        if lost
        else "",
    )


def _corrections(n: int) -> str:
    return f"{n:,} {'correction' if n == 1 else 'corrections'} of chunks"


def _quoted(text: str) -> str:
    line = " ".join(text.split())
    return f"“{line[:_QUOTED].rstrip()}{'…' if len(line) > _QUOTED else ''}”"
