"""A checkpoint quantised by AWQ, GPTQ or to FP8 is served as the folder that its weights are dequantised to,
where SGLang does not run it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ragserve.commands import model_checks
from ragserve.commands.doctor_checks import examine
from ragserve.commands.options import settings_from, with_settings
from ragserve.config import Settings
from ragserve.engine.packed_weights import as_folder, dequantised, method_of
from ragserve.errors import InvalidRequest
from tests.conftest import MODEL
from tests.unit.engine.quantised import CONFIGS, quantised
from tests.unit.engine.tiny_gguf import tiny_llama


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


@pytest.fixture(scope="module")
def plain(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "tiny"
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes((MODEL / "tokenizer.json").read_bytes())
    return folder


@pytest.fixture(autouse=True)
def _no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(model_checks, "_has_amx", lambda: False)


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_folder_has_the_weights_as_they_were_before_but_for_rounding(
    kind: str, model: Any, plain: Path, tmp_path: Path
) -> None:
    packed = quantised(plain, tmp_path / kind, kind)
    assert method_of(packed) == CONFIGS[kind]["quant_method"]
    said: list[str] = []
    folder = as_folder(packed, tmp_path / "models", said.append)
    served = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert (folder / "tokenizer.json").is_file()
    assert served.state_dict().keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        got = served.state_dict()[name]
        off = ((got - weight).norm() / weight.norm()).item()
        bits = CONFIGS[kind].get("bits", 8)
        assert off < (0.12 if bits == 4 else 0.04), f"{name} is off by {off}"
    assert method_of(folder) is None
    assert as_folder(packed, tmp_path / "models", said.append) == folder, "and is made once"
    assert len(said) == 1


def test_awq_is_what_sglang_makes_of_it(plain: Path, tmp_path: Path) -> None:
    from sglang.kernels.ops.quantization.awq_triton import awq_dequantize_decomposition

    tensors = load_file(quantised(plain, tmp_path / "awq", "awq") / "model.safetensors")
    name = "model.layers.1.mlp.down_proj"
    parts = (tensors[f"{name}.{part}"] for part in ("qweight", "scales", "qzeros"))
    theirs = awq_dequantize_decomposition(*parts).T
    ours = dict(dequantised(tensors, CONFIGS["awq"]))[f"{name}.weight"]
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=2**-7, atol=0)


def _without(folder: Path, part: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    dropped = next(name for name in sorted(tensors) if name.endswith(part))
    save_file(
        {name: tensor for name, tensor in tensors.items() if name != dropped}, folder / "model.safetensors"
    )


def _with(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("kind", "spoil", "says"),
    [
        ("awq", lambda folder: _without(folder, ".scales"), "has no scales"),
        ("awq", lambda folder: _with(folder, version="gemv"), "packed for gemv"),
        ("gptq", lambda folder: _with(folder, bits=3), "GPTQ of 3 bits"),
        ("gptq", lambda folder: _with(folder, bits=8), "rows of weights"),
        ("fp8", lambda folder: _without(folder, ".weight_scale"), "has no scale"),
        ("awq", lambda folder: (folder / "model.safetensors").write_bytes(b"half"), "cannot be dequantised"),
    ],
)
def test_what_cannot_be_dequantised_is_refused_in_one_line(
    kind: str, spoil: Any, says: str, plain: Path, tmp_path: Path
) -> None:
    folder = quantised(plain, tmp_path / "model", kind)
    spoil(folder)
    with pytest.raises(InvalidRequest, match=says) as refused:
        as_folder(folder, tmp_path / "models")
    assert "\n" not in str(refused.value)
    assert list((tmp_path / "models").iterdir()) == [], "nothing is left"


def test_commands_get_the_folder_where_sglang_has_no_kernels(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Settings] = []
    run: Any = with_settings(given.append, ["model", "data_dir"], make=settings_from)
    packed = quantised(plain, tmp_path / "model", "awq")
    (check,) = examine(Settings(model=str(packed), data_dir=tmp_path), ["model"])
    assert check.status == "ok"
    assert "dequantised to bfloat16 once" in check.found
    run(model=str(packed), data_dir=tmp_path)
    assert Path(given[-1].model).is_relative_to(tmp_path / "models")
    monkeypatch.setattr(model_checks, "_has_amx", lambda: True)
    run(model=str(packed), data_dir=tmp_path)
    assert given[-1].model == str(packed)
