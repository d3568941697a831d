"""A comparison with an engine and a search that answer from tables."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import AsyncIterator, Iterable
from typing import Any

import numpy as np

from ragserve.answering.prompt import PromptBuilder
from ragserve.engine.base import EngineInfo, EngineTimings, EngineUsage, GenerateChunk, GenerateRequest
from ragserve.errors import EngineError
from ragserve.retrieval.passage_search import FoundPassage, FoundPassages
from ragserve.retrieval.search_options import SearchOptions
from ragserve.strategy_spec import parse
from ragserve.verification.comparison import Comparison, compare_all
from ragserve.verification.question_probes import BOTH, SHOTS
from ragserve.verification.questions import DrawnQuestion
from ragserve.verification.rows import Key, Row
from ragserve.verification.tuned_queries import TunedQueries
from ragserve_index.types import Chunk
from sglang_ext.wire.protocol import ContextReport
from tests.conftest import MODEL

QUERIES = TunedQueries("notes", SearchOptions(2), max_new_tokens=8)
SAME, OTHER = (0.6, 0.2, 0.2), (0.2, 0.6, 0.2)


def sent(probabilities: tuple[float, ...]) -> str:
    return base64.b64encode(np.log(np.asarray(probabilities)).astype("<f4").tobytes()).decode()


def chunk(number: int, text: str) -> Chunk:
    return Chunk(number, f"d{number}", 0, text, 0, len(text), None, 9, f"{number}.txt", "", {})


CHUNKS = [
    chunk(n, f"The lighthouse number {n} of the long coast was built by Ida{n} Marsh.") for n in range(60)
]


class Searched:
    """Finds the first chunks that the question names, or one, and one more."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, int]] = []

    async def search(
        self, namespace: str, question: str, options: SearchOptions, *, sentences: bool = False
    ) -> FoundPassages:
        self.asked.append((namespace, question, options.k))
        named = [CHUNKS[int(number)] for number in re.findall(r"number (\d+) ", question)]
        pair = ([*named, CHUNKS[1]] if named else [CHUNKS[0], CHUNKS[1]])[:2]
        both = [FoundPassage(c, 1.0, cosine) for c, cosine in zip(pair, (0.75, 0.5), strict=True)]
        return FoundPassages(both, [[], []], 1, None, None, 0.0, None)


class Speaker:
    """Answers with what it reads: the builder of the first lighthouse that the prompt has, where it is
    ``able``; the question that is to be written, where it ``writes``. Led along an answer, `epic` disagrees
    at the second token and then says something else by itself; `random` fails. ``knows``: without texts."""

    def __init__(
        self, builder: PromptBuilder, *, writes: bool, able: bool = True, knows: bool = False
    ) -> None:
        self._builder, self._writes, self._able, self._knows = builder, writes, able, knows
        self.joins = True  # both answers of a pair
        self.info = EngineInfo(
            "local", str(MODEL), str(MODEL), "0", "cpu", "", 8192, 8192, ("full", "epic", "concat")
        )
        self.asked: list[GenerateRequest] = []
        self.warmed: list[GenerateRequest] = []

    async def warm(self, request: GenerateRequest) -> None:
        self.warmed.append(request)

    def texts(self, request: GenerateRequest) -> str:
        return self._builder.words(request.input_ids)

    def said(self, request: GenerateRequest) -> str:
        prompt = self.texts(request)
        if SHOTS[0][1] in prompt:
            number = int(re.findall(r"number (\d+) of", prompt)[0])
            return f"Who built lighthouse number {number} here?" if self._writes else "no idea"
        if request.strategy == "epic":
            return "Somebody Else"
        if not self._able:
            return "nobody knows"
        found = re.findall(r"Ida(\d+)", prompt)
        if BOTH[:20] in prompt:
            asked = [each for each in re.findall(r"number (\d+) here", prompt) if each in found]
            return " and ".join(f"Ida{each} Marsh" for each in asked[: 2 if self.joins else 1])
        if found:
            asked = [each for each in found if f"number {each} here" in prompt]
            return f"Ida{(asked or found)[0]} Marsh"
        known = re.findall(r"number (\d+) here", prompt) if self._knows else []
        return f"Ida{known[0]} Marsh" if known else "who knows"

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        self.asked.append(request)
        if request.strategy == "random":
            raise EngineError("it broke")
        report = None
        if request.strategy != "full" and request.spans:
            documents = request.spans[-1].end - request.spans[0].end
            report = ContextReport(request.strategy, documents, documents // 2, 3, {}, 1.0, 0.0, 1.0)
        rows = [SAME, OTHER if request.strategy == "epic" else SAME][: request.distributions]
        yield GenerateChunk(
            f" {self.said(request)}",
            EngineUsage(len(request.input_ids), 0, 2),
            EngineTimings(),
            "stop",
            report,
            distributions=[sent(row) for row in rows],
            output_ids=(0, 0),
        )


def compared(
    builder: PromptBuilder,
    speaker: Speaker,
    chunks: Iterable[Chunk],
    strategies: str = "concat,epic,random",
    known: dict[Key, Row] | None = None,
    questions: tuple[DrawnQuestion, ...] = (),
    every: list[Row] | None = None,
    out_at: dict[str, float | None] | None = None,
    **limits: Any,
) -> tuple[list[Row], bool]:
    """The new rows, and whether all was asked. ``every`` gets those that count, old and new."""
    written: list[Row] = []
    comparison = Comparison(
        speaker,  # type: ignore[arg-type]
        Searched(),
        builder,
        QUERIES,
        parse(strategies),
        known=known or {},
        write=written.append,
        out_at=out_at,
    )
    options = {"time_left": lambda: True, "most": 100} | limits
    finished = asyncio.run(compare_all(comparison, chunks, questions, **options))
    if every is not None:
        every[:] = comparison.rows
    return written, finished


def by_key(rows: list[Row]) -> dict[Key, Row]:
    return {(row["set"], row["id"], row["strategy"]): row for row in rows}


class Busy(Speaker):
    """Counts the questions that it is asked at once: requests under `full` and the strategies."""

    def __init__(self, builder: PromptBuilder) -> None:
        super().__init__(builder, writes=True)
        self.running = 0
        self.at_once: list[int] = []

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        self.running += 1
        self.at_once.append(self.running)
        try:
            await asyncio.sleep(0)
            async for chunk in super().generate(request):
                yield chunk
        finally:
            self.running -= 1
