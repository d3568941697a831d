"""The search of queries that give no options: one list of them, and no work for each query."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ragserve.api.search_fields import MAX_K, SearchFields
from ragserve.config import Settings
from ragserve.profiles.retriever_name import UsualSearch
from ragserve.retrieval.search_options import SearchOptions
from ragserve_index.viewers import EVERYTHING

OTHERS = {
    "top_k": 7,
    "retrieval": "hybrid",
    "follow_ups": "alone",
    "spelling": "search",
    "rerank": "https://host/v1#model",
    "rerank_candidates": 33,
    "neighbours": 1,
    "context_tokens": 900,
    "min_score": 0.25,
    "dedupe": 0.5,
    "not_found": "refuse",
}


def test_a_request_without_options_has_all_of_the_settings() -> None:
    given: Any = Settings(**OTHERS)  # type: ignore[arg-type]
    found = SearchFields().search_options(given, EVERYTHING)
    assert found == UsualSearch.of(given).options
    plain = SearchOptions(found.k)
    names = {each.name for each in dataclasses.fields(found)} - {"filter", "viewer", "k"}
    assert all(getattr(found, name) != getattr(plain, name) for name in names)
    assert (found.k, found.rerank, found.candidates) == (7, "model", 33)


@pytest.mark.parametrize(
    ("body", "k"), [({"k": 3}, 3), ({"k": 3, "context_tokens": 9}, 3), ({"context_tokens": 9}, MAX_K)]
)
def test_what_a_request_gives_comes_first(body: dict[str, Any], k: int) -> None:
    own = {"neighbours": 0, "min_score": 0.0, "dedupe": 0.0, "rerank_candidates": 2, "not_found": "off"}
    given: Any = Settings(**OTHERS)  # type: ignore[arg-type]
    found = SearchFields(**(own | body)).search_options(given, EVERYTHING)
    shown = (found.k, found.neighbours, found.min_score, found.dedupe, found.candidates, found.not_found)
    assert shown == (k, 0, 0.0, 0.0, 2, "off")
    assert found.retrieval == "hybrid"
    assert SearchFields(context_tokens=0).search_options(given, EVERYTHING).k == 7


def test_what_brings_the_passages_is_put_into_words_once() -> None:
    first = UsualSearch.of(Settings(top_k=9))
    assert UsualSearch.of(Settings(top_k=9)) is first
    assert UsualSearch.of(Settings(top_k=8)).retriever != first.retriever
    assert UsualSearch.of(Settings(top_k=9, embedder="words")).retriever.startswith("words, ")
