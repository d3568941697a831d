"""A model's samkv profile in the engine: it speaks where a request is silent, and is refused where it cannot
be this model's.
"""

from __future__ import annotations

from typing import Any

import pytest

from sglang_ext.context.selection.base import ModelShape
from sglang_ext.context.selection.profile import Profile
from sglang_ext.context.selection.strategies import partial_selection
from sglang_ext.wire.protocol import ContextPlan, Span
from sglang_ext.wire.request_options import SamKvOptions

LAYERS, KV_HEADS = 4, 2
RAW: dict[str, Any] = {
    "stable": [1, 3],
    "heads": [[2, 1], [0, 0]],
    "selection": "shared",
    "options": {
        "shared": {
            "score_positions": "adjacent",
            "experimental": {"scoring": "raw", "question_query": "mean"},
        },
        "sentences": {"score_positions": "adjacent"},
    },
}


def samkv_of(profile: Profile, **options: Any) -> SamKvOptions:
    plan = ContextPlan("compose", "n", "samkv", (Span(0, 4), Span(4, 200), Span(200, 400)), options)
    found = partial_selection(plan, ModelShape(LAYERS, profile=profile)).samkv
    assert found is not None
    return found


def chosen(found: SamKvOptions) -> tuple[str, ...]:
    return found.selection, found.scoring, found.experimental.question_query, found.score_positions


def test_a_request_that_says_nothing_gets_what_the_profile_says() -> None:
    profile = Profile.of(RAW, LAYERS, KV_HEADS)
    assert (profile.stable, profile.heads) == ((1, 3), ((2, 1), (0, 0)))
    found = samkv_of(profile)
    assert chosen(found) == ("shared", "raw", "mean", "adjacent")


def test_an_option_of_the_request_wins_and_brings_the_defaults_of_its_selection() -> None:
    profile = Profile.of(RAW, LAYERS, KV_HEADS)
    found = samkv_of(profile, experimental={"question_query": "last"})
    assert chosen(found) == ("shared", "raw", "last", "adjacent")
    found = samkv_of(profile, selection="sentences")
    assert chosen(found) == ("sentences", "keys", "last", "adjacent")
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
        {"options": {"shared": {"ask": "mean"}}},
    ],
    ids=str,
)
def test_a_profile_that_cannot_be_this_models_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="run ragserve calibrate again"):
        Profile.of(RAW | changed, LAYERS, KV_HEADS)
