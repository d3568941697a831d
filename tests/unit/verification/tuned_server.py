"""A server's tuner with all it needs, and a clock that goes on only where a test says so."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from ragserve.answering.in_flight import QueryLimiter
from ragserve.answering.prompt import PromptBuilder
from ragserve.answering.query_log import QueryLog
from ragserve.config import Settings
from ragserve.profiles import gate as gates
from ragserve.profiles.gate import Gate
from ragserve.profiles.in_use import InUseRecord
from ragserve.retrieval.passage_search import PassageSearch
from ragserve.retrieval.retriever import Retriever
from ragserve.setting_groups.per_namespace import NamespaceSettings
from ragserve.verification.idle_tuner import IdleTuner
from ragserve_index import IndexStore
from ragserve_index.viewers import EVERYTHING
from tests.conftest import MODEL
from tests.unit.verification.idle_engine import FINGERPRINT, IdleEngine

LABELS = [f"concat:recompute=sentences,share={share}" for share in (0.15, 0.3)]


class SameVector:
    name = "words"

    def __init__(self) -> None:
        self.asked: list[str] = []

    def encode_queries(self, texts: list[str]) -> np.ndarray:
        self.asked += texts
        return np.tile(np.asarray([1.0, 0.0, 0.0, 0.0], dtype=np.float32), (len(texts), 1))


class Tuned:
    """A tuner with all it needs; its clock goes on only where a test says so."""

    def __init__(self, store: IndexStore, folder: Path, builder: PromptBuilder, engine: IdleEngine) -> None:
        self.store, self.folder, self.builder, self.engine = store, folder, builder, engine
        self.now, self.margin = 0.0, 5.0
        self.job = self.warm_up = False  # one that is asked for runs or waits; one in the background does
        self.timing = asyncio.Lock()
        self.searched = SameVector()
        self.gate = Gate([folder / gates.FILE_NAME], FINGERPRINT, model="tiny", dtype="float32")
        self.in_use = InUseRecord(folder / "in-use.json", FINGERPRINT, dtype="float32", samkv="")
        self.limiter = QueryLimiter(4)

    def tuner(self, retriever: Retriever) -> IdleTuner:
        settings = Settings(
            data_dir=self.folder, model=str(MODEL), top_k=2, verify_margin=self.margin, embedder="words"
        )
        usual = partial(NamespaceSettings.usual, settings, self.store)
        self.gate = Gate.of(settings, usual, model="tiny", fingerprint=FINGERPRINT, dtype="float32")
        engine: Any = self.engine
        given = (PassageSearch(retriever), self.builder, self.gate, self.in_use, self.limiter)
        return IdleTuner(
            settings,
            engine,
            self.store,
            *given,
            jobs=lambda background: self.job or (background and self.warm_up),
            timing=self.timing,
            clock=lambda: self.now,
        )

    def run(self, most: int = 1000) -> list[dict[str, Any]]:
        """Work until there is nothing to do; returns the states on the way."""

        async def all_of_it() -> list[dict[str, Any]]:
            retriever = Retriever(self.store, self.searched)
            try:
                return await steps(self.tuner(retriever), most)
            finally:
                await retriever.close()

        return asyncio.run(all_of_it())

    async def log(self, questions: list[str]) -> None:
        """Have a server log what its users have asked."""
        await logged(self.folder, self.store, questions)


async def logged(folder: Path, store: IndexStore, questions: list[str]) -> None:
    """Log questions of users in namespace `notes` who see all documents, as a server does."""
    users = QueryLog(folder, 2**20, store)
    async with users.running():
        for question in questions:
            request = SimpleNamespace(namespace="notes")
            query: Any = SimpleNamespace(question=question, private=False, request=request)
            query.search = SimpleNamespace(viewer=EVERYTHING)
            users.answered(query, None, time.time(), [query.request.namespace])


async def steps(tuner: IdleTuner, most: int = 1000) -> list[dict[str, Any]]:
    """Work until there is nothing to do; returns the states on the way."""
    states: list[dict[str, Any]] = []
    while len(states) < most and (work := tuner.work()) is not None:
        await work
        states.append(tuner.info())
    return states
