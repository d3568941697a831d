"""Probes of a script that does not separate words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from ragserve.answering.prompt import PromptBuilder
from ragserve.config import DEFAULT_MODEL
from ragserve.engine.base import EngineTimings, EngineUsage, GenerateChunk, GenerateRequest
from ragserve.verification.question_probes import Probes
from ragserve.verification.questions import DrawnQuestion
from ragserve_index.types import Chunk

NAME = "罗伯特·路易斯·巴尔福·史蒂文森"
LIGHT = (
    "The Skerryvore lighthouse was built by Alan Stevenson. It is 48 metres high and was first lit in 1844."
)
TEXT = f"斯克里沃尔灯塔由{NAME}建造，高48米，于1844年首次点亮。"


class ScriptedEngine:
    """Says one thing after another."""

    def __init__(self, *texts: str) -> None:
        self._left = list(texts)
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        self.requests.append(request)
        usage = EngineUsage(len(request.input_ids), 0, 1)
        yield GenerateChunk(self._left.pop(0), usage, EngineTimings(), "stop", output_ids=[1])


def test_a_name_of_many_characters_is_a_short_answer() -> None:
    """It has 13 of them; a reference has at most 12 words, and a question 4 to 40."""
    engine: Any = ScriptedEngine("斯克里沃尔灯塔由谁建造？", NAME, "不知道。")
    search: Any = None
    probes = Probes(engine, search, PromptBuilder.load(DEFAULT_MODEL), "notes", 2000)
    chunk = Chunk(1, "a", 0, TEXT, 0, len(TEXT), None, 40, "a", "灯塔", {})
    found = asyncio.run(probes.about(chunk))
    assert found is not None
    assert (found.kind, found.text, found.references) == ("written", "斯克里沃尔灯塔由谁建造？", (NAME,))


def test_further_questions_about_a_chunk_are_others_whose_answers_stand_in_it() -> None:
    """Until the model says one again, or none; what tells its own answer is left out."""
    engine: Any = ScriptedEngine(
        "How high is the Skerryvore lighthouse?",
        "48 metres",
        "Was the Skerryvore lighthouse first lit in 1844?",
        "1844",
        "Who owns the Skerryvore lighthouse?",
        "The documents do not say.",
        "Who built the Skerryvore lighthouse?",
        "Never reached",
    )
    search: Any = None
    probes = Probes(engine, search, PromptBuilder.load(DEFAULT_MODEL), "notes", 2000)
    chunk = Chunk(1, "a", 0, LIGHT, 0, len(LIGHT), None, 40, "a", "Skerryvore", {})
    first = DrawnQuestion("1", "written", "Who built the Skerryvore lighthouse?", ("Alan Stevenson",))
    found = asyncio.run(probes.others(chunk, first, 5))
    assert [(each.kind, each.text, each.references) for each in found] == [
        ("written", "How high is the Skerryvore lighthouse?", ("48 metres",))
    ]
    asked = [len(request.input_ids) for request in engine.requests if len(request.input_ids) > 200]
    assert asked == sorted(asked), "each shows what was asked before"
    cloze = DrawnQuestion("1", "cloze", "What is missing?", ("48",))
    assert asyncio.run(probes.others(chunk, cloze, 5)) == []
