"""An engine that keeps documents by their ids, under `Documents`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from ragserve.engine.base import EngineTimings, EngineUsage, GenerateChunk, GenerateRequest
from ragserve.engine.prefill import Documents
from ragserve.engine.stream import DocumentsMissing
from ragserve.errors import EngineError, InvalidRequest, RagserveError
from sglang_ext.wire.protocol import PLAN_FIELD, ContextReport, Span


class Engine:
    """Keeps documents by their ids. ``hold`` makes prefills wait; ``loses`` keeps none; ``fails`` is raised
    by the next prefill, ``bad`` are documents whose own fail; ``forgets`` keeps no dialogue.
    """

    def __init__(self) -> None:
        self.cached: set[tuple[int, ...]] = set()
        self.messages: list[list[dict[str, Any]]] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.loses = False
        self.fails: Exception | None = None
        self.bad: list[list[int]] = []
        self.forgets = False
        self.dialogues: set[tuple[int, ...]] = set()  # beginnings of what a session's key has
        self.asked: list[list[int]] = []  # prompts of composed requests
        self.largest = 1000  # tokens of an exact prompt
        self.unknown: tuple[int, ...] = ()  # spans whose sensitivity composed requests do without
        self.documents = Documents(self._run, self._run_together)

    async def _run(self, fields: dict[str, Any], prompt_tokens: int) -> AsyncGenerator[GenerateChunk, None]:
        plan, report, there = fields["sampling_params"].get("custom_params"), None, 0
        if plan is not None:
            spans = json.loads(plan[PLAN_FIELD])["spans"]
            _, held = json.loads(plan[PLAN_FIELD]).get("session", (None, 0))
            ids = fields["input_ids"]
            missing = [i for i, (a, b) in enumerate(spans) if tuple(ids[a:b]) not in self.cached]
            if held:
                missing = [i for i in missing if i]
                missing += [0] * (tuple(ids[:held]) not in self.dialogues)
            self.asked.append(list(ids))
            if missing:
                raise DocumentsMissing(missing)
            if held:
                there = max(n for n in range(held, spans[0][1] + 1) if tuple(ids[:n]) in self.dialogues)
            report = ContextReport(
                *("concat", 1, 1, 0, {}, 0.0, 0.0, 0.0),
                session_held=there,
                session_computed=spans[0][1] - there,
                unknown_sensitivity=self.unknown,
            )
            if not self.forgets:
                self.dialogues |= {tuple(ids[:end]) for end in range(1, len(ids) + 1)}
        elif prompt_tokens > self.largest:
            raise InvalidRequest("The engine refused the request: it is too large.")
        text, usage = "composed" if plan else "exact", EngineUsage(prompt_tokens, there)
        yield GenerateChunk(text, usage, EngineTimings(), "stop", report)

    async def _run_together(self, requests: Sequence[dict[str, Any]]) -> dict[str, RagserveError]:
        self.messages.append(list(requests))
        await self.hold.wait()
        if self.fails is not None:
            failure, self.fails = self.fails, None
            raise failure
        failed = [request for request in requests if request["input_ids"] in self.bad]
        if not self.loses:
            self.cached |= {tuple(each["input_ids"]) for each in requests if each not in failed}
        return {each["rid"]: EngineError(f"no {each['input_ids']}") for each in failed}

    @property
    def prefilled(self) -> list[list[list[int]]]:
        return [[request["input_ids"] for request in message] for message in self.messages]

    @property
    def analysed(self) -> list[bool]:
        plans = (
            request["sampling_params"]["custom_params"][PLAN_FIELD]
            for message in self.messages
            for request in message
        )
        return [json.loads(plan)["options"]["analyse"] for plan in plans]


def request(*documents: list[int], namespace: str = "n") -> GenerateRequest:
    ids: list[int] = []
    spans = []
    for document in documents:
        spans.append(Span(len(ids), len(ids) + len(document)))
        ids += document
    return GenerateRequest("q", [*ids, 99], namespace, "concat", spans=tuple(spans))


async def answer(engine: Engine, asked: GenerateRequest) -> GenerateChunk:
    chunks = [chunk async for chunk in engine.documents.generate(asked)]
    return chunks[-1]
