"""A model's fingerprint tells apart what gives other KV, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sglang_ext.documents.fingerprint import model_fingerprint

SIZE = 5 * 2**20


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(os.urandom(SIZE))
    return folder


@pytest.mark.parametrize("start", [0, 2**19 + 7, 2 * 2**20 + 333, SIZE - 2**20])
def test_a_changed_megabyte_is_seen_wherever_it_is(model: Path, start: int) -> None:
    """As a fine-tune or a merge of the same shape changes tensors in the middle of a file."""
    before = model_fingerprint(str(model))
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(start)
        file.write(os.urandom(2**20))
    assert model_fingerprint(str(model)) != before


def test_the_same_files_elsewhere_are_the_same_model(model: Path, tmp_path: Path) -> None:
    moved = model.rename(tmp_path / "elsewhere")
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in moved.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert model_fingerprint(str(copy)) == model_fingerprint(str(moved))


@pytest.mark.parametrize(
    "options",
    [
        {"revision": "abc"},
        {"quantization": "fp8"},
        {"json_model_override_args": '{"rope_theta": 1000000}'},
        {"torchao_config": "int8wo"},
        {"lora_paths": ["adapter"]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_that_change_weights_or_positions_count(model: Path, options: dict[str, object]) -> None:
    plain = model_fingerprint(str(model))
    assert model_fingerprint(str(model), options=options) != plain
    unset = {"json_model_override_args": "{}", "quantization": None, "mem_fraction_static": 0.5}
    assert model_fingerprint(str(model), options=unset) == plain


def test_a_hub_id_is_known_by_its_snapshot(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two revisions of one id have other files, and so other KV."""
    cache = tmp_path / "hub" / "models--someone--model"
    for revision, text in (("1" * 40, "{}"), ("2" * 40, '{"rope_theta": 5}')):
        snapshot = cache / "snapshots" / revision
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(text)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("1" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    first = model_fingerprint("someone/model")
    (cache / "refs" / "main").write_text("2" * 40)
    assert model_fingerprint("someone/model") != first
    assert model_fingerprint("someone/other") != model_fingerprint("someone/another"), "by their names"
