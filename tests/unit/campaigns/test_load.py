"""The fit of campaign `load`: a slope that is there is found, and noise is none."""

from __future__ import annotations

import random

import pytest

from tests.campaigns.load import SIGMAS, slope_of


def series(start: float, per_hour: float, noise: float, seed: int) -> list[tuple[float, float]]:
    chance = random.Random(seed)
    return [(minute, start + per_hour * minute / 60 + chance.gauss(0, noise)) for minute in range(10, 40)]


def test_a_slope_is_found_across_restarts_whose_levels_differ() -> None:
    slope, error = slope_of([series(500, 30, 0.5, 1), [], series(900, 30, 0.5, 2)])
    assert slope is not None
    assert error is not None
    assert slope == pytest.approx(30, abs=3 * error)
    assert slope > SIGMAS * error


def test_noise_is_no_slope() -> None:
    found = [slope_of([series(500, 0, 5, seed)]) for seed in range(20)]
    assert not [1 for slope, error in found if slope is None or error is None or slope > SIGMAS * error]


def test_a_few_points_say_nothing() -> None:
    assert slope_of([[(1, 2.0), (2, 3.0)], []]) == (None, None)
