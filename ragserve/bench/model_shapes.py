"""Model shapes with random weights, to measure the engine alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ragserve.config import DEFAULT_MODEL

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 8192,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-05,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    # almost nothing to compute: what is left is scheduling, messages between processes and composition's
    # bookkeeping
    "hollow": _LLAMA
    | {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 64,
    },
}


def kv_bytes_per_token(shape: str) -> int:
    """KV bytes per token of one of SHAPES in bfloat16, or of the `embedded` model in float32."""
    own = SHAPES.get(shape)
    config = own or json.loads((Path(DEFAULT_MODEL) / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    values = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim
    return int(values * (2 if own else 4))


def flags(shape: str, folder: Path, engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """Engine settings for one of SHAPES, whose model is made in ``folder``, or for `embedded`."""
    if shape == "embedded":
        return {"engine_args": dict(engine_args)}
    model = dummy_model(shape, folder)
    return {"model": model, "dtype": "bfloat16", "engine_args": {"load_format": "dummy", **engine_args}}


def dummy_model(shape: str, folder: Path) -> str:
    """Make a model folder with the shape's configuration and the small model's tokenizer, for SGLang's
    ``load_format=dummy``, which makes up the weights."""
    model = folder / shape
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(SHAPES[shape]))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(DEFAULT_MODEL) / name, model)
    return str(model)
