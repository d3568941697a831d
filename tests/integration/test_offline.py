"""No network, and another model than the embedded one: another architecture, vocabulary layout, chat template
and rotary positions. Its positions cannot be shifted, so documents' KV is not composed; all else works."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import MODEL, REPO
from tests.integration.models import YARN

CHATML = (
    "{% for m in messages %}{{'<|im_start|>'+m['role']+'\n'+m['content']+'<|im_end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}"
)


@pytest.fixture
def other_model(tmp_path: Path) -> Path:
    """A random two-layer Qwen2 whose template takes messages only. Its answers mean nothing."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    folder = tmp_path / "other-model"
    config = Qwen2Config(
        vocab_size=8192,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        rope_parameters={"rope_theta": 10000.0, **YARN},
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    shutil.copy(MODEL / "tokenizer.json", folder)
    tokenizer = json.loads((MODEL / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(tokenizer | {"chat_template": CHATML, "model_max_length": 2048})
    )
    return folder


def test_no_network_and_another_model(tmp_path: Path, other_model: Path) -> None:
    if (
        shutil.which("unshare") is None
        or subprocess.run(["unshare", "-rn", "true"], capture_output=True).returncode
    ):
        pytest.skip("this machine does not let us make a network namespace")
    command = [
        "unshare",
        "-rn",
        sys.executable,
        str(REPO / "tests" / "integration" / "offline_main.py"),
        str(tmp_path),
        str(other_model),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    out = json.loads(done.stdout)
    assert out["status"] == 200
    assert out["info"]["model"] == str(other_model)
    assert out["answer"]["usage"]["completion"] > 0
    assert out["answer"]["usage"]["prompt"] > 60, "our system text, the document and the question in ChatML"
    assert out["info"]["strategies"] == ["full", "prefix"]
    assert out["full"]["answer"] == out["answer"]["answer"]
    assert out["composed"]["status"] == out["raw"]["status"] == 400
    for refusal in (out["composed"], out["raw"]):
        assert "YaRNScalingRotaryEmbedding" in refusal["text"], "what the model has"
        assert "'prefix' or 'full'" in refusal["text"], "what to do"
    assert out["answer"]["citations"][0]["text"].startswith("The lighthouse of Orrin")
