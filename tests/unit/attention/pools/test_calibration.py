"""Gates of streaming heads, on a small random model whose one head is made to matter."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from typer.testing import CliRunner

from ragserve.cli import _register, app
from ragserve.errors import RagserveError
from sglang_ext.attention.pools import calibration
from sglang_ext.attention.pools.calibration import GatedModel, Passkeys, evaluate, learn, make_passkeys
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


def calibrated(model: Path, out: Path) -> Any:
    """What the command gives for two steps."""
    if not app.registered_commands:
        _register()
    few = ["--steps", "2", "--tokens", "768", "--held-out", "1", "--device", "cpu"]
    return CliRunner().invoke(app, ["calibrate-heads", str(out), "--model", str(model), *few])


class AtTimesNotFinite(GatedModel):
    """Gives NaN in the backward pass of some of the gated passes, or in the forward pass."""

    bad: tuple[int, ...] = ()
    forward = False
    passes = 0

    def hidden(self, text: Passkeys) -> torch.Tensor:
        states = super().hidden(text)
        if self._gates is None:
            return states
        self.passes += 1
        if self.passes not in self.bad:
            return states
        if self.forward:
            return states * math.nan
        states.register_hook(lambda gradient: gradient * math.nan)
        return states


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
    out = tmp_path / "heads.json"
    done = calibrated(model_folder, out)
    assert done.exit_code == 0, done.output
    assert load_pattern(out, 2, 2).sum() == 2
    written = json.loads(out.read_text())
    assert "--steps 2 --tokens 768 --penalty 0.05 --held-out 1" in written["made by"]
    quality = written["quality"]
    assert [row["share"] for row in quality if row["chosen by"] == "gates"] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert [row["share"] for row in quality if row["chosen by"] == "chance"] == [0.25, 0.5, 0.75]
    assert "50%" in done.output


@pytest.mark.parametrize("forward", [True, False], ids=["error", "gradient"])
def test_a_step_without_a_finite_error_and_gradient_is_not_taken(model_folder: Path, forward: bool) -> None:
    model = AtTimesNotFinite(str(model_folder), sink=16, local=64)
    model.bad, model.forward = (2, 4), forward
    seen: list[tuple[float, float]] = []
    gates = learn(
        model, steps=6, tokens=256, progress=lambda step, error, gate: seen.append((error, gate)), rate=0.1
    )
    assert bool(gates.isfinite().all())
    errors, means = zip(*seen, strict=True)
    assert [math.isnan(error) for error in errors] == [forward and step in (1, 3) for step in range(6)]
    assert means[1] == means[0] > means[2] == means[3] > means[4]


@pytest.mark.parametrize(("steps", "taken"), [(8, 5), (3, 3)])
def test_learning_ends_where_no_step_can_be_taken(model_folder: Path, steps: int, taken: int) -> None:
    model = AtTimesNotFinite(str(model_folder), sink=16, local=64)
    model.bad = tuple(range(1, 9))
    with pytest.raises(FloatingPointError, match=f"{taken} steps in a row had no finite error and gradient"):
        learn(model, steps=steps, tokens=256)
    assert model.passes == taken


def test_the_command_writes_nothing_for_values_that_are_not_finite(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "heads.json"
    out.write_text("the one before")
    for bad, why in (((1, 2), "2 steps in a row"), ((3,), "with 0% streaming heads the states are not")):
        monkeypatch.setattr(AtTimesNotFinite, "bad", bad)
        monkeypatch.setattr(AtTimesNotFinite, "forward", True)
        monkeypatch.setattr(calibration, "GatedModel", AtTimesNotFinite)
        done = calibrated(model_folder, out)
        assert isinstance(done.exception, RagserveError)
        assert f"Nothing is written: {why}" in str(done.exception)
        assert "--device cpu" in done.exception.hint
        assert [each.name for each in tmp_path.iterdir()] == ["heads.json"]
        assert out.read_text() == "the one before"


def cudnn_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: Any = None, **options: Any
) -> torch.Tensor:
    """Attention whose gradients are cuDNN's on an H200, where cuDNN is allowed: given a mask, keys are padded
    to 128 with zeros, which count as exp(0 - logsumexp) * 0."""
    out = scaled_dot_product_attention(q, k, v, attn_mask, **options)
    allowed = torch.backends.cuda.cudnn_sdp_enabled()
    if allowed and attn_mask is not None and q.requires_grad and q.shape[2] % 128 == 64:
        keys = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = (q @ keys.transpose(-1, -2) * options["scale"]).detach().masked_fill(~attn_mask, -math.inf)
        padding = (-scores.logsumexp(-1, keepdim=True)).exp() * 0
        q.register_hook(lambda gradient: gradient + padding)
    return out


def test_very_negative_scores_have_finite_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As Qwen2's, whose biases make all scores of some heads some -100, in a text of 192 tokens. A CPU
    stands in for cuDNN."""
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=8192,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e9},
    )
    made = Qwen2ForCausalLM(config)
    with torch.no_grad():
        attention = made.model.layers[1].self_attn
        attention.q_proj.bias.view(4, 16)[:, 7] = 40.0  # that hardly turns with the place
        attention.k_proj.bias.view(2, 16)[:, 7] = -40.0
    made.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(tmp_path)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        monkeypatch.setattr(calibration, "scaled_dot_product_attention", cudnn_attention)
    text = Passkeys([draw % 8192 for draw in range(0, 192 * 37, 37)], 160)
    monkeypatch.setattr(calibration, "make_passkeys", lambda *given: text)
    model = GatedModel(str(tmp_path), device=device, sink=16, local=64)
    gates = learn(model, steps=4, tokens=192, rate=0.1)
    assert not caplog.records, "every step was taken"
    assert bool(gates.isfinite().all())
    assert float(gates.max()) < 1
