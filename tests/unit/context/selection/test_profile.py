"""A model's samkv profile in the engine: it speaks where a request is silent, and is refused where it cannot
be this model's.
"""

from __future__ import annotations

from typing import Any

import pytest

from sglang_ext.context.selection.profile import Profile
from sglang_ext.context.selection.samkv import SamKv
from sglang_ext.context.selection.strategies import ModelShape, partial_selection
from sglang_ext.protocol import ContextPlan, Span

LAYERS, KV_HEADS = 4, 2
RAW: dict[str, Any] = {
    "stable": [1, 3],
    "heads": [[2, 1], [0, 0]],
    "selection": "shared",
    "options": {
        "shared": {"scoring": "raw", "ask": "mean", "positions": "near"},
        "sentences": {"positions": "near"},
    },
}


def samkv_of(profile: Profile, **options: Any) -> SamKv:
    plan = ContextPlan("compose", "n", "samkv", (Span(0, 4), Span(4, 200), Span(200, 400)), options)
    found = partial_selection(plan, ModelShape(LAYERS, profile=profile)).samkv
    assert found is not None
    return found


def test_a_request_that_says_nothing_gets_what_the_profile_says() -> None:
    profile = Profile.of(RAW, LAYERS, KV_HEADS)
    assert (profile.stable, profile.heads) == ((1, 3), ((2, 1), (0, 0)))
    found = samkv_of(profile)
    assert (found.scope, found.scoring, found.ask, found.positions) == ("shared", "raw", "mean", "near")


def test_an_option_of_the_request_wins_and_brings_the_defaults_of_its_selection() -> None:
    profile = Profile.of(RAW, LAYERS, KV_HEADS)
    found = samkv_of(profile, ask="last")
    assert (found.scope, found.scoring, found.ask, found.positions) == ("shared", "raw", "last", "near")
    found = samkv_of(profile, selection="sentences")
    assert (found.scope, found.scoring, found.ask, found.positions) == ("sentences", "keys", "last", "near")
    assert samkv_of(profile, selection="layers") == samkv_of(Profile(), selection="layers"), (
        "nothing is known of it"
    )


def test_an_empty_profile_changes_nothing() -> None:
    assert Profile.of({}, LAYERS, KV_HEADS) == Profile()
    assert samkv_of(Profile()) == samkv_of(Profile.of({}, LAYERS, KV_HEADS))
    assert Profile().digest == ""
    digests = {
        Profile.of(RAW | changed, LAYERS, KV_HEADS).digest
        for changed in ({}, {"stable": [3]}, {"heads": []}, {"selection": ""})
    }
    assert len(digests) == 4
    assert "" not in digests


@pytest.mark.parametrize(
    "changed",
    [
        {"stable": [4]},
        {"stable": 3},
        {"heads": [[0, 2]]},
        {"heads": [[4, 0]]},
        {"heads": [3]},
        {"selection": "best"},
        {"options": {"best": {}}},
        {"options": [1]},
    ],
    ids=str,
)
def test_a_profile_that_cannot_be_this_models_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="run ragserve calibrate again"):
        Profile.of(RAW | changed, LAYERS, KV_HEADS)
