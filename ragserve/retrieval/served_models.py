"""Our embedder and CrossEncoders as services: clients' texts, a few at a time, beside the server's own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from ragserve.retrieval.embedder import Embedder
from ragserve.retrieval.reranker import CrossEncoderReranker

if TYPE_CHECKING:
    from ragserve.retrieval.embedder import AnyEmbedder
    from ragserve.retrieval.reranker import Reranker

_ORGANISATION = "sentence-transformers/"
_TEXTS, _CHARS = 16, 2**14  # of a slice: a question waits for one slice of each request at most
Spend = Callable[[int], None]
Side = Literal["query", "document"]


class ServedModels:
    """Requests take turns slice by slice; one that is cancelled ends after its slice. Belongs to one event
    loop. A remote model is not served: whoever wants it asks it.

    ``spend`` of a call gets numbers of tokens, as they are read."""

    def __init__(self, embedder: AnyEmbedder, rerankers: Mapping[str, Reranker], default: str) -> None:
        self._embedder = embedder if isinstance(embedder, Embedder) else None
        self._rerankers = {
            name: each for name, each in rerankers.items() if isinstance(each, CrossEncoderReranker)
        }
        self._default = default
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="embed-served")

    @property
    def embedders(self) -> list[str]:
        """Names of the embedders that are served: one or none."""
        return [] if self._embedder is None else [self._embedder.model]

    @property
    def rerankers(self) -> list[str]:
        """Names of the rerankers that are served."""
        return list(self._rerankers)

    def embedder(self, name: str) -> Embedder | None:
        """The embedder of a name, with or without its organisation."""
        own = self._embedder
        return own if own is not None and name in (own.model, f"{_ORGANISATION}{own.model}") else None

    def reranker(self, name: str | None) -> CrossEncoderReranker | None:
        """The reranker of a name; of none, the server's default, or the only one."""
        if name is not None:
            return self._rerankers.get(name)
        only = list(self._rerankers.values()) if len(self._rerankers) == 1 else [None]
        return self._rerankers.get(self._default, only[0])

    async def embed(
        self, embedder: Embedder, texts: Sequence[str], side: Side | None, spend: Spend
    ) -> npt.NDArray[np.float32]:
        """Embed texts, [n, dim], L2-normalised: with the model's prompt of a ``side``, or without one."""
        loop, parts = asyncio.get_running_loop(), []
        for some in _slices(texts):
            part, tokens = await loop.run_in_executor(self._thread, _embedded, embedder, some, side)
            spend(tokens)
            parts.append(part)
        return np.concatenate(parts)

    async def score(
        self, reranker: CrossEncoderReranker, query: str, texts: Sequence[str], spend: Spend
    ) -> list[float]:
        """Score texts for a query, higher is better. The query's tokens count once for each text."""
        scores: list[float] = []
        own = await reranker.count_tokens([query])
        for some in _slices(texts):
            spend(own * len(some) + await reranker.count_tokens(some))
            scores += await reranker.score_texts(query, some)
        return scores

    async def close(self) -> None:
        """Stop the thread after its slice."""
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)


def _embedded(embedder: Embedder, texts: list[str], side: Side | None) -> tuple[npt.NDArray[np.float32], int]:
    tokens = embedder.count_tokens(texts)
    if side == "query":
        return embedder.encode_queries(texts), tokens
    return embedder.encode(texts, prompt=None if side == "document" else ""), tokens


def _slices(texts: Sequence[str]) -> Iterator[list[str]]:
    some: list[str] = []
    chars = 0
    for text in texts:
        if some and (len(some) == _TEXTS or chars + len(text) > _CHARS):
            yield some
            some, chars = [], 0
        some.append(text)
        chars += len(text)
    yield some
