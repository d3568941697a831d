"""Rerank with a model behind a URL: by Cohere's ``/rerank`` (``URL#MODEL``), or by that of Text Embeddings
Inference, whose server has one model (``URL``)."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ragserve.retrieval.remote_calls import Patience, Refused, RemoteAddress, RemoteModel, parse_address
from ragserve.retrieval.reranker import check_cross_encoder, passage_texts

if TYPE_CHECKING:
    import httpx
    from pydantic import SecretStr

    from ragserve_index.types import Chunk

_TEXTS = {"cohere": 100, "tei": 32}  # of a call: what Cohere counts as one, and what TEI takes by default
_AT_ONCE = 4
_BYTES_A_TEXT = 2**16  # of an answer: some return the texts
UNNAMED = "remote"
_PROBE = "Passage."


def is_remote(name: str) -> bool:
    """Whether a setting names a reranker behind a URL."""
    return name.startswith(("http://", "https://"))


def address_of(name: str) -> RemoteAddress:
    """Read ``URL`` or ``URL#MODEL``. Raises InvalidRequest."""
    return parse_address(name, "/rerank", param="rerank", example="https://HOST/v1#MODEL")


def public_name(name: str) -> str:
    """The name by which requests choose a reranker of the settings: of a remote one its model, not its
    address."""
    return (address_of(name).model or UNNAMED) if is_remote(name) else name


def check_reranker(name: str) -> None:
    """Raise InvalidRequest for a CrossEncoder as `check_cross_encoder`, and for a URL that is none. Asks no
    remote model."""
    if is_remote(name):
        address_of(name)
    else:
        check_cross_encoder(name)


class RemoteReranker:
    """See `ragserve.retrieval.reranker.Reranker`. A question's calls end with it, or after ``timeout_s``.

    Raises ModelUnavailable where the model gives no scores."""

    comparable = True

    def __init__(self, name: str, *, api_key: SecretStr | None = None, timeout_s: float = 10.0) -> None:
        """Calls nothing. Raises InvalidRequest."""
        address = address_of(name)
        self._model = address.model
        self._form = "tei" if address.model is None else "cohere"
        self._remote = RemoteModel("rerank", public_name(name), address, api_key)
        self._patience = Patience(timeout_s, timeout_s)
        self._client: httpx.AsyncClient | None = None

    async def load(self) -> None:
        """Nothing is to be loaded. A model that is down now may be up when the first question comes."""

    async def scores(self, namespace: str, question: str, chunks: Sequence[Chunk]) -> Sequence[float | None]:
        """The model's scores. Each passage is read with its document's title."""
        return await self.score_texts(question, passage_texts(chunks))

    async def score_texts(self, question: str, texts: Sequence[str]) -> list[float]:
        """Return a score for each text. Without texts nothing is asked."""
        if not texts:
            return []
        if self._client is None:
            self._client = self._remote.client()
        client, room, size = self._client, asyncio.Semaphore(_AT_ONCE), _TEXTS[self._form]

        async def part(some: Sequence[str]) -> list[float]:
            async with room:
                return await self._ask(client, question, some)

        parts = [texts[start : start + size] for start in range(0, len(texts), size)]
        try:
            async with self._remote.answering(self._patience.attempt_s):
                try:
                    async with asyncio.TaskGroup() as group:
                        tasks = [group.create_task(part(some)) for some in parts]
                except ExceptionGroup as errors:
                    raise errors.exceptions[0] from None
        except Refused as error:  # of these passages: other questions may be answered
            raise self._remote.failed(f"refuses the passages ({error})") from None
        return [score for task in tasks for score in task.result()]

    async def measure(self) -> None:
        """Score a short text."""
        await self.score_texts(_PROBE, [_PROBE])

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def _ask(self, client: httpx.AsyncClient, question: str, texts: Sequence[str]) -> list[float]:
        body: dict[str, Any] = {"query": question}
        if self._form == "cohere":
            body |= {"model": self._model, "documents": list(texts)}
        else:
            body |= {"texts": list(texts), "truncate": True}
        answer = await self._remote.post(client, body, self._patience, len(texts) * _BYTES_A_TEXT)
        try:
            return _scores(answer, len(texts))
        except ValueError as error:
            raise self._remote.failed(str(error)) from None


def _scores(answer: Any, n: int) -> list[float]:
    """The scores of an answer, in the order of ``index``. Raises ValueError: what is wrong."""
    results = answer.get("results") if isinstance(answer, dict) else answer
    if not isinstance(results, list) or not all(isinstance(each, dict) for each in results):
        raise ValueError("gives no list of scores: is the URL Cohere's /rerank (with #MODEL) or TEI's?")
    found = {
        each.get("index"): each.get("relevance_score", each.get("score"))
        for each in results
        if type(each.get("index")) is int
    }
    if found.keys() != set(range(n)) or len(results) != n:
        raise ValueError(f"gives {len(results)} scores for {n} passages, or numbers them otherwise")
    scores = [found[i] for i in range(n)]
    most = sys.float_info.max  # whole numbers of an answer may be larger
    if not all(type(score) in (int, float) and abs(score) <= most for score in scores):
        raise ValueError("gives a score that is no finite number")
    return [float(score) for score in scores]
