"""Verdicts on rows worked out by hand, and what the command says of them."""

from __future__ import annotations

from typing import Any

from ragserve.commands.tune import more
from ragserve.verification.verdicts import figures_of, needed, verdict


def row(kl: float = 0.0, agrees: float = 1.0, **changed: Any) -> dict[str, Any]:
    tokens = {"document_tokens": 100, "kept": 20, "recomputed": 10}
    return {
        "kl": kl,
        "answer_kl": kl,
        "answer_agrees": agrees,
        "ttft_ms": 4.0,
        "fallback": None,
        "error": None,
        **tokens,
        **changed,
    }


def test_enough_good_answers_verify() -> None:
    found = verdict("concat", [row()] * 160)
    assert found is not None
    assert (found.decision, found.line, found.ttft_ms) == ("verified", "verified", 4.0)
    assert (found.figures.kept, found.figures.recomputed, found.figures.f1) == (20.0, 10.0, None)
    assert verdict("concat", []) is None


def test_few_good_answers_leave_it_open_and_say_how_many_it_takes() -> None:
    found = verdict("concat", [row()] * 70)
    assert found is not None
    assert found.decision == "undecided"
    assert found.needed is not None
    assert 157 <= found.needed <= 210
    assert f"about {found.needed} questions would verify it" in found.line
    assert needed([row(kl=1.0)] * 70) is None


def test_what_full_itself_is_undecided_about_is_hardly_a_loss() -> None:
    """In one answer of ten a token of four differs, which full finds 1 % less likely than its own."""
    tied = row(0.001, 0.75, answer_regret=0.0025)
    found = verdict("concat", ([row()] * 9 + [tied]) * 16)
    assert found is not None
    assert (found.decision, found.figures.answer_agrees, found.figures.answer_regret) == (
        "verified",
        97.5,
        0.025,
    )
    sure = verdict("concat", ([row()] * 9 + [row(0.001, 0.75)]) * 16)
    assert sure is not None
    assert sure.decision == "refused", "without a regret each token that differs counts whole"


def test_answers_that_differ_refuse() -> None:
    found = verdict("concat", [*[row()] * 90, *[row(1.0, 0.5)] * 10])
    assert found is not None
    assert found.decision == "refused"
    assert found.line.startswith("refused because over 100 answers without labels KL a token is 0.1")
    early = verdict("concat", [row(1.0, 0.5)] * 3)
    assert early is not None
    assert (early.decision, early.needed) == ("undecided", None), "three answers refuse nothing"


def test_losses_refuse_before_the_end_where_they_show_enough() -> None:
    lossy = verdict("concat", [*[row()] * 6, *[row(1.0, 0.5)] * 2], ended=False)
    assert lossy is not None
    assert lossy.decision == "refused"
    unlucky = [*[row()] * 40, row(0.0, 0.0)]  # the mean is beyond the limit, which one answer does not show
    found = [verdict("concat", unlucky, ended=ended) for ended in (False, True)]
    assert [one and one.decision for one in found] == ["undecided", "refused"]
    alone = verdict("concat", [row(), row(ttft_ms=None), row(ttft_ms=8.0)])
    assert alone is not None
    assert alone.ttft_ms == 6.0, "times of questions that were asked at once do not count"


def test_failures_and_fallbacks_count() -> None:
    failed = {"error": "engine_error: x"}
    figures = figures_of([row(), failed, row(fallback="no room")])
    assert (figures.n, figures.failed, figures.fallbacks, figures.kept) == (3, 1, 1, 20.0)
    found = verdict("concat", [*[row()] * 200, failed])
    assert found is not None
    assert (found.decision, found.why) == ("refused", "1 failed, 0 answered by another strategy")
    none = verdict("concat", [failed])
    assert none is not None
    assert none.ttft_ms is None


def test_the_command_says_what_more_time_would_bring() -> None:
    def result(asked: int, finished: bool, *verdicts: tuple[str, int | None]) -> dict[str, Any]:
        found = [{"decision": decision, "needed": count} for decision, count in verdicts]
        return {"questions": {"cloze": asked}, "finished": finished, "verdicts": found}

    assert more(result(140, False, ("verified", None), ("refused", None)), 10, 400) is None
    said = more(result(70, False, ("verified", None), ("undecided", 140)), 10, 400)
    assert said is not None
    assert "--minutes 10 for about 70 more questions" in said
    said = more(result(70, False, ("undecided", 700)), 10, 400)
    assert said is not None
    assert "--max-questions 700" in said
    assert "All questions" in str(more(result(9, True, ("undecided", 140)), 10, 400))
    assert "again" in str(more(result(0, False), 10, 400))
