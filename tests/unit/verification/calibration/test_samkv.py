"""A model's samkv profile: probes whose needed tokens are where they are said to be, what is chosen by them,
and which file counts.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ragserve.answering.prompt import PromptBuilder
from ragserve.config import DEFAULT_MODEL, Settings
from ragserve.engine.server_args import server_args
from ragserve.errors import InvalidRequest
from ragserve.profiles.bounds import better
from ragserve.profiles.samkv import FILE_NAME, SAMKV, SamkvProfile, load, place_of
from ragserve.verification.calibration.probes import KINDS, Probe, make
from ragserve.verification.calibration.samkv import (
    ProbeSchedule,
    find,
    heads_of,
    stable_of,
    table,
)
from sglang_ext.documents.fingerprint import model_fingerprint
from sglang_ext.wire.protocol import KV_CONFIG_VARIABLE
from tests.conftest import MODEL

PROFILE = SamkvProfile(
    [8, 9],
    [[7, 0]],
    "sentences",
    {"sentences": {"experimental": {"scoring": "keys"}}},
    "tiny",
    "a CPU",
    "float32",
    "2026-01-01",
    {},
    {"sets": 1},
    {},
)


@pytest.fixture(scope="module")
def builder() -> PromptBuilder:
    return PromptBuilder.load(DEFAULT_MODEL)


@pytest.fixture(scope="module")
def probe(builder: PromptBuilder) -> Probe:
    return make(builder, documents=3, questions=2, seed=7)


def test_a_probe_knows_where_its_answers_stand(builder: PromptBuilder, probe: Probe) -> None:
    from transformers import AutoTokenizer

    decode = AutoTokenizer.from_pretrained(DEFAULT_MODEL).decode
    assert [question.kind for question in probe.questions] == [kind for kind in KINDS for _ in range(2)]
    bounds = [0, *(end for _, end in probe.spans)]
    assert [start for start, _ in probe.spans] == bounds[:-1]
    assert bounds[-1] == len(probe.ids)
    for question in probe.questions:
        texts = [decode(probe.ids[a:b]).strip() for a, b in question.needed]
        assert all(text.endswith(".") and text.count(".") == 1 for text in texts), texts
        asked = decode(question.ids)
        assert len(texts) == 1 + (question.kind == "linked")
        assert texts[0].startswith("She ") == (question.kind == "pronoun")
        if question.kind in ("named", "reworded"):
            person = " ".join(word for word in asked.partition("?")[0].split() if word[0].isupper())[-12:]
            assert person.split()[-1] in texts[0]
        if question.kind == "linked":
            assert texts[0].startswith("The sister of ")
            assert texts[0].removesuffix(".").split(" was ")[1] in texts[1]
            first, second = (
                next(i for i, span in enumerate(probe.spans) if span[0] <= a < span[1])
                for a, _ in question.needed
            )
            assert first != second
    assert make(builder, documents=3, questions=2, seed=7) == probe
    assert make(builder, documents=3, questions=2, seed=8) != probe


def test_a_prompt_too_short_for_probes(builder: PromptBuilder) -> None:
    with pytest.raises(InvalidRequest, match="1000 tokens are too short"):
        ProbeSchedule().probes(builder, 1000)
    assert {len(probe.spans) - 1 for probe in ProbeSchedule(sets=2, questions=1).probes(builder, 2400)} == {3}


@pytest.mark.parametrize(
    ("stability", "found"),
    [
        ([9, 9, 9, 9, 1, 1.5, 3, 2], [5, 6, 7]),
        ([0.1] * 8, [4, 5, 6, 7]),
        ([1, 1, 0, 0], []),
        ([1, 1, -2, -1], []),
        ([1, 1, 4], [2]),
    ],
    ids=str,
)
def test_stable_layers_are_of_the_later_half(stability: list[float], found: list[int]) -> None:
    assert stable_of(stability) == found


def test_other_heads_take_over_where_they_find_more() -> None:
    recall = [[[0.2, 0.1], [0.9, 0.5 + i / 100]] for i in range(10)]
    assert heads_of(recall, [[0, 1]]) == [[1, 0]]
    assert heads_of(recall, [[0, 0], [0, 1]]) == [[1, 0], [1, 1]]
    noisy = [[[float(i % 2), 0.0], [float(i % 2 == 0) + (i == 0), 0.0]] for i in range(10)]
    assert heads_of(noisy, [[0, 0]]) == [[0, 0]], "better by chance only"


def test_a_default_stays_unless_something_is_better_by_more_than_chance() -> None:
    low, high, noisy = [0.1] * 8, [0.4, 0.5] * 4, [0.0, 0.9, 0.0, 0.1] * 2
    assert better(high, low)
    assert not better(noisy, low)
    assert not better(low, low)


class Engine:
    """Answers as an engine whose last layer is stable and whose head 1.1 finds everything."""

    def __init__(self, with_found: float = 0.5) -> None:
        """``with_found``: recall where P decides over the stable layers that were found; 0.5 over the
        built-in ones.
        """
        self.asked: list[dict[str, Any]] = []
        self._with_found = with_found

    async def control(self, operation: str, **body: Any) -> dict[str, Any]:
        assert operation == "probe"
        self.asked.append(body)
        count = len(body["questions"])
        if "stable" not in body:
            heads = [[[0.1, 0.2], [0.3, 1.0]]] * count
            return {
                "heads": heads,
                "stable": [[0.0, 2.0], [1.0, 3.0]],
                "built_in": {"stable": [0], "heads": [[0, 0]]},
            }
        recalls = {"built_in": 0.5, "found": self._with_found}
        return {
            "proportion": {name: {"recall": [value] * count, "kept": 0.2} for name, value in recalls.items()}
        }


def test_an_engine_is_asked_about_every_set_and_the_best_is_chosen(probe: Probe) -> None:
    engine, lines = Engine(), []
    found = asyncio.run(find(engine, [probe, probe], lines.append))  # type: ignore[arg-type]
    assert (found.stable, found.heads) == ([1], [[1, 1]])
    assert [body.get("stable") for body in engine.asked] == [None, None, [1], [1]]
    assert engine.asked[0]["questions"][0]["needed"] == probe.questions[0].needed
    assert len(lines) == 5
    written = json.loads(json.dumps(found.figures))
    assert written["heads"]["1.1"] == 1.0
    assert written["proportion"]["found"] == {"kept": 0.2, "recall": 0.5}
    text = "\n".join(table(found))
    assert "stable layers 1 (built in: 0)" in text
    assert "retrieval heads 1.1 (built in: 0.0)" in text


def test_stable_layers_that_find_less_are_not_taken(probe: Probe) -> None:
    found = [asyncio.run(find(Engine(recall), [probe], lambda line: None)) for recall in (0.4, 0.5, 0.6)]  # type: ignore[arg-type]
    assert [each.stable for each in found] == [[0], [1], [1]]


def settings_of(tmp_path: Path, model: Path | str) -> Settings:
    return Settings(data_dir=tmp_path / "data", model=str(model))


def test_the_data_folders_profile_counts_before_the_models(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    settings = settings_of(tmp_path, model)
    assert load(settings, "abc") is None
    assert place_of(settings) == settings.data_dir / FILE_NAME, "nothing is written to a model's folder"
    SAMKV.save(model / FILE_NAME, "abc", PROFILE)
    assert load(settings, "abc") == PROFILE
    mine = replace(PROFILE, selection="shared")
    SAMKV.save(place_of(settings), "abc", mine)
    assert load(settings, "abc") == mine


def test_a_profile_of_another_model_is_not_used_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    SAMKV.save(tmp_path / FILE_NAME, "abc", PROFILE)
    with caplog.at_level(logging.WARNING):
        assert load(settings_of(tmp_path, tmp_path), "changed weights") is None
    assert "belongs to other weights" in caplog.text
    assert "ragserve calibrate --part samkv" in caplog.text


@pytest.mark.parametrize(
    "text", ["", '{"version": 1, "models": {"abc": {"stable": [1]}}}', '{"version": 2, "models": {}}']
)
def test_a_file_that_is_no_profile_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(InvalidRequest, match="not a samkv profile"):
        load(settings_of(tmp_path, tmp_path), "abc")


def test_the_scheduler_processes_get_the_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KV_CONFIG_VARIABLE, "")
    settings = Settings(data_dir=tmp_path, model=str(MODEL), max_total_tokens=4096)
    SAMKV.save(tmp_path / FILE_NAME, model_fingerprint(str(MODEL), ""), PROFILE)
    server_args(settings)
    assert json.loads(os.environ[KV_CONFIG_VARIABLE])["samkv"] == PROFILE.engine
