"""Verdicts on rows worked out by hand, and what the command says of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ragserve.commands.tune import more
from ragserve.engine.base import EngineInfo
from ragserve.retrieval.search_options import SearchOptions
from ragserve.verification.tuned_queries import TunedQueries
from ragserve.verification.verdicts import figures_of, needed, state_name, verdict


def row(score: float = 1.0, full: float = 1.0, *, strategy: str = "concat", **changed: Any) -> dict[str, Any]:
    tokens = {"document_tokens": 100, "kept": 20, "recomputed": 10}
    return {
        "strategy": strategy,
        "score": score,
        "full_score": full,
        "different": score != full,
        "ttft_ms": 4.0,
        "fallback": None,
        "error": None,
        **tokens,
        **changed,
    }


def led(kl: float = 0.0, regret: float = 0.0, **changed: Any) -> dict[str, Any]:
    """Of a question without a reference."""
    own = {"kl": kl, "answer_kl": kl, "answer_agrees": 1.0, "answer_regret": regret}
    return row(**own, **changed) | {"score": None, "full_score": None}


def test_a_loss_that_is_excluded_verifies() -> None:
    found = verdict("concat", [row()] * 90)
    assert found is not None
    assert (found.decision, found.ttft_ms) == ("verified", 4.0)
    assert found.line == f"verified by 90 questions at a margin of {found.figures.margin:.1f} points"
    assert (found.figures.kept, found.figures.recomputed, found.figures.f1) == (20.0, 10.0, None)
    assert (found.figures.score, found.figures.score_vs_full, found.figures.different) == (100.0, 0.0, 0.0)
    assert verdict("concat", []) is None
    assert verdict("epic", [row()] * 90) is None


def test_few_good_answers_leave_it_open_and_say_how_many_it_takes() -> None:
    found = verdict("concat", [row()] * 50)
    assert found is not None
    assert found.decision == "undecided"
    assert found.needed is not None
    assert 83 <= found.needed <= 100
    assert f"about {found.needed} questions would verify it" in found.line
    assert needed([row(0.0)] * 70) is None


def test_a_better_answer_makes_up_for_a_lost_one() -> None:
    """A tenth of the answers change, as many for the better."""
    mixed = [*[row()] * 18, row(0.0, 1.0), row(1.0, 0.0)] * 20
    found = verdict("passages", [each | {"strategy": "passages"} for each in mixed])
    assert found is not None
    assert (found.decision, found.figures.different) == ("verified", 10.0)
    gained = verdict("concat", [row(1.0, 0.0), *[row()] * 9] * 20)
    assert gained is not None
    assert "at least" in gained.line
    assert "points better" in gained.line


def test_what_picks_a_strategy_does_not_verify_it() -> None:
    first = [row(part="pick")] * 200
    found = verdict("concat", first)
    assert found is not None
    assert found.decision == "passed over"
    both = verdict("concat", [*first, *[row(part="verify")] * 60])
    assert both is not None
    assert (both.decision, both.figures.references, both.score) == ("undecided", 60, (100.0, 98.9, 100.0))


def test_distributions_that_are_close_verify_without_references() -> None:
    found = verdict("concat", [led()] * 160)
    assert found is not None
    assert (found.decision, found.line) == ("verified", "verified by 160 answers as full's")
    assert found.figures.margin == 100.0, "nothing is excluded"
    few = verdict("concat", [led()] * 159)
    assert few is not None
    assert (few.decision, few.figures.answer_kl_bound) == ("undecided", None), "the first look is at 160"


def test_losses_refuse_before_the_end_where_they_show_enough() -> None:
    lossy = verdict("concat", [*[row()] * 6, *[row(0.0)] * 20], ended=False)
    assert lossy is not None
    assert lossy.decision == "refused"
    assert lossy.line.startswith("refused because over 26 probes 76.9 points below full, at 95 % at most")
    for unlucky in ([*[row()] * 18, row(0.0)], [*[row()] * 55, *[row(0.0)] * 5]):
        few = verdict("concat", unlucky)  # the mean is beyond the limit, which few answers do not show
        assert few is not None
        assert (few.decision, few.needed) == ("undecided", None), "a mean refuses nothing, even at the end"
    alone = verdict("concat", [row(), row(ttft_ms=None), row(ttft_ms=8.0)])
    assert alone is not None
    assert alone.ttft_ms == 6.0, "times of questions that were asked at once do not count"


def test_failures_and_fallbacks_count() -> None:
    failed = {"strategy": "concat", "error": "engine_error: x"}
    figures = figures_of([row(), failed, row(fallback="no room")])
    assert (figures.n, figures.failed, figures.fallbacks, figures.kept) == (3, 1, 1, 20.0)
    found = verdict("concat", [*[row()] * 200, failed, failed, failed])
    assert found is not None
    assert (found.decision, found.why) == ("refused", "3 failed, 0 answered by another strategy")
    one = verdict("concat", [*[row()] * 200, failed])
    assert one is not None
    assert one.decision == "verified", "of a hundred one may fail"
    for missed in ([failed], [row(fallback="no room")], [failed] * 9):
        few = verdict("concat", [*[row()] * 90, *missed])
        assert few is not None
        assert few.decision == "undecided", "below a hundred a failure decides nothing"
    none = verdict("concat", [failed])
    assert none is not None
    assert none.ttft_ms is None


def test_the_command_says_what_more_time_would_bring() -> None:
    def result(
        asked: int, finished: bool, *verdicts: tuple[str, int | None], picked: int = 0
    ) -> dict[str, Any]:
        found = [
            {"decision": decision, "needed": count, "figures": {"n": asked - picked}}
            for decision, count in verdicts
        ]
        about: dict[str, Any] = {"questions": {"cloze": asked}, "finished": finished, "failures": {}}
        about["settled"] = False
        return about | {"verdicts": found}

    assert more(result(140, False, ("verified", None), ("refused", None)), 10, 400) is None
    said = more(result(70, False, ("verified", None), ("undecided", 140)), 10, 400)
    assert said is not None
    assert "--minutes 10 for about 70 more questions" in said
    said = more(result(260, False, ("undecided", 300), ("undecided", None), picked=40), 13, 330)
    assert said is not None
    assert "--minutes 4 --max-questions 340 for about 80 more" in said, "what picked it does not decide"
    said = more(result(70, False, ("undecided", 700)), 10, 400)
    assert said is not None
    assert "--max-questions 700" in said
    assert "All questions" in str(more(result(9, True, ("undecided", 140)), 10, 400))
    failed = {"failures": {"model_unavailable: it is away": 9}}
    assert "when what failed has passed" in str(more(result(0, True) | failed, 10, 400))
    assert "again" in str(more(result(0, False), 10, 400))
    said = more(result(36, False, ("verified", None), ("undecided", 35)), 10, 400)
    assert said is not None
    assert "--minutes" not in said, "a guess that was wrong"
    settled = {"settled": True}
    said = more(result(36, False, ("verified", None), ("undecided", 80)) | settled, 10, 400)
    assert said is not None
    assert "would not change the choice" in said
    said = more(result(36, False, ("passed over", None)) | settled, 10, 400)
    assert said is not None
    assert "No strategy is left" in said


def test_rows_of_dense_engines_keep_their_place_and_sparse_ones_have_theirs() -> None:
    info = EngineInfo("local", "m", "m", "0", "cpu", "", 8192, 8192, (), "f", dtype="float32", prefix="p")
    queries = TunedQueries("notes", SearchOptions(2), max_new_tokens=8)
    sparse = [replace(info, sparse=each) for each in ("hierarchical 512", "hierarchical 1024")]
    names = [state_name(each, queries, None) for each in (info, *sparse)]
    assert names[0] == "notes-c126b53e4e63"
    assert len(set(names)) == 3
