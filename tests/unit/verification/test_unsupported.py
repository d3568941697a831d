"""Answers that stand in no passage although full prefill's do."""

from __future__ import annotations

import pytest

from ragserve.answering.prompt import PromptBuilder, PromptDocument
from ragserve.engine.base import GenerateRequest
from ragserve.verification.unsupported import unsupported
from tests.conftest import MODEL

TEXTS = (
    "The lighthouse of Skerryvore was built by Alan Stevenson and lit in 1844. It is 48 metres tall.",
    "Robert Stevenson built the lighthouse of Bell Rock. It was lit in 1810 and is 35 metres tall.",
)


@pytest.fixture(scope="module")
def builder() -> PromptBuilder:
    return PromptBuilder.load(str(MODEL))


@pytest.mark.parametrize(
    ("full", "own", "expected"),
    [
        ("Alan Stevenson", "Alan Stevenson", False),
        ("Alan Stevenson", "It was Alan Stevenson.", False),
        ("Alan Stevenson", "Ada Marsh", True),
        ("Alan Stevenson", "", True),
        ("Alan Stevenson", "Robert Stevenson", False),  # another one, which differs but is no invention
        ("It was lit in 1844.", "It was lit in 1899.", True),
        ("Ada Marsh", "John Doe", False),  # nor is full's
        ("", "John Doe", False),
    ],
)
def test_only_what_full_reads_counts_against_a_strategy(
    builder: PromptBuilder, full: str, own: str, expected: bool
) -> None:
    documents = [PromptDocument("", "", text) for text in TEXTS]
    prompt = builder.build("Who built the lighthouse of Skerryvore?", documents, max_prompt_tokens=4096)
    request = GenerateRequest("r", prompt.input_ids, "n", "full", spans=prompt.spans)
    assert unsupported(builder.words, request, full, own) is expected


def test_a_prompt_without_passages_supports_nothing(builder: PromptBuilder) -> None:
    assert not unsupported(builder.words, GenerateRequest("r", [1, 2, 3], "n", "full"), "one", "two")
