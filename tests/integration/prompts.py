"""Prompts of the small question sets, as the product builds them, and prompts of random tokens."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from ragserve.answering.prompt import PromptBuilder, PromptDocument

QUESTIONS = Path(__file__).resolve().parents[1] / "data" / "questions"


def rows(name: str) -> list[dict[str, Any]]:
    """The eight rows of "onehop" or "crossdoc"."""
    lines = (QUESTIONS / f"{name}_8.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def prompt(
    builder: PromptBuilder, row: dict[str, Any], n_documents: int
) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids, and the spans of the system text and of the row's first documents."""
    texts = row["docs"][:n_documents]
    return built(builder, row["question"], texts)


def built(
    builder: PromptBuilder, question: str, texts: list[tuple[str, str]]
) -> tuple[list[int], list[tuple[int, int]]]:
    """As `prompt`, of documents given as (title, text)."""
    documents = [PromptDocument(str(i), title, text) for i, (title, text) in enumerate(texts)]
    whole = builder.build(question, documents, max_prompt_tokens=8000)
    return whole.input_ids, [(s.start, s.end) for s in whole.segments if s.kind != "question"]


def some_ids(n: int, seed: int) -> list[int]:
    """``n`` random token ids, none of them special."""
    draw = random.Random(seed)
    return [draw.randrange(10, 8000) for _ in range(n)]
