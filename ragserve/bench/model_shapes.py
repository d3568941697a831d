"""Model shapes with random weights, to measure the engine alone."""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import SecretStr

from ragserve.config import DEFAULT_MODEL, load
from ragserve.engine.local import LocalEngine
from ragserve.engine.offline import run_once
from ragserve.engine.running_server import running_server
from ragserve.files import write_json
from ragserve.fleet.worker_engine import WorkerEngine

T = TypeVar("T")
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


def run_engine(shape: str, work: Callable[[LocalEngine], Awaitable[T]], **settings: Any) -> T:
    """Run ``work`` with an engine of one of SHAPES, or of `embedded`, on a data folder of its own."""
    with tempfile.TemporaryDirectory(prefix="ragserve-bench-") as folder:
        return run_once(load(**_settings(shape, Path(folder), settings)), work)


def run_worker(shape: str, work: Callable[[WorkerEngine], Awaitable[T]], **settings: Any) -> T:
    """Run ``work`` as `run_engine` does, with the engine in a process of its own, `ragserve serve --worker`,
    which is asked over HTTP."""
    with tempfile.TemporaryDirectory(prefix="ragserve-bench-") as folder:
        own = _settings(shape, Path(folder), settings)
        flags: dict[str, Any] = {n: json.dumps(v) if isinstance(v, dict) else v for n, v in own.items()}
        key = secrets.token_urlsafe()
        front = load(data_dir=Path(folder) / "front", engine_api_key=SecretStr(key))

        async def asked(url: str) -> T:
            engine = WorkerEngine(front, url)
            try:
                await engine.start()
                return await work(engine)
            finally:
                await engine.close()

        with running_server(worker=True, api_key=key, log_level="warning", **flags) as server:
            return asyncio.run(asked(server.url))


def _settings(shape: str, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    settings = {"data_dir": folder / "data", "kv_storage": "file", **settings}
    if shape == "embedded":
        return settings
    arguments = {"load_format": "dummy", **settings.get("engine_args", {})}
    return settings | {"model": _dummy_model(shape, folder), "dtype": "bfloat16", "engine_args": arguments}


def _dummy_model(shape: str, folder: Path) -> str:
    """Make a model folder with the shape's configuration and the small model's tokenizer, for SGLang's
    ``load_format=dummy``, which makes up the weights."""
    model = folder / shape
    model.mkdir(parents=True)
    write_json(model / "config.json", SHAPES[shape])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(DEFAULT_MODEL) / name, model)
    return str(model)
