"""Gates of streaming heads, on a small random model whose one head is made to matter."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ragserve.cli import _register, app
from sglang_ext.attention.pools.calibration import GatedModel, evaluate, learn, make_passkeys
from sglang_ext.attention.pools.streaming_heads import load_pattern, streaming_heads
from tests.conftest import MODEL


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of two KV heads; of head (1, 0) the values are large, so that what it misses shows."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[:16] *= 40
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)
    return folder


def test_the_head_that_matters_keeps_its_gate(model_folder: Path) -> None:
    model = GatedModel(str(model_folder), sink=16, local=64)
    errors: list[float] = []
    gates = learn(
        model,
        steps=50,
        tokens=512,
        penalty=0.05,
        rate=0.1,
        progress=lambda step, error, gate: errors.append(error),
    )
    assert gates.shape == (2, 2)
    assert float(gates.min()) >= 0
    assert gates.argmax() == 2, "head 0 of layer 1"
    assert errors[0] < 1e-9, "all gates open: the model itself"
    texts = [make_passkeys(model.encode, 512, random.Random(9))]
    nothing = evaluate(model, streaming_heads(gates, 0.0), texts)
    assert (nothing.share, nothing.agreement) == (0.0, 1.0)
    kept = evaluate(model, streaming_heads(gates, 0.75), texts)
    lost = evaluate(model, ~streaming_heads(gates, 0.75), texts)
    assert kept.error < lost.error


def test_passkeys_are_in_the_text_and_in_its_repetition(model_folder: Path) -> None:
    model = GatedModel(str(model_folder))
    text = make_passkeys(model.encode, 700, random.Random(3), count=4)
    assert 650 < len(text.ids) < 760
    front, end = (
        model.tokenizer.decode(part) for part in (text.ids[: text.answers], text.ids[text.answers :])
    )
    codes = [word for word in end.split() if word.rstrip(".").isdigit()]
    assert len(codes) == 4
    assert all(code in front for code in codes)


def test_the_command_writes_a_pattern_with_its_quality(model_folder: Path, tmp_path: Path) -> None:
    if not app.registered_commands:
        _register()
    out = tmp_path / "heads.json"
    given = [
        "calibrate-heads",
        str(out),
        "--model",
        str(model_folder),
        "--steps",
        "2",
        "--tokens",
        "768",
        "--held-out",
        "1",
        "--device",
        "cpu",
    ]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, done.output
    assert load_pattern(out, 2, 2).sum() == 2
    written = json.loads(out.read_text())
    assert "--steps 2 --tokens 768 --penalty 0.05 --held-out 1" in written["made by"]
    quality = written["quality"]
    assert [row["share"] for row in quality if row["chosen by"] == "gates"] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert [row["share"] for row in quality if row["chosen by"] == "chance"] == [0.25, 0.5, 0.75]
    assert "50%" in done.output
