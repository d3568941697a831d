"""Every place where ragserve reaches into SGLang 0.5.16, with the signature it relies on.

`install()` registers the hooks with SGLang's own registry; `check()` compares the signatures with those written down here and is run at
start and by a test, so that another version fails with a list of what moved instead of with a wrong answer.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

SGLANG_VERSION = "0.5.16"

# target: the leading parameters that our hooks use or pass on
SIGNATURES: dict[str, tuple[str, ...]] = {
    "sglang.srt.managers.schedule_batch.Req.__init__": ("self", "rid", "origin_input_text", "origin_input_ids", "sampling_params"),
    "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req": ("self", "req", "has_chunked_req", "truncation_align_size"),
    "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation": ("self", "batch", "forward_batch"),
    "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new": ("batch", "model_runner"),
    "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor.process_batch_result_prefill": (
        "self",
        "batch",
        "result",
    ),
    "sglang.srt.managers.scheduler.Scheduler.handle_dumper_control": ("self", "recv_req"),
    "sglang.srt.model_executor.model_runner.ModelRunner.sample": ("self", "logits_output", "forward_batch"),
    "sglang.srt.model_executor.model_runner.ModelRunner._forward_raw": ("self", "forward_batch", "pp_proxy_tensors"),
    "sglang.srt.constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask": ("self", "logits", "vocab_mask"),
    "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.capture_one_shape": (
        "self",
        "size",
        "forward",
        "stream_idx",
        "variant_label",
    ),
    "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner._resolve_lora_variant": ("self", "forward_batch"),
    "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_mha_kv_pool": (
        "self",
        "max_total_num_tokens",
        "mha_pool_class",
        "quant_method",
    ),
    "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size": ("self", "kvc", "num_layers"),
    "sglang.srt.mem_cache.radix_cache.RadixCache.match_prefix": ("self", "params"),
    "sglang.srt.mem_cache.radix_cache.RadixCache.cache_finished_req": ("self", "req", "is_insert", "kv_len_to_handle"),
    "sglang.srt.mem_cache.radix_cache.RadixCache.cache_unfinished_req": ("self", "req", "chunked"),
    "sglang.srt.mem_cache.radix_cache.RadixCache.insert": ("self", "params"),
    "sglang.srt.mem_cache.radix_cache.RadixCache.evict": ("self", "params"),
    "sglang.srt.mem_cache.radix_cache.RadixCache.reset": ("self",),
    "sglang.srt.mem_cache.radix_cache.RadixCache._delete_leaf": ("self", "node"),
}

TARGETS = tuple(SIGNATURES)[:13]  # those that are hooked; the others are methods that our cache overrides or calls

_runtime: Any = None
_batch: Any = None  # whose forward pass runs, for the hook on sampling, which does not see it
_attention: Any = None


def set_attention(runtime: Any) -> None:
    """Called where sparse decoding is on, by what makes this process's attention backend."""
    global _attention
    _attention = runtime


def attention() -> Any:
    """Sparse decoding of this process, or None."""
    return _attention


def set_runtime(runtime: Any) -> None:
    """Called by the cache factory of this scheduler process."""
    global _runtime
    _runtime = runtime


def check() -> list[str]:
    """What differs from SIGNATURES, one line each; empty when SGLang is as expected."""
    problems = []
    for target, expected in SIGNATURES.items():
        owner, name = target.rsplit(".", 1)
        try:
            function = inspect.unwrap(getattr(pkgutil.resolve_name(owner), name))
        except (AttributeError, ImportError) as error:
            problems.append(f"{target} is gone ({error})")
            continue
        function = getattr(function, "__func__", function)
        found = tuple(p for p in inspect.signature(function).parameters if p != "cls")[: len(expected)]
        if found != expected:
            problems.append(f"{target} has parameters {found}, expected {expected}")
    return problems


def install() -> None:
    """Register the hooks. They do nothing in a process without a runtime (one whose cache is not ours)."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, (hook, kind) in _hooks().items():
        HookRegistry.register(target, hook, HookType(kind))


def _after_request(result: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    if _runtime is not None:
        _runtime.on_request(req)
        if _attention is not None:
            reason = _attention.on_request(req)
            if reason is not None and req.to_finish is None:
                _runtime.refuse(req, reason)
    return result


def _around_admission(original: Callable[..., Any], adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    from sglang_ext.context.scheduler.runtime import is_composed

    if _runtime is None or not is_composed(req):
        return original(adder, req, *args, **kwargs)
    return _runtime.admit(adder, req, lambda: original(adder, req, *args, **kwargs))


def _around_forward(original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    global _batch
    if _runtime is None or batch is None:
        return original(worker, batch, *args, **kwargs)
    extend = batch.forward_mode.is_extend()
    _runtime.slots.count()
    if _attention is not None:
        _attention.before_forward(batch)
    if extend:
        _runtime.before_forward(batch)
        _batch = batch
    try:
        result = original(worker, batch, *args, **kwargs)
    finally:
        _batch = None
        if extend:
            _runtime.end_forward()
    if extend:
        _runtime.after_forward(batch)
    if _attention is not None:
        _attention.after_forward()
    return result


def _before_sampling(runner: Any, logits_output: Any, *args: Any, **kwargs: Any) -> None:
    if _batch is not None:
        from sglang_ext.distribution import capture

        capture(_batch, logits_output.next_token_logits)


def _around_model(original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    output = None if _batch is None else _runtime.output_of(forward_batch)
    return original(runner, forward_batch, *args, **kwargs) if output is None else output


def _around_mask(original: Callable[..., Any], grammar: Any, logits: Any, vocab_mask: Any) -> None:
    """SGLang masks logits on accelerators only: on a CPU one request with a grammar would end the server."""
    if logits.device.type != "cpu":
        original(grammar, logits, vocab_mask)
        return
    from xgrammar import apply_token_bitmask_inplace

    apply_token_bitmask_inplace(logits, vocab_mask)


def _after_batch(result: Any, *args: Any, **kwargs: Any) -> Any:
    if _runtime is not None:
        _runtime.shift_positions(result)
    return result


def _around_result(original: Callable[..., Any], processor: Any, batch: Any, result: Any, *args: Any, **kwargs: Any) -> Any:
    if _runtime is not None:
        _runtime.before_result(batch)
    return original(processor, batch, result, *args, **kwargs)


def _around_control(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    from sglang_ext.protocol import CONTROL_METHOD

    if recv_req.method != CONTROL_METHOD:
        return original(scheduler, recv_req)
    from sglang.srt.managers.io_struct import DumperControlReqOutput

    from sglang_ext.control import answer

    output = answer(_runtime, recv_req.body)
    scheduler.ipc_channels.send_to_tokenizer.send_output(DumperControlReqOutput(**output), recv_req)
    return None


def _around_capture(
    original: Callable[..., Any], runner: Any, size: int, forward: Any, stream_idx: Any = None, variant_label: Any = None
) -> Any:
    result = original(runner, size, forward, stream_idx, variant_label)
    if _attention is not None:
        _attention.capture(runner, lambda label: original(runner, size, forward, stream_idx, label))
    return result


def _around_variant(original: Callable[..., Any], runner: Any, forward_batch: Any) -> Any:
    label = None if _attention is None else _attention.backend.variant.value
    return original(runner, forward_batch) if label is None else label


def _around_pool(original: Callable[..., Any], configurator: Any, **options: Any) -> Any:
    from sglang_ext.attention.config import from_environment

    config = from_environment()
    if config is not None and config.kv_bits != 16:
        from sglang_ext.attention.quantized_pool import quantized_pool

        options["mha_pool_class"] = quantized_pool(config.kv_bits)
    return original(configurator, **options)


def _after_cell_size(plain: int, configurator: Any, kvc: Any, num_layers: int) -> int:
    from sglang_ext.attention.config import from_environment

    config = from_environment()
    if config is None:
        return plain
    from sglang.srt.runtime_context import get_parallel

    from sglang_ext.attention.quantized_pool import cell_bytes

    model, page = kvc.model_config, kvc.server_args.page_size
    kv_heads = model.get_num_kv_heads(get_parallel().attn_tp_size)
    return cell_bytes(
        plain, layers=num_layers, kv_heads=kv_heads, head_dim=model.head_dim, page_size=page, logical_page=config.logical_page,
        bits=config.kv_bits,
    )  # fmt: skip


def _hooks() -> dict[str, tuple[Callable[..., Any], str]]:
    hooks: tuple[Callable[..., Any], ...] = (
        _after_request,
        _around_admission,
        _around_forward,
        _after_batch,
        _around_result,
        _around_control,
        _before_sampling,
        _around_model,
        _around_mask,
        _around_capture,
        _around_variant,
        _around_pool,
        _after_cell_size,
    )
    kinds = ("after", "around", "around", "after", "around", "around", "before", *["around"] * 5, "after")
    return {target: (hook, kind) for target, hook, kind in zip(TARGETS, hooks, kinds, strict=True)}
