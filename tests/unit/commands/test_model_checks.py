"""Models that cannot be served are one line, alike in `serve`, `doctor` and `ingest`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ragserve.commands import ingest, model_checks
from ragserve.commands.doctor_checks import examine
from ragserve.commands.serve_checks import check_engine
from ragserve.config import Settings
from ragserve.engine import server_args
from ragserve.errors import InvalidRequest, Unavailable
from ragserve.ingest.tokenizer import TokenizerSource
from tests.conftest import MODEL

BROKEN = {
    "one file": "is a file",
    "part of a gguf": "is one part of a GGUF model",
    "folder of several gguf": "has 2 GGUF files",
    "no json": "cannot be read",
    "architecture": "does not know FooBarForCausalLM",
    "quantised": "quantised (bitsandbytes)",
}


def broken(kind: str, folder: Path) -> Path:
    model = folder / "model"
    if kind in ("part of a gguf", "one file"):
        path = folder / ("model-00001-of-00002.gguf" if kind == "part of a gguf" else "weights")
        path.write_bytes(b"GGUF\x03\0\0\0" if kind == "part of a gguf" else b"anything")
        return path
    shutil.copytree(MODEL, model)
    config = json.loads((model / "config.json").read_text())
    if kind == "folder of several gguf":
        for weights in model.glob("*.safetensors"):
            weights.rename(model / "weights.gguf")
        (model / "others.gguf").write_bytes(b"GGUF")
    elif kind == "architecture":
        config |= {"architectures": ["FooBarForCausalLM"], "model_type": "foobar"}
    elif kind == "quantised":
        config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (model / "config.json").write_text("{" if kind == "no json" else json.dumps(config))
    return model


@pytest.fixture(autouse=True)
def _without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(model_checks, "_has_amx", lambda: False)


@pytest.mark.parametrize("kind", BROKEN)
def test_a_model_that_cannot_be_served(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = Settings(model=str(broken(kind, tmp_path)), data_dir=tmp_path / "data")
    (check,) = examine(settings, ["model"])
    assert check.status == "fail"
    assert BROKEN[kind] in check.found
    assert check.advice
    assert "report it" not in check.advice  # no crash of the check
    with pytest.raises(Unavailable) as refused:
        check_engine(settings)
    assert BROKEN[kind] in str(refused.value)
    assert "\n" not in str(refused.value)
    ingest._note_model(settings)
    noted = capsys.readouterr().err
    if "gguf" not in kind:  # refused with the settings
        assert BROKEN[kind] in noted
        assert noted.count("\n") == 1


def test_a_model_that_can_be_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = Settings(model=str(MODEL), data_dir=tmp_path / "data")
    check_engine(settings)
    ingest._note_model(settings)
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "options"),
    [
        (["Qwen2ForCausalLM"], {}),
        (["FooBarForCausalLM", "LlamaForCausalLM"], {}),
        (["BloomForCausalLM"], {}),  # through transformers
        (["FooBarForCausalLM"], {"trust_remote_code": True}),
        ([], {}),
    ],
)
def test_architectures_that_are_known(names: list[str], options: dict[str, bool]) -> None:
    assert model_checks.unknown_architecture({"architectures": names}, options) is None


def test_quantised_weights_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(model_checks, "_least_capability", {"awq": 75}.get)
    config = {"quantization_config": {"quant_method": "awq"}}
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 0))
    assert model_checks.quantised_for_others(config, {}) is None
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (7, 0))
    problem = model_checks.quantised_for_others(config, {})
    assert problem is not None
    assert "compute capability 7.5; this one has 7.0" in problem[0]
    other = {"quantization_config": {"quant_method": "other"}}
    assert model_checks.quantised_for_others(other, {}) is None
    assert model_checks.quantised_for_others(config, {"quantization": "awq"}) is None


def test_a_missing_tokenizer(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL, model, ignore=shutil.ignore_patterns("token*", "vocab*", "merges*", "special*"))
    settings = Settings(model=str(model), data_dir=tmp_path / "data")
    (check,) = examine(settings, ["tokenizer"])
    assert check.status == "fail"
    assert "--tokenizer" in check.advice
    with pytest.raises(Unavailable, match="tokenizer") as refused:
        check_engine(settings)
    assert "\n" not in str(refused.value)
    with pytest.raises(InvalidRequest, match="tokenizer"):
        TokenizerSource.load(str(model))
    check_engine(settings.model_copy(update={"tokenizer": str(MODEL)}))


def test_a_configuration_that_transformers_does_not_read(tmp_path: Path) -> None:
    model = broken("architecture", tmp_path)
    with pytest.raises(InvalidRequest, match="Cannot read the configuration") as refused:
        server_args._default_cpu_tokens(Settings(model=str(model)), 4)
    assert "\n" not in str(refused.value)
