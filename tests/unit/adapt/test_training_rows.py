"""Which questions are held out, and that nothing of their passages is trained with."""

from __future__ import annotations

import pytest

from ragserve.adapt.training_rows import TrainingPassage, TrainingRow, divided
from ragserve.errors import RagserveError
from tests.unit.adapt.tiny_models import rows


def with_gold(row: TrainingRow, *gold: int) -> TrainingRow:
    return row.model_copy(update={"gold": gold})


def test_no_question_is_trained_with_that_shares_a_gold_passage_with_one_held_out() -> None:
    """Row n shows the passages n and n + 1; every fourth one is about both."""
    given = [with_gold(row, 0, 1) if n % 4 == 0 else row for n, row in enumerate(rows(80, passages=2))]
    for seed in range(5):
        train, held = divided(given, 16, seed)
        assert len(held) == 16
        assert 40 <= len(train) < 64, "some are about a passage of a question that is held out"
        taken = {row.passages[place].text for row in held for place in row.gold}
        assert not taken & {row.passages[place].text for row in train for place in row.gold}


def test_questions_that_are_all_about_few_passages() -> None:
    given = [row.model_copy(update={"passages": rows(2)[n % 2].passages}) for n, row in enumerate(rows(60))]
    with pytest.raises(RagserveError, match=r"Only 0 of 60 questions can be held out.*same gold passages"):
        divided(given, 12, 0)


def test_passages_that_hold_an_answer_by_chance_keep_no_row_from_training() -> None:
    """All rows share one, beside that which each was made from."""
    shared = TrainingPassage(title="Years", text="1984 was a year.")
    given = [
        row.model_copy(update={"passages": (*row.passages, shared), "gold": (0, 4), "about": (0,)})
        for row in rows(60)
    ]
    train, held = divided(given, 12, 0)
    assert (len(train), len(held)) == (48, 12)
    with pytest.raises(RagserveError, match="about other passages"):
        divided([row.model_copy(update={"about": ()}) for row in given], 12, 0)
