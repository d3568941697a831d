"""Starts small random models, each in a process of its own as a scheduler does, and prints what each can
compose, or why it does not start, as JSON.

Run as ``python -m tests.unit.context.scheduler.started_models FOLDER [NAME ...]``. The processes are forked,
with what is imported; not that of a single name, as on a GPU. There RAGSERVE_ATTENTION names the attention
backend.
"""

from __future__ import annotations

import copy
import gc
import inspect
import json
import logging
import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang_ext.sglang_internals.imports import without_collection

log = logging.getLogger(__name__)
COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def skip_rotation(model: Any) -> None:
    """Let the second layer leave its queries and keys where they are, as NoPE layers do."""
    attention = model.model.layers[1].self_attn
    attention.rotary_emb = copy.copy(attention.rotary_emb)
    attention.rotary_emb.forward = lambda positions, q, k, *args, **kwargs: (q, k)


def fail(model: Any) -> None:
    """Let the second layer raise in our passes, but not in SGLang's."""
    layer = model.model.layers[1]
    original = layer.forward

    @wraps(original)
    def forward(positions: Any, hidden_states: Any, forward_batch: Any, *rest: Any, **more: Any) -> Any:
        if forward_batch.rids is None:
            raise AttributeError("a field that only the scheduler fills")
        return original(positions, hidden_states, forward_batch, *rest, **more)

    layer.forward = forward


Change = Callable[[Any], None]
Model = tuple[Any, dict[str, Any], Change | None]
"""Configuration, engine arguments and change of the loaded model."""
_LATENT = {  # the form of the MLA models that SGLang can run on a CPU
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 4,
    "moe_intermediate_size": 32,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
AS_PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek": {"moe_layer_freq": 1},
    "qwen3.5": {"full_attention_interval": 4},
    "qwen3-next": {"full_attention_interval": 4},
}
"""What published checkpoints say, SGLang reads, and transformers does not write."""
QUANTISED = {"llama in awq": "awq", "llama in gptq": "gptq", "llama in fp8": "fp8"}
"""How the weights are quantised. Without a GPU they are dequantised first, as `ragserve serve` does."""


def models() -> dict[str, Model]:
    """By name."""
    import torch
    import transformers as hf

    llama = hf.LlamaConfig(**COMMON)
    scaled = {"embedding_multiplier": 12.0, "attention_multiplier": 0.25, "residual_multiplier": 0.5}
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
    large = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "initializer_range": 0.15}
    precision = {"dtype": "float16"} if torch.cuda.is_available() else {}
    latent = {name: value for name, value in COMMON.items() if name != "head_dim"} | _LATENT
    return {
        "llama": (llama, {}, None),
        "llama in bfloat16": (llama, {"dtype": "bfloat16"}, None),
        "qwen3": (hf.Qwen3Config(**COMMON), {}, None),
        "mistral": (hf.MistralConfig(**COMMON, sliding_window=None), {}, None),
        "gemma 3": (hf.Gemma3TextConfig(**COMMON, query_pre_attn_scalar=16, sliding_window=64), {}, None),
        "llama with a layer without positions": (llama, {}, skip_rotation),
        "llama with a layer that fails": (llama, {}, fail),
        "granite": (hf.GraniteConfig(**COMMON, **scaled), {}, None),
        "gpt-oss": (hf.GptOssConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2), {}, None),
        "deepseek": (hf.DeepseekV2Config(**latent), {}, None),
        "qwen3.5": (hf.Qwen3_5TextConfig(**COMMON), {}, None),
        "qwen3-next": (hf.Qwen3NextConfig(**COMMON, **experts, num_experts=4), {}, None),
        **{name: (hf.LlamaConfig(**COMMON | large), precision, None) for name in QUANTISED},
    }


def started(folder: Path, arguments: dict[str, Any], change: Change | None) -> Any:
    """A worker as SGLang's scheduler makes it, with pools and attention."""
    from ragserve.config import load
    from ragserve.engine.ports import hold_port, port_of
    from ragserve.engine.server_args import server_args

    settings = load(model=str(folder), data_dir=folder / "data", kv_host_bytes=2**20, kv_disk_bytes=0)
    options = {"skip_tokenizer_init": True, "max_total_tokens": 2048} | arguments
    if backend := os.environ.get("RAGSERVE_ATTENTION"):
        options["attention_backend"] = backend
    args = server_args(settings.model_copy(update={"engine_args": options}))
    with hold_port() as held:
        return _model_worker(args, port_of(held), change)


def _model_worker(server_args: Any, port: int, loaded: Change | None) -> Any:
    """SGLang's `TpModelWorker` of one rank with pools and attention, as a scheduler makes it. ``port``: of
    torch's rendezvous. ``loaded`` is called with the model before the pools are made.
    """
    from sglang.srt import runtime_context
    from sglang.srt.managers.tp_worker import TpModelWorker

    placed: dict[str, Any] = {}
    if hasattr(runtime_context, "SpawnRanks"):
        placed["ranks"] = runtime_context.SpawnRanks(world_rank=0, gpu_id=0)
    runtime_context.publish(server_args, role="scheduler", **placed)
    if placed:
        _start_groups(server_args, port)
    options: dict[str, Any] = {"server_args": server_args, "gpu_id": 0, "nccl_port": port}
    if "ps" in inspect.signature(TpModelWorker).parameters:
        from sglang.srt.distributed.parallel_state_wrapper import ParallelState

        options["ps"] = ParallelState.trivial()
    worker = TpModelWorker(**options)
    if loaded is not None:
        loaded(worker.model_runner.model)
    worker.alloc_memory_pool()
    worker.init_attention_backends()
    worker.init_cuda_graphs()
    return worker


def _start_groups(server_args: Any, port: int) -> None:
    """What newer schedulers do before they make a worker, which does it itself in older ones."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.layers.moe import initialize_moe_config

    bootstrap.reset_parallel_initialised()
    bootstrap.init_parallel_runtime(server_args=server_args, device="cpu", dist_port=port)
    bootstrap.init_layer_runtime(model_config=ModelConfig.from_server_args(server_args))
    initialize_moe_config()


def _document_cache(worker: Any) -> Any:
    """Our cache over a worker's pools; `sglang_ext.state.current` has its runtime."""
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    from sglang_ext.process.build import create_cache

    runner = worker.model_runner
    return create_cache(
        SimpleNamespace(
            server_args=runner.server_args,
            params=CacheInitParams(
                disable=False,
                req_to_token_pool=runner.req_to_token_pool,
                token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
                page_size=runner.page_size,
            ),
            is_hybrid_swa=False,
            is_hybrid_ssm=False,
            enable_hierarchical_cache=False,
            disable_radix_cache=False,
            effective_chunked_prefill_size=None,
            tp_worker=worker,
            model_config=runner.model_config,
            tp_size=1,
            tp_rank=0,
            tp_group=None,
        )
    )


def tried(worker: Any) -> dict[str, Any]:
    """Return what ragserve's cache finds out about the engine, and the state that it leaves it in."""
    from sglang_ext.process.control import answer
    from sglang_ext.state import current

    runner = worker.model_runner
    allocator = runner.token_to_kv_pool_allocator
    free = allocator.available_size()
    _document_cache(worker)
    (info,) = answer(current.runtime, {"op": "info"})["response"]
    (stat,) = answer(current.runtime, {"op": "stat"})["response"]
    return {
        "strategies": info["strategies"],
        "unsupported": info["unsupported"],
        "slots left": free - allocator.available_size(),
        "row left": int(runner.req_to_token_pool.req_to_token[0].abs().sum()),
        "documents": stat["device"]["documents"] + stat["host"]["documents"],
    }


def _saved(folder: Path, name: str, config: Any) -> Path:
    """Write a model of random weights, as its checkpoints are published; return its folder."""
    import torch
    import transformers

    from ragserve.engine.packed_weights import as_folder
    from tests.unit.engine.quantised import quantised

    torch.manual_seed(0)
    place = folder / name.replace(" ", "-")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(place)
    path = place / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | AS_PUBLISHED.get(name, {})))
    if name not in QUANTISED:
        return place
    packed = quantised(place, folder / f"{place.name}-packed", QUANTISED[name])
    return packed if torch.cuda.is_available() else as_folder(packed, folder / "models")


def main(folder: Path) -> None:
    from ragserve.engine.compat import prepare

    prepare()
    import transformers  # noqa: F401 - for all
    from sglang.srt.managers import tp_worker  # noqa: F401 - for all
    from sglang.srt.models import registry  # noqa: F401 - for all
    from sglang.srt.plugins import load_plugins

    from ragserve.engine import server_args  # noqa: F401 - for all
    from sglang_ext.process import build  # noqa: F401 - for all

    load_plugins()
    gc.freeze()  # SGLang collects garbage in each

    found = {}
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    only = sys.argv[2:]
    for name, (config, arguments, change) in models().items():
        if only and name not in only:
            continue
        result = folder / "result.json"
        if not (pid := 0 if len(only) == 1 else os.fork()):
            try:
                outcome = tried(started(_saved(folder, name, config), arguments, change))
            except Exception as error:
                log.warning("%s does not start", name, exc_info=True)
                outcome = {"does not start": f"{type(error).__name__}: {error}"}
            result.write_text(json.dumps(outcome))
            if len(only) == 1:
                print(json.dumps({name: outcome}), flush=True)
            sys.stderr.flush()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0, f"{name} has ended its process"
        found[name] = json.loads(result.read_text())
    print(json.dumps(found))


if __name__ == "__main__":
    with without_collection():
        main(Path(sys.argv[1]))
