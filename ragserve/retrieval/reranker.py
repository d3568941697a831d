"""Rerankers: score the candidates of a search again. Here: by a CrossEncoder."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ragserve.config import Settings
from ragserve.errors import InvalidRequest
from ragserve.retrieval.model_loading import load_model
from ragserve.retrieval.search_options import KEYS, OFF

if TYPE_CHECKING:
    from ragserve_index.types import Chunk

_HINT = "Give a sentence-transformers CrossEncoder: its folder, or the name of one in the Hugging Face cache."
_NOT_FOUND = "reranker_not_found"


class Reranker(Protocol):
    """Scores passages for a question. Belongs to one event loop."""

    comparable: bool
    """Whether scores of different questions can be compared. If not, no floor is about them, and they are
    fused with the order of the search."""

    async def load(self) -> None:
        """Load what the first question needs. Raises InvalidRequest if it cannot be loaded."""
        ...

    async def scores(self, namespace: str, question: str, chunks: Sequence[Chunk]) -> Sequence[float | None]:
        """Return a score for each chunk, higher is better; None for a chunk that cannot be scored."""
        ...

    async def close(self) -> None:
        """Release threads and models."""
        ...


class CrossEncoderReranker:
    """A sentence-transformers CrossEncoder, loaded by `load` or the first question, in a thread of its own.

    The thread takes one question at a time and scores its pairs in batches of ``batch_size``; questions of
    clients that left are not scored. Passages longer than the model reads are cut at its limit."""

    comparable = True

    def __init__(self, name: str, *, device: str = "auto", batch_size: int = 32) -> None:
        """Raises InvalidRequest as `check_cross_encoder`; loads nothing."""
        check_cross_encoder(name)
        self.name = name
        self._device = device
        self._batch_size = batch_size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rerank")
        self._model: Any = None

    async def scores(self, namespace: str, question: str, chunks: Sequence[Chunk]) -> Sequence[float | None]:
        """The model's scores, see `Reranker`. Each passage is read with its document's title."""
        return await self.score_texts(question, passage_texts(chunks))

    async def score_texts(self, question: str, texts: Sequence[str]) -> list[float]:
        """Return a score for each text."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._score, question, texts)

    async def count_tokens(self, texts: Sequence[str]) -> int:
        """Count the tokens of texts, without special ones."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._count, texts)

    async def load(self) -> None:
        """See `Reranker`."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._loaded)

    def _loaded(self) -> Any:
        if self._model is None:
            self._model = load_model(
                "CrossEncoder", self.name, self._device, code=_NOT_FOUND, param="rerank", hint=_HINT
            )
        return self._model

    def _score(self, question: str, texts: Sequence[str]) -> list[float]:
        pairs = [(question, text) for text in texts]
        found = self._loaded().predict(pairs, batch_size=self._batch_size, show_progress_bar=False)
        return [float(score) for score in found]

    def _count(self, texts: Sequence[str]) -> int:
        found = self._loaded().tokenizer(
            list(texts), add_special_tokens=False, truncation=False, verbose=False
        )
        return sum(map(len, found["input_ids"]))

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)


def passage_texts(chunks: Sequence[Chunk]) -> list[str]:
    """What a reranker reads of passages: the title of each one's document, and its text."""
    return [f"{chunk.title}\n{chunk.text}" if chunk.title else chunk.text for chunk in chunks]


def reranker_names(settings: Settings) -> list[str]:
    """The CrossEncoders and remote rerankers of the settings."""
    wanted = dict.fromkeys([settings.rerank, *map(str.strip, settings.rerank_models.split(","))])
    return [name for name in wanted if name not in (OFF, KEYS, "")]


def check_cross_encoder(name: str) -> None:
    """Raise InvalidRequest (code ``reranker_not_found``) unless the model is there and gives one score for a
    pair of texts. Reads its configuration only."""
    folder = Path(name).expanduser()
    try:
        if folder.is_dir():
            path = folder / "config.json"
        else:
            from huggingface_hub import hf_hub_download

            path = Path(hf_hub_download(name, "config.json"))
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise _refused(f"The reranker {name!r} was not found: {reason}") from error
    kinds = config.get("architectures") or ["no architecture"]
    if not kinds[0].endswith("ForSequenceClassification"):
        raise _refused(f"The model {name!r} is no CrossEncoder, but has {kinds[0]}.")
    labels = len(config["id2label"]) if "id2label" in config else 2  # transformers leaves out its default
    if labels != 1:
        raise _refused(f"The model {name!r} gives {labels} scores for a passage; a reranker gives one.")


def _refused(message: str) -> InvalidRequest:
    return InvalidRequest(message, hint=_HINT, code=_NOT_FOUND, param="rerank")
