"""The recipe of the embedded model: what training data may hold, what a token may attend to, how a model
grows."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from examples.models.recipe import attention, prepare
from examples.models.recipe.architecture import Shape, grown, init_params
from examples.models.recipe.export import logits
from examples.models.recipe.overlap import Evaluated
from examples.models.recipe.question_forms import as_typed, typo
from examples.models.recipe.synthetic import Synthetic

SMALL = {"vocab_size": 97, "hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 2}
NO_NAMES: dict[str, list[str]] = {"first": [], "last": [], "place": []}


def profile(name: str) -> str:
    values = {
        "Geography": {
            "Location": {"text": "Middle Europe, beside the sea"},
            "Area": {"total": {"text": "1,234 sq km"}},
            "Coastline": {"text": "56 km"},
        },
        "Government": {
            "Country name": {"conventional short form": {"text": name}},
            "Capital": {"name": {"text": "Strelsau"}},
            "National symbol(s)": {"text": "red lion"},
            "Independence": {"text": "5 May 1855 (from Utopia)"},
            "Internet country code": {"text": ".rt"},
        },
    }
    return json.dumps(values)


def test_no_profile_of_a_corpus_country_is_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "2020" / "europe"
    folder.mkdir(parents=True)
    for name in ("Ruritania", "Germany", "Portugal"):
        (folder / f"{name}.json").write_text(profile(name), encoding="utf-8")
    monkeypatch.setattr(prepare, "some_of", lambda lines, rng: lines)
    monkeypatch.setattr(prepare, "WRITERS", {"txt": prepare.WRITERS["txt"]})  # the quickest to parse
    rows = list(prepare.profiles(tmp_path, Evaluated([])))
    assert [row[1] for row in rows] == ["Ruritania"]
    answers = {key: answer for _, key, answer in rows[0][4]}
    assert answers["Capital - name"] == "Strelsau"
    assert answers["Independence"] == "5 May 1855"
    assert all(answer in rows[0][3][at] for at, _, answer in rows[0][4])


def test_questions_and_runs_of_words_of_a_set_are_found() -> None:
    text = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
    evaluated = Evaluated([("set", [{"question": "Who wrote it?", "ctxs": [{"text": text}]}])])
    assert evaluated.asked("who wrote it") == "set"
    assert evaluated.asked("Who read it?") is None
    assert evaluated.repeats(f"Before. {text.title()}, and after.")
    assert not evaluated.repeats(" ".join(text.split()[:12]) + " and after")


def test_hidden_documents_see_only_themselves() -> None:
    # two samples; the first has a head, two documents and a question, the second is visible
    sample = torch.tensor([0] * 6 + [1] * 2)
    segment = torch.tensor([0, 1, 1, 2, -1, -1, -1, -1])
    rows = [[int(i) for i in torch.nonzero(row)[:, 0]] for row in attention.mask(sample, segment)]
    assert rows == [
        [0],
        [1],
        [1, 2],
        [3],
        [0, 1, 2, 3, 4],
        [0, 1, 2, 3, 4, 5],
        [6],
        [6, 7],
    ]


def test_questions_of_their_own_see_the_documents_but_not_each_other() -> None:
    sample = torch.zeros(6, dtype=torch.int32)
    # a head, a hidden document, and two questions of two tokens
    first, second = attention.BRANCH, attention.BRANCH + 1
    segment = torch.tensor([0, 1, first, first, second, second])
    rows = [[int(i) for i in torch.nonzero(row)[:, 0]] for row in attention.mask(sample, segment)]
    assert rows == [[0], [1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 4], [0, 1, 4, 5]]


def test_the_blocks_for_the_gpu_cover_what_is_visible() -> None:
    sample = torch.tensor([0] * 300 + [1] * 20 + [2] * 448, dtype=torch.int32)
    visible = attention.Visible(sample, torch.full_like(sample, -1))
    attention.prepare_flex(visible)
    n = len(sample) // attention.BLOCK
    needed = attention.mask(sample, visible.segment).view(n, attention.BLOCK, n, attention.BLOCK)
    assert torch.equal(visible.blocks.to_dense()[0, 0].bool(), needed.any(3).any(1))


def test_a_grown_model_computes_what_the_shallower_one_does() -> None:
    small, large = Shape(num_hidden_layers=2, **SMALL), Shape(num_hidden_layers=3, **SMALL)
    old, new = init_params(small, "cpu", 1), init_params(large, "cpu", 2)
    grown(new, old, 2, 3)
    ids = [5, 17, 2, 88, 40]
    torch.testing.assert_close(logits(new, large, ids), logits(old, small, ids))


def test_a_typing_error_changes_one_word() -> None:
    question = "Which mountain is the highest of Ruritania?"
    for seed in range(50):
        changed = [
            (a, b)
            for a, b in zip(question.split(), typo(question, random.Random(seed)).split(), strict=True)
            if a != b
        ]
        assert len(changed) <= 1, changed  # exchanging two equal letters changes nothing
    forms = {as_typed(question, random.Random(seed)) for seed in range(50)}
    assert {question, question.upper(), question.lower(), question.lower().rstrip("?")} <= forms


def test_two_hop_answers_are_in_the_document_about_the_middle() -> None:
    tasks = Synthetic(1, NO_NAMES)
    for _ in range(20):
        made = tasks.hop(3, 0, 6, hint=1.0)
        texts = " ".join(text for _, text in made.docs)
        assert made.qas
        assert all(answer in texts for _, answer in made.qas)
