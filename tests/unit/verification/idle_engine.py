"""An engine that answers from distributions, and a store with texts, for the work of idle servers."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np

from ragserve.answering.prompt import PromptBuilder
from ragserve.engine.base import EngineInfo, EngineTimings, EngineUsage, GenerateChunk, GenerateRequest
from ragserve.engine.document_cache import Whereabouts
from ragserve.profiles.figures import Figures
from ragserve.profiles.gate import Entry
from ragserve_index import IndexStore
from ragserve_index.types import NewChunk, NewDocument
from sglang_ext.wire.protocol import ContextReport
from tests.conftest import MODEL

FINGERPRINT = "print"
FULL, OTHER = (0.6, 0.2, 0.2), (0.2, 0.6, 0.2)
VERIFIED = Figures(n=500, f1=99.0, f1_vs_full=0.0, kl=0.01, kept=100.0, recomputed=10.0)


def entry(sets: dict[str, Figures] | None = None) -> Entry:
    return Entry(sets or {"s": VERIFIED}, "tiny", "d", "h", "float32")


def sent(probabilities: Sequence[float]) -> str:
    return base64.b64encode(np.log(np.asarray(probabilities)).astype("<f4").tobytes()).decode()


class IdleEngine:
    """Strategies in ``wrong`` answer otherwise than `full`, and all say nothing without a document. ``hold``:
    cleared, answers do not end."""

    def __init__(self, *, wrong: Sequence[str] = ()) -> None:
        self.wrong = set(wrong)
        self._words = PromptBuilder.load(str(MODEL)).words
        self.asked: list[GenerateRequest] = []
        self.warmed: list[GenerateRequest] = []
        self.aborted = 0
        self.tier = "device"
        self.evicted: list[dict[str, Any]] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.info = EngineInfo(
            "local",
            str(MODEL),
            str(MODEL),
            "0",
            "cpu",
            "",
            8192,
            8192,
            ("full", "prefix", "concat"),
            fingerprint=FINGERPRINT,
            dtype="float32",
        )

    async def start(self) -> EngineInfo:
        return self.info

    async def ready(self) -> bool:
        return True

    async def close(self) -> None:
        return None

    async def forget(self, namespace: str, documents: Any) -> None:
        return None

    async def warm(self, request: GenerateRequest) -> None:
        self.warmed.append(request)

    async def prefix(self, namespace: str, input_ids: Sequence[int]) -> int:
        return 0

    async def where(self, namespace: str, documents: Sequence[Sequence[int]]) -> Whereabouts:
        here = (self.tier == "device",) * len(documents)
        below: Any = ("disk" if self.warmed else "absent",) * len(documents)
        return Whereabouts(here, here, below, "disk", None, 0, 0, 16, 1, {})

    async def control(self, operation: str, **arguments: Any) -> dict[str, Any]:
        if operation == "evict":
            self.evicted.append(arguments)
            self.tier = {1: "host", 2: "disk"}[len(arguments["tiers"])]
        return {"fingerprint": FINGERPRINT}

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        self.asked.append(request)
        finished = False
        try:
            await self.hold.wait()
            ids = list(request.forced) or [0, 0]
            row = OTHER if request.strategy in self.wrong else FULL
            report = None
            if request.strategy != "full":
                tier, self.tier = self.tier, "device"
                report = ContextReport(request.strategy, 20, 20, 2, {tier: 20}, 1.0, 0.0, 1.0)
            finished = True
            reads = "tower of d" in self._words(request.input_ids).partition("missing")[0]
            wrong = request.strategy in self.wrong
            yield GenerateChunk(
                " of slate" if wrong else " granitework" if reads else " unknown",
                EngineUsage(len(request.input_ids), 0, len(ids)),
                EngineTimings(),
                "stop",
                report,
                distributions=[sent(row)] * min(request.distributions, len(ids)),
                output_ids=tuple(ids),
            )
        finally:
            self.aborted += not finished


def fill(
    store: IndexStore, namespace: str, documents: int, *, names: Sequence[str] = (), sentences: int = 1
) -> None:
    """Texts of a chunk each, which all answers of the engine stand in."""
    store.ensure_namespace(namespace, embedder="words", dim=4)
    batch = []
    for name in names or [f"d{number}" for number in range(documents)]:
        number = re.sub(r"\D", "", name)
        kinds = ("", " old", " tall")[:sentences]
        text = " ".join(
            f"The{kind} tower of d{number} by the sea is all made of granitework since then."
            for kind in kinds
        )
        document = NewDocument(name, name, f"sha-{name}", "text/plain", len(text), {})
        vector = np.asarray([[1.0, 0.0, 0.0, 0.0]], dtype=np.float32)
        batch.append((document, [NewChunk(text, 0, len(text), 20)], vector))
    store.replace_documents(namespace, batch)


async def until(condition: Any, what: str) -> None:
    """Wait for work in the background; fails after far longer than it takes."""
    async with asyncio.timeout(240):
        while not condition():
            await asyncio.sleep(0.01)
    assert condition(), what
