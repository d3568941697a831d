"""What an answer says of its context."""

from __future__ import annotations

from dataclasses import asdict

from ragserve.answering.accounting import context_use
from ragserve.answering.prompt import PromptBuilder, PromptDocument
from ragserve.answering.results import DecodeUse
from ragserve.engine.base import EngineTimings, EngineUsage, GenerateChunk
from sglang_ext.wire.protocol import ContextReport, DecodeReport
from tests.conftest import MODEL


def test_notes_say_how_much_was_kept_and_computed_again_and_why() -> None:
    document = PromptDocument("", "Bell Rock", "It was built by Robert Stevenson.")
    prompt = PromptBuilder.load(str(MODEL)).build("Who built it?", [document], max_prompt_tokens=500)
    reasons = {"keep_reason": "option keep", "recompute_reason": "they hold 0.9 of the weight"}
    report = ContextReport("samkv", 200, 60, 15, {"disk": 60}, 1.0, 0.0, 1.0, **reasons)  # type: ignore[arg-type]
    last = GenerateChunk("", EngineUsage(), EngineTimings(), "stop", report)
    use = context_use("samkv", prompt, last, 1)
    assert use.notes == [
        "30% of the document tokens were kept: option keep.",
        "25% of the kept document tokens were computed again: they hold 0.9 of the weight.",
    ]
    assert (use.tokens_kept, use.tokens_recomputed) == (60, 15)


def test_an_answer_says_everything_that_the_engine_reports_of_its_decoding() -> None:
    report = DecodeReport(
        "hierarchical", 5, 5, 3.0, 6.0, 0.5, None, lag=2, offloaded_steps=5, hits=40, misses=2
    )
    said = DecodeUse.model_validate(report, from_attributes=True).model_dump()
    whole = asdict(report)
    del whole["pages_held"]  # pages / share
    assert said == whole
