"""Training on written questions: what is laid out, and an adapter that lowers the loss and can be merged."""

from __future__ import annotations

import argparse
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from benchmarks.written_questions import train
from ragserve.answering.prompt import PromptBuilder
from ragserve.engine.adapter_weights import merge_adapter
from tests.conftest import MODEL
from tests.unit.engine.tiny_gguf import tiny_llama

pytest.importorskip("peft")


def row(number: int, **other: Any) -> dict[str, Any]:
    passages = [
        {"title": f"Hill {n}", "text": f"Hill {n} is {n + 7} metres high."} for n in (number, number + 50)
    ]
    about = {
        "question": f"How high is hill {number}?",
        "answer": f"{number + 7} metres",
        "passages": passages,
    }
    said = {"target": f"{number + 7} metres [1]", "gold": [0], "system": "Answer.", "history": []}
    return about | said | other


def test_a_row_is_laid_out_as_the_product_lays_it_out() -> None:
    builder = PromptBuilder.load(str(MODEL))
    samples = train.Samples([row(1)], builder, 500)
    turn = ["Where is it?", "Here."]
    found = samples.sequence(row(1, history=[turn]), composed=True)
    ids = [*found.head, *(token for each in found.documents for token in each), *found.question]
    text = builder.tokenizer.decode(ids)
    assert all(part in text for part in ("Answer.", "Hill 51 is 58 metres", *turn, "How high is hill 1?"))
    assert text.index("Hill 51") < text.index("Where is it?") < text.index("How high")
    assert builder.tokenizer.decode(found.answer[:-1]) == "8 metres [1]"
    assert found.answer[-1] == builder.tokenizer.eos_token_id


def test_a_pack_is_drawn_and_further_questions_stand_behind_the_same_passages() -> None:
    builder = PromptBuilder.load(str(MODEL))
    further = row(2, target="9 metres [2]")
    samples = train.Samples([row(n, more=[further]) for n in range(30)], builder, 500)
    drawn = samples.pack(3)
    assert drawn == samples.pack(3), "seeded"
    assert drawn != samples.pack(4)
    assert sum(map(len, drawn)) <= 500
    assert len(drawn) > 2
    one = samples.sequence(row(1, more=[further]), composed=True)
    [(question, answer)] = one.more
    alone = samples.sequence(further, composed=True)
    assert (question, answer) == (alone.question, alone.answer)
    assert one.answers == [*one.answer, *answer]


def options(base: Path, tmp_path: Path, **other: Any) -> argparse.Namespace:
    """What `train` is given; twenty rows."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row(n, more=[row(n + 50)])) + "\n" for n in range(20)))
    out = tmp_path / "out"
    out.mkdir()
    fixed = ["--seconds", "1e9", "--rank", "2", "--rate", "5e-3", "--composed", "0.5", "--packs", "1"]
    given = train.arguments().parse_args([str(base), str(rows), str(out), *fixed])
    vars(given).update(other)
    return given


def small_model(base: Path) -> None:
    model = tiny_llama()
    model.config.max_position_embeddings = 8192
    model.save_pretrained(base)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(MODEL) / name, base)


def test_a_training_stops_before_the_first_step_and_names_what_is_not_finite(tmp_path: Path) -> None:
    base = tmp_path / "base"
    small_model(base)
    path = base / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = math.nan
    save_file(weights, path, metadata={"format": "pt"})
    about = train.train(options(base, tmp_path, steps=3))
    assert about["steps"] == 0
    assert "model.layers.1.mlp.up_proj" in about["stopped"]
    assert not about["best step"]


def test_an_adapter_is_trained_resumed_and_merged(tmp_path: Path) -> None:
    base = tmp_path / "base"
    small_model(base)
    given = options(base, tmp_path, steps=3)
    first = train.train(given)
    given.steps = 5
    about = train.train(given)
    assert (about["steps"], about["skipped"], about["held out"]) == (5, 0, 4)
    assert about["course"][: len(first["course"])] == first["course"], "it went on"
    start, end = about["course"][0], about["course"][-1]
    assert all(math.isfinite(end[name]) and end[name] < start[name] for name in ("whole", "composed"))
    merged = tmp_path / "merged"
    shutil.copytree(base, merged)
    merge_adapter(merged, given.out / "adapter")
    assert (merged / "model.safetensors").read_bytes() != (base / "model.safetensors").read_bytes()
