"""A model's samkv profile in the real engine: it gives the defaults of requests that set no options."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

from tests.integration.context_client import composed, result
from tests.integration.small_engine import PROFILE, QUESTION, TEXTS, Engine

NAMESPACE = "profile"
CHOSEN = [0, 5, 6, 8]  # the system text and three documents of 64, 100 and 48 tokens


def test_requests_get_the_profiles_options_unless_they_have_their_own(small_engine: Engine) -> None:
    small_engine.reset()
    parts = [TEXTS[number] for number in CHOSEN]
    spans = list(pairwise(accumulate(map(len, parts), initial=0)))
    ids = [token for part in parts for token in part] + QUESTION

    def ask(**options: Any) -> Any:
        return result(
            composed(
                small_engine.client,
                ids,
                spans,
                "samkv",
                NAMESPACE,
                keep=0.5,
                recompute="none",
                block_size=8,
                **options,
            )
        )

    assert small_engine.control("info")["samkv"], "it has one"
    selection = PROFILE["selection"]
    said = {"selection": selection, **PROFILE["options"][selection]}
    assert ask() == ask(**said)
    assert ask(selection="none") != ask()
    built_in = ask(
        selection=selection, scoring="attention", question_query="last", score_positions="original"
    )
    assert built_in != ask(), "the test must tell them apart"
    assert ask(scoring="attention", question_query="last", score_positions="original") == built_in, (
        "a request has the last word"
    )
