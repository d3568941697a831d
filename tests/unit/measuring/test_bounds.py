"""The confidence bound: how often it is above the truth, and what it says of samples without a loss."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ragserve.measuring.bounds import interval, upper_bound


def test_a_sample_without_a_loss_is_not_certain_of_none() -> None:
    assert upper_bound([0.0] * 100, 1.0) == pytest.approx(2.65 / 101, rel=0.01)
    assert upper_bound([0.0] * 400, 1.0) < upper_bound([0.0] * 100, 1.0)
    assert upper_bound([], 1.0) == math.inf


def test_by_hand() -> None:
    # 0, 1 and the worst, 2: mean 1, standard error 1 / sqrt(3); t of 2 degrees of freedom at 95 % is 2.92
    assert upper_bound([0.0, 1.0], 2.0) == pytest.approx(1 + 2.91999 / math.sqrt(3), rel=1e-5)


@pytest.mark.parametrize("rare", [0.01, 0.02, 0.05])
def test_rare_total_losses_are_covered(rare: float) -> None:
    """Of 1,000 samples of 100 questions of which a few are lost, at least 95 % have a bound above the truth.
    Student's t of the questions alone covers 63 % of them where one in a hundred is lost."""
    draw = np.random.default_rng(7)
    samples = (draw.random((1000, 100)) < rare).astype(float)
    bounds = [upper_bound(sample.tolist(), 1.0) for sample in samples]
    assert np.mean(np.array(bounds) >= rare) >= 0.95


def test_intervals_of_few_answers_are_not_certain() -> None:
    low, high = interval([1.0] * 20)
    assert (round(low, 2), high) == (0.85, 1.0)  # Clopper and Pearson's exact interval begins at 0.83
    assert interval([0.0] * 20) == pytest.approx((0.0, 1 - low))
    low, high = interval([0.0, 1.0] * 200)
    assert (low, high) == pytest.approx((0.45, 0.55), abs=0.01)
    assert interval([0.5]) == (0.0, 1.0)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_intervals_cover_the_truth(share: float) -> None:
    draw = np.random.default_rng(7)
    samples = (draw.random((1000, 40)) < share).astype(float)
    covered = [low <= share <= high for low, high in map(interval, samples.tolist())]
    assert np.mean(covered) >= 0.94
