"""Embed text with a model behind an OpenAI-compatible ``/embeddings`` route: ``openai:URL#MODEL``."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ragserve.errors import InvalidRequest, ModelUnavailable
from ragserve.retrieval.remote_calls import (
    Patience,
    Refused,
    RemoteAddress,
    RemoteModel,
    parse_address,
    run_until,
)

if TYPE_CHECKING:
    import httpx
    from pydantic import SecretStr

PREFIX = "openai:"
FORM = f"{PREFIX}URL#MODEL"

Vectors = npt.NDArray[np.float32]

_AT_ONCE = 4  # batches of an ingestion that are under way
_QUESTIONS_AT_ONCE = 32  # calls of a server's questions
_DOCUMENTS = Patience(attempt_s=300.0, retry_s=60.0)  # a model on a CPU may take minutes for a batch
_MAX_DIM = 65_536
_BYTES_A_TEXT = 2**20  # of an answer: 65,536 components as base64, or fewer as numbers
_SHORT = 500  # characters of a text that any model reads
_PROBE = "The quick brown fox jumps over the lazy dog."


class RefusedText(ValueError):
    """The model does not take a document's text: the document fails, its job goes on."""


def address_of(embedder: str) -> RemoteAddress:
    """Read ``openai:URL#MODEL``. Raises InvalidRequest."""
    address = parse_address(
        embedder.removeprefix(PREFIX),
        "/embeddings",
        param="embedder",
        example=f"{PREFIX}https://HOST/v1#MODEL",
    )
    if address.model is None:
        raise InvalidRequest(
            "embedder: the URL names no model.",
            hint=f"Give it as {PREFIX}https://HOST/v1#MODEL.",
            code="embedder_invalid",
            param="embedder",
        )
    return address


class RemoteEmbedder:
    """Has the interface of `Embedder`, without a tokenizer.

    ``name`` is that of the model: an index stays valid when the model moves to another host. Whoever serves
    another model under the same name gets the namespace's error only if its dimension differs.

    ``encode`` and ``encode_queries`` block, for threads; ``questions`` is for a server's event loop. All
    raise ModelUnavailable. Thread-safe."""

    words: frozenset[str] = frozenset()
    max_tokens: int | None = None

    def __init__(
        self,
        embedder: str,
        *,
        name: str,
        api_key: SecretStr | None = None,
        batch_size: int = 32,
        timeout_s: float = 10.0,
        query_prompt: str | None = None,
        passage_prompt: str | None = None,
    ) -> None:
        """Calls nothing. ``timeout_s``: of a question, all attempts together. Raises InvalidRequest."""
        address = address_of(embedder)
        self.name = name
        self._model = str(address.model)
        self._remote = RemoteModel("embedder", self._model, address, api_key)
        self._batch_size = batch_size
        self._patience = Patience(timeout_s, timeout_s)
        self._prompts = query_prompt or "", passage_prompt or ""
        self._lock = threading.Lock()
        self._is_awaited = False
        self._dim: int | None = None
        self._client: httpx.AsyncClient | None = None  # of the server's event loop
        self._room = asyncio.Semaphore(_QUESTIONS_AT_ONCE)

    @property
    def known_dim(self) -> int | None:
        """The vectors' width, once the model has answered."""
        return self._dim

    @property
    def dim(self) -> int:
        """The vectors' width. Asks the model the first time."""
        if self._dim is None:
            self.measure()
        return self._dim or 0

    def measure(self) -> None:
        """Embed a short text."""
        self._blocking("", [_PROBE], self._patience, lambda: False)

    def windows(self, text: str) -> list[str]:
        """The text: what the model reads at once is not known."""
        return [text]

    def encode(self, texts: Sequence[str], should_stop: Callable[[], bool] = lambda: False) -> Vectors:
        """Embed documents, in batches, several at once. Float32 [n, dim], L2-normalised.

        A text that is longer than the model reads is embedded in halves, whose mean is its vector. Raises
        RefusedText, and Stopped soon after ``should_stop()``."""
        return self._blocking(self._prompts[1], texts, _DOCUMENTS, should_stop)

    def encode_queries(self, texts: Sequence[str]) -> Vectors:
        """Embed questions. Float32 [n, dim], L2-normalised."""
        return self._blocking(self._prompts[0], texts, self._patience, lambda: False)

    def awaited(self) -> RemoteEmbedder:
        """The same for somebody who waits: documents have the time of a question, too, and fail at once for a
        while after a failure."""
        found = copy(self)
        found._is_awaited = True
        return found

    async def questions(self, texts: Sequence[str]) -> Vectors:
        """Embed questions in one call, which ends with the caller. See `RemoteModel.answering`."""
        if self._client is None:
            self._client = self._remote.client()
        try:
            async with self._remote.answering(self._patience.attempt_s), self._room:
                found = await self._embedded(self._client, self._prompts[0], texts, self._patience)
        except Refused as error:
            raise self._remote.failed(f"refuses a question ({error})") from None
        return unit(found)

    async def close(self) -> None:
        """Close the connections of ``questions``."""
        if self._client is not None:
            await self._client.aclose()

    def _blocking(
        self, prompt: str, texts: Sequence[str], patience: Patience, should_stop: Callable[[], bool]
    ) -> Vectors:
        if not texts:
            return np.empty((0, self.dim), dtype=np.float32)
        work = self._in_time if self._is_awaited else partial(self._in_batches, patience=patience)
        return unit(run_until(lambda: work(prompt, texts), should_stop))

    async def _in_time(self, prompt: str, texts: Sequence[str]) -> Vectors:
        async with self._remote.answering(self._patience.attempt_s):
            return await self._in_batches(prompt, texts, self._patience)

    async def _in_batches(self, prompt: str, texts: Sequence[str], patience: Patience) -> Vectors:
        room = asyncio.Semaphore(_AT_ONCE)

        async def part(client: httpx.AsyncClient, start: int) -> Vectors:
            async with room:
                return await self._embedded(client, prompt, texts[start : start + self._batch_size], patience)

        async with self._remote.client() as client:
            try:
                async with asyncio.TaskGroup() as group:
                    starts = range(0, len(texts), self._batch_size)
                    tasks = [group.create_task(part(client, start)) for start in starts]
            except* (Refused, ModelUnavailable) as errors:
                first = errors.exceptions[0]
                refused = first if isinstance(first, Refused) else None
            else:
                return np.concatenate([task.result() for task in tasks])
            if refused is None:
                raise first
            try:  # is it this text, or would it refuse any?
                await self._ask(client, [_PROBE], patience)
            except Refused as error:
                raise self._remote.failed(f"refuses any text ({error})") from None
            raise RefusedText(f"the remote embedder {self._model} refuses a text of it ({refused})")

    async def _embedded(
        self, client: httpx.AsyncClient, prompt: str, texts: Sequence[str], patience: Patience
    ) -> Vectors:
        """Vectors of texts, each behind the prompt. What is refused is cut in halves: batches, then a text,
        down to `_SHORT`."""
        try:
            return await self._ask(client, [prompt + text for text in texts], patience)
        except Refused:
            if len(texts) == 1 and len(texts[0]) <= _SHORT:
                raise
        if len(texts) > 1:
            middle = len(texts) // 2
            halves = [
                await self._embedded(client, prompt, half, patience)
                for half in (texts[:middle], texts[middle:])
            ]
            return np.concatenate(halves)
        (text,) = texts
        middle = text.rfind(" ", len(text) // 4, len(text) // 2) + 1 or len(text) // 2
        parts = [
            await self._embedded(client, prompt, [half], patience) for half in (text[:middle], text[middle:])
        ]
        return np.mean([unit(part) for part in parts], axis=0, dtype=np.float32)

    async def _ask(self, client: httpx.AsyncClient, texts: Sequence[str], patience: Patience) -> Vectors:
        body = {"model": self._model, "input": list(texts)}
        answer = await self._remote.post(client, body, patience, len(texts) * _BYTES_A_TEXT)
        try:
            found = _vectors(answer, len(texts))
        except ValueError as error:
            raise self._remote.failed(str(error)) from None
        width = found.shape[1]
        with self._lock:
            before = self._dim = self._dim or width
        if width != before:
            raise self._remote.failed(
                f"gives vectors of {width} components, and of {before} before",
                "Another model answers there. Give it another name, and ingest into another namespace.",
            )
        return found


def _vectors(answer: Any, n: int) -> Vectors:
    """The vectors of an answer [n, dim], in the order of ``index``. Raises ValueError: what is wrong."""
    data = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(data, list) or not all(isinstance(each, dict) for each in data):
        raise ValueError("gives no list of embeddings: is the URL an OpenAI-compatible API?")
    if len(data) != n:
        raise ValueError(f"gives {len(data)} embeddings for {n} texts")
    rows = {each.get("index"): each.get("embedding") for each in data if type(each.get("index")) is int}
    if rows.keys() != set(range(n)):
        raise ValueError(f"does not number the embeddings of {n} texts from 0 to {n - 1}")
    try:
        with np.errstate(over="ignore"):  # becomes infinite, see below
            found = np.array([_row(rows[i]) for i in range(n)], dtype=np.float32)
    except (ValueError, TypeError, OverflowError):
        raise ValueError("gives embeddings that are no vectors of one length") from None
    if found.ndim != 2 or not 1 <= found.shape[1] <= _MAX_DIM:
        raise ValueError("gives embeddings that are no vectors of one length")
    if not np.isfinite(found).all():
        raise ValueError("gives an embedding that is not finite (NaN or infinite)")
    return found


def _row(embedding: Any) -> Any:
    if isinstance(embedding, str):
        return np.frombuffer(base64.b64decode(embedding, validate=True), dtype="<f4")
    return embedding


def unit(vectors: Vectors) -> Vectors:
    """Each vector at length 1."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.maximum(norms, np.float32(1e-12)), dtype=np.float32)
