"""At start the engine composes only with models whose composed KV is their own, tried on real ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.integration.forked_starts import run_module
from tests.unit.context.scheduler.started_models import QUANTISED


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    place, busy = tmp_path_factory.mktemp("models"), 840
    done = run_module("tests.unit.context.scheduler.started_models", str(place), timeout=busy)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("name", ["llama", "llama in bfloat16", "qwen3", "mistral", *QUANTISED])
def test_plain_models_compose(found: dict[str, Any], name: str) -> None:
    assert found[name]["unsupported"] is None
    assert "samkv" in found[name]["strategies"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("llama with a layer without positions", "moved keys and values differ from its own prefill"),
        ("granite", "analysed keys and values differ from its own prefill"),
        ("llama with a layer that fails", "a field that only the scheduler fills"),
        ("gemma 3", "Gemma3DecoderLayer takes"),
        ("deepseek", "a MLATokenToKVPool: documents need plain K and V by head"),
        ("qwen3.5", "a HybridLinearKVPool: documents need plain K and V by head"),
        ("qwen3-next", "a HybridLinearKVPool: documents need plain K and V by head"),
    ],
)
def test_others_only_answer_exactly_and_say_why(found: dict[str, Any], name: str, says: str) -> None:
    assert says in found[name]["unsupported"]
    assert "'prefix' or 'full'" in found[name]["unsupported"]
    assert found[name]["strategies"] == []


def test_a_model_that_sglang_runs_on_gpus_only_is_refused_with_the_reason(found: dict[str, Any]) -> None:
    assert "GptOssForCausalLM requires one of" in found["gpt-oss"]["does not start"]


def test_the_trial_leaves_nothing_behind(found: dict[str, Any]) -> None:
    left = {
        name: [tried[each] for each in ("slots left", "row left", "documents")]
        for name, tried in found.items()
        if "does not start" not in tried
    }
    assert len(left) == len(found) - 1
    assert left == {name: [0, 0, 0] for name in left}
