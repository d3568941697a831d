"""Rerank by what the serving model itself attends to: its retrieval heads over documents' stored keys."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ragserve.answering.prompt import PromptBuilder
from ragserve.config import Settings
from ragserve.engine.base import Engine
from ragserve.engine.document_cache import CachingEngine
from ragserve.errors import InvalidRequest
from ragserve.retrieval.remote_reranker import RemoteReranker, is_remote, public_name
from ragserve.retrieval.reranker import CrossEncoderReranker, Reranker, reranker_names
from ragserve.retrieval.search_options import KEYS
from sglang_ext.wire.joint_names import names_of
from sglang_ext.wire.score_limits import DOCUMENT_TOKENS, SYSTEM_TOKENS

if TYPE_CHECKING:
    from ragserve_index.types import Chunk

log = logging.getLogger(__name__)


class KeyReranker:
    """Reranks with one engine's control operation `score`.

    One pass of system text and question through the model; no document's KV is loaded. Only documents that
    were analysed have a score, and only the first candidates of 65,536 tokens in all. A score grows with the
    question's length: it says nothing about another question. Behind a system text of over 4,096 tokens no
    document has one."""

    comparable = False

    def __init__(self, engine: Engine, prompts: PromptBuilder) -> None:
        self._engine = engine
        self._prompts = prompts

    async def load(self) -> None:
        """Nothing is to be loaded: the model is the engine's."""

    async def scores(self, namespace: str, question: str, chunks: Sequence[Chunk]) -> Sequence[float | None]:
        """See `Reranker`. Raises InvalidRequest for an engine without documents' keys."""
        engine = self._engine
        if not isinstance(engine, CachingEngine) or engine.info.only_exact:
            why = engine.info.only_exact or "its engine runs elsewhere"
            raise InvalidRequest(
                f"This server has no keys of documents: {why}.",
                hint="Rerank by a CrossEncoder, or omit rerank.",
                param="rerank",
            )
        if not chunks:
            return []
        scores: list[float | None] = [None] * len(chunks)
        system = self._prompts.system_ids()
        if len(system) > SYSTEM_TOKENS:
            log.warning(
                "rerank=keys leaves the search's order: the system text has %d tokens, and %d are the most",
                len(system),
                SYSTEM_TOKENS,
            )
            return scores
        documents = await asyncio.to_thread(self._documents, chunks)
        for name in names_of(namespace):  # a score rests on the question and one document
            own = [
                place
                for place, chunk in enumerate(chunks[: len(documents)])
                if name == namespace or chunk.namespace == name
            ]
            if not own:
                continue
            answer = await engine.control(
                "score",
                namespace=name,
                system=system,
                question=self._prompts.question_ids(question),
                documents=[documents[place] for place in own],
            )
            for place, score in zip(own, answer["scores"], strict=True):
                scores[place] = score
        return scores

    def _documents(self, chunks: Sequence[Chunk]) -> list[list[int]]:
        documents: list[list[int]] = []
        room = DOCUMENT_TOKENS
        for chunk in chunks:
            ids = self._prompts.document_ids(chunk.title, chunk.text)
            room -= len(ids)
            if room < 0:
                break
            documents.append(ids)
        return documents

    async def close(self) -> None:
        """Nothing is held."""


def make_rerankers(settings: Settings, engine: Engine, prompts: PromptBuilder) -> dict[str, Reranker]:
    """The rerankers of a server, by the names that requests give them. Loads no model.

    Raises InvalidRequest for a CrossEncoder that is not there, and for two remote ones of one name."""
    found: dict[str, Reranker] = {KEYS: KeyReranker(engine, prompts)}
    for name in reranker_names(settings):
        public = public_name(name)
        if public in found:
            raise InvalidRequest(
                f"Two rerankers of the settings have the name {public!r}.",
                hint="Requests choose by name: give one of them another #MODEL.",
                param="rerank_models",
            )
        if is_remote(name):
            found[public] = RemoteReranker(
                name, api_key=settings.rerank_api_key, timeout_s=settings.remote_timeout_s
            )
        else:
            found[public] = CrossEncoderReranker(
                name, device=settings.embed_device, batch_size=settings.embed_batch
            )
    return found
