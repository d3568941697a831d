"""What questions attend to, measured together, is what each one does alone, and what plain loops find."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang_ext.context.recompute import question_attention as module
from sglang_ext.context.recompute.job import question_job
from sglang_ext.context.recompute.question_attention import QuestionRows, attention
from tests.unit.context.recompute.test_anchor_attention import reference
from tests.unit.context.small_model import HEADS, LAYERS, runner_of

FIRST, MORE = 4, 9  # system tokens; document tokens that are not kept
UPPER = range(LAYERS // 2, LAYERS)


def question(
    n: int, q: int, layers: int, *, placed: bool, draw: np.random.Generator, free: list[int]
) -> QuestionRows:
    """``q`` tokens over a context of ``n``, some kept, in slots taken off ``free``."""
    end = n + MORE
    kept = np.stack(
        [
            np.append(np.arange(FIRST), np.sort(FIRST + draw.permutation(end - FIRST)[: n - FIRST]))
            for _ in range(layers)
        ]
    )
    slots = torch.tensor([free.pop() for _ in range(n + q)])
    ids = draw.integers(1, 40, q)
    context, own = slots.split([n, q])
    job = question_job(torch.from_numpy(ids), end, context, own) if placed else None
    return QuestionRows(ids, end, end, FIRST, kept if layers > 1 else kept[0], context, job)


@pytest.mark.parametrize("most", [1, 2**25], ids=["a layer at a time", "at once"])
def test_questions_measured_together_are_those_measured_alone(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SCORES_AT_ONCE", most * HEADS)
    draw = np.random.default_rng(5)
    free = draw.permutation(900).tolist()
    made = [
        question(n, q, layers, placed=placed, draw=draw, free=free)
        for n, q, layers, placed in (
            (40, 3, 1, True),
            (7, 1, 1, True),
            (300, 2, 1, True),
            (33, 2, LAYERS, True),
            (50, 4, 1, False),
            (38, 1, 1, True),
        )
    ]
    together = attention(runner_of(900, seed=1), made)
    for one, found in zip(made, together, strict=True):
        assert len(found) == one.start - one.first
        [alone] = attention(runner_of(900, seed=1), [one])
        torch.testing.assert_close(found, alone)


def test_a_question_of_one_token_attends_as_plain_loops_say() -> None:
    one = question(40, 1, 1, placed=False, draw=np.random.default_rng(2), free=[*range(900)])
    [found] = attention(runner_of(900, seed=3), [one])
    kept = one.kept[FIRST:] - FIRST
    assert bool((found[np.setdiff1d(np.arange(len(found)), kept)] == 0).all()), "what is not kept has none"
    slots = [one.slots] * LAYERS
    mean = reference(runner_of(900, seed=3), one.ids.tolist(), one.at, one.slots, slots, [*UPPER])
    summed = mean[FIRST:] * len(UPPER)
    assert bool((found[kept] >= summed - 1e-5).all()), "the largest of a layer's heads is not below the mean"
    assert bool((found[kept] <= summed * HEADS + 1e-5).all())
