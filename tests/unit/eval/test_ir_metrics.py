"""nDCG and recall against values worked out by hand and against scikit-learn."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sklearn.metrics import ndcg_score

from ragserve.eval.ir_metrics import ndcg, recall, reciprocal_rank


def test_ndcg_by_hand() -> None:
    judged = {"a": 3, "b": 1}
    # DCG of (x, a, b): 3/log2(3) + 1/log2(4); best order (a, b): 3/log2(2) + 1/log2(3)
    expected = (3 / math.log2(3) + 0.5) / (3 + 1 / math.log2(3))
    assert ndcg(["x", "a", "b"], judged, 10) == pytest.approx(expected)
    assert ndcg(["a", "b"], judged, 10) == pytest.approx(1.0)
    assert ndcg(["x", "a"], judged, 1) == 0.0
    assert ndcg([], judged, 10) == 0.0
    assert ndcg(["a"], {}, 10) == 0.0


def test_the_ideal_counts_relevant_documents_that_were_not_found() -> None:
    assert ndcg(["a"], {"a": 1, "b": 1}, 10) == pytest.approx(1 / (1 + 1 / math.log2(3)))
    assert ndcg(["a"], {"a": 1, "b": 1}, 1) == pytest.approx(1.0)  # only one fits in the first place


@pytest.mark.parametrize("seed", range(5))
def test_ndcg_agrees_with_scikit_learn(seed: int) -> None:
    rng = np.random.default_rng(seed)
    gains, scores = rng.integers(0, 4, 63), rng.permutation(63).astype(float)
    names = [f"d{i}" for i in range(63)]
    ranking = [names[i] for i in np.argsort(-scores)]
    ours = ndcg(ranking, dict(zip(names, gains.tolist(), strict=True)), 10)
    assert ours == pytest.approx(ndcg_score([gains], [scores], k=10))


def test_recall() -> None:
    assert recall(["x", "a"], {"a": 1, "b": 2, "c": 0}, 10) == 0.5
    assert recall(["x", "a"], {"a": 1}, 1) == 0.0
    assert recall(["x"], {"c": 0}, 10) == 0.0


def test_reciprocal_rank_is_of_the_first_relevant_one() -> None:
    assert reciprocal_rank(["a", "b", "c"], {"b": 1, "c": 2}) == 0.5
    assert reciprocal_rank(["a", "b"], {"a": 0, "c": 1}) == 0.0
