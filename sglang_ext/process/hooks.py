"""The functions of SGLang that ragserve hooks, as one table, and the methods that our cache overrides or
calls. The table fits all of `protocol.SGLANG_VERSIONS`; a version that differs needs a table of its own.

`install()` registers the hooks with SGLang's own registry. `check()` compares signatures with the table, at
start and in a test, so that another version fails with a list of what moved instead of with a wrong answer.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, Literal

from sglang_ext import versions
from sglang_ext.attention.pools import pool_hooks
from sglang_ext.process import grammar_masks
from sglang_ext.sglang_internals import (
    background_prefill,
    grammar_cache,
    seeded_sampling,
    stop_strings,
    weight_updates,
)
from sglang_ext.stages import cancelled_pass, stages
from sglang_ext.state import current
from sglang_ext.wire.protocol import SGLANG_VERSIONS

_installed = False


@dataclass(frozen=True, slots=True)
class Hook:
    """Runs ``function`` before, after or around SGLang's ``target``, whose leading ``parameters`` it relies
    on.

    ``stages``: those of `sglang_ext.stages.stages` that it runs. Empty for a hook within another's stage,
    and for one that runs at the start only, whose error must end the process.
    """

    target: str
    parameters: tuple[str, ...]
    function: Callable[..., Any]
    kind: Literal["before", "after", "around"]
    stages: tuple[str, ...] = ()


def _after_request(result: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    if (runtime := current.runtime) is not None:
        from sglang_ext.context.compose.request import is_composed
        from sglang_ext.diagnostics import distribution

        def refuse(reason: str | None) -> None:
            if reason is not None and req.to_finish is None:
                runtime.refuse(req, reason)

        failed = partial(runtime.refuse, req, status=HTTPStatus.INTERNAL_SERVER_ERROR)
        stages.run_alike("request", failed, runtime.on_request, req)
        stages.run_alike("request", failed, background_prefill.on_request, req)
        if req.to_finish is None:
            for read in (distribution.on_request, seeded_sampling.on_request):
                refuse(stages.run_alike("request", failed, read, req))
        if current.attention is not None:
            refuse(stages.run_alike("decode options", failed, current.attention.on_request, req))
            if current.composition is not None and is_composed(req):
                stages.run_alike("decode options", failed, current.composition.show_less, req)
        if current.streaming is not None and req.to_finish is None:
            refuse(stages.run_alike("decode options", failed, current.streaming.on_request, req))
    return result


def _before_schedule(scheduler: Any, running_batch: Any, *args: Any, **kwargs: Any) -> None:
    if current.composition is not None:
        stages.run("queue", stages.nobody, current.composition.drop_gone, scheduler)
    if current.attention is not None:
        current.attention.before_schedule(scheduler, running_batch)


def _around_admission(original: Callable[..., Any], adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    from sglang.srt.managers.schedule_policy import AddReqResult

    from sglang_ext.context.compose.request import is_composed
    from sglang_ext.context.scheduler.document_pass import waits_for_own_step

    running = [*(adder.running_batch.reqs if adder.running_batch is not None else ()), *adder.can_run_list]
    due = current.attention.due_tokens([*running, req]) if current.attention is not None and running else 0
    versions.reserve_tokens(adder, due)  # for as long as it decides on this request

    def add() -> Any:
        align = kwargs.get("truncation_align_size")
        return background_prefill.admit(adder, req, align, partial(original, adder, req, *args, **kwargs))

    try:
        admitted = None if current.attention is None else current.attention.admit(adder, req, add)
        if admitted is not None:
            return admitted
        if current.composition is not None and waits_for_own_step(adder, req):
            return AddReqResult.OTHER
        if current.composition is None or not is_composed(req):
            return add()
        return current.composition.admission.admit(adder, req, add)
    finally:
        versions.reserve_tokens(adder, -due)


def _around_forward(original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    runtime, attention = current.runtime, current.attention
    if runtime is None or batch is None:
        return original(worker, batch, *args, **kwargs)
    composition = current.composition if batch.forward_mode.is_extend() else None
    failed = stages.ending(batch.reqs)

    def forward() -> Any:
        with stages.together():
            return original(worker, batch, *args, **kwargs)

    def forget_step(message: str) -> None:
        attention.forget_step()
        failed(message)

    stages.run("usage", stages.nobody, runtime.slots.count)
    if attention is not None:
        stages.run_alike("decode plan", forget_step, attention.before_forward, batch)
    over = composition is not None and composition.before_forward(batch)
    if over and attention is not None:
        attention.forget_step()
    current.batch = batch
    try:
        result = stages.run("forward", failed, forward) if not over else None
    finally:
        current.batch = None
        if composition is not None:
            composition.end_forward()
    if composition is not None:
        composition.after_forward(batch)
    if attention is not None:
        stages.run_alike("statistics", forget_step, attention.after_forward)
    return _no_result(batch) if result is None else result


def _no_result(batch: Any) -> Any:
    """The result of a forward pass that has failed: any token for requests that end with an error."""
    import torch
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.utils import GenerationBatchResult

    for req in batch.reqs:
        req.return_logprob = req.return_hidden_states = req.return_sampling_mask = False
        req.grammar = None
    batch.return_logprob = batch.return_hidden_states = False
    tokens = torch.zeros(len(batch.reqs), dtype=torch.int64, device=batch.seq_lens.device)
    return GenerationBatchResult(LogitsProcessorOutput(next_token_logits=None), next_token_ids=tokens)


def _before_sampling(runner: Any, logits_output: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
    from sglang_ext.diagnostics import distribution

    current.sampled = getattr(forward_batch, "ragserve_reqs", ())
    if measured := [req for _, req, _ in distribution.traced(current.sampled)]:
        logits = logits_output.next_token_logits
        stages.run_alike(
            "distribution", stages.ending(measured), distribution.before_sampling, forward_batch, logits
        )

    if seeds := [req for _, req, _ in seeded_sampling.seeded(current.sampled)]:
        stages.run_alike("seed", stages.ending(seeds), seeded_sampling.before_sampling, forward_batch)


def _around_draw(
    original: Callable[..., Any], sampler: Any, probs: Any, sampling_info: Any, *args: Any, **kwargs: Any
) -> Any:
    result = original(sampler, probs, sampling_info, *args, **kwargs)
    if seeds := [req for _, req, _ in seeded_sampling.seeded(current.sampled)]:
        failed = stages.ending(seeds)
        tokens = versions.drawn(result)
        stages.run_alike("seeded draw", failed, seeded_sampling.draw, probs, current.sampled, tokens)
    return result


def _around_model(
    original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    output = None
    if current.batch is not None and current.composition is not None:
        # a failure takes nothing: the model runs and computes the same
        output = stages.run("output", stages.nobody, current.composition.output_of, forward_batch)
    return original(runner, forward_batch, *args, **kwargs) if output is None else output


def _after_batch(result: Any, cls: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    result.ragserve_reqs, result.ragserve_decoding = batch.reqs, batch.decoding_reqs or ()
    if current.composition is not None:
        from sglang_ext.context.compose.request import is_composed

        failed = stages.ending(filter(is_composed, batch.reqs))
        stages.run_alike("positions", failed, current.composition.shift_positions, result)
    return result


def _around_result(
    original: Callable[..., Any], processor: Any, batch: Any, result: Any, *args: Any, **kwargs: Any
) -> Any:
    if current.composition is not None:
        current.composition.before_result(batch)
    return original(processor, batch, result, *args, **kwargs)


def _around_control(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    from sglang_ext.wire.protocol import CONTROL_METHOD

    if recv_req.method != CONTROL_METHOD:
        return original(scheduler, recv_req)
    from sglang.srt.managers.io_struct import DumperControlReqOutput

    from sglang_ext.process.control import answer

    output = answer(current.runtime, recv_req.body)
    scheduler.ipc_channels.send_to_tokenizer.send_output(DumperControlReqOutput(**output), recv_req)
    return None


def _around_weights(original: Callable[..., Any], updater: Any, recv_req: Any) -> Any:
    return weight_updates.guarded(original, updater, recv_req, composes=current.composition is not None)


def _after_token_ids(result: Any, logprobs: Any, *args: Any, **kwargs: Any) -> Any:
    """Give requests without ``token_ids_logprob`` an empty tensor, as SGLang expects of every row. It makes a
    list itself, and such a request beside one with ids would end the scheduler.
    """
    values, ids = result
    if not any(hasattr(value, "tolist") for value in values):
        return None
    return [value if hasattr(value, "tolist") else logprobs.new_empty(0) for value in values], ids


def _around_capture(
    original: Callable[..., Any],
    runner: Any,
    size: int,
    forward: Any,
    stream_idx: Any = None,
    variant_label: Any = None,
    *others: Any,
) -> Any:
    result = original(runner, size, forward, stream_idx, variant_label, *others)
    if current.attention is not None:
        current.attention.capture(
            runner, lambda label: original(runner, size, forward, stream_idx, label, *others)
        )
    return result


def _around_variant(original: Callable[..., Any], runner: Any, forward_batch: Any) -> Any:
    label = None
    if (attention := current.attention) is not None:
        failed = stages.ending(getattr(forward_batch, "ragserve_reqs", ()))
        label = stages.run("graph", failed, lambda: attention.backend.variant.value)
    return original(runner, forward_batch) if label is None else label


HOOKS = (
    Hook(
        "sglang.srt.managers.schedule_batch.Req.__init__",
        ("self", "rid", "origin_input_text", "origin_input_ids", "sampling_params"),
        _after_request,
        "after",
        ("request", "decode options"),
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill",
        ("self", "running_batch"),
        _before_schedule,
        "before",
        ("queue", "segments", "offloading"),
    ),
    Hook(
        "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req",
        ("self", "req", "has_chunked_req", "truncation_align_size"),
        _around_admission,
        "around",
        (
            *("admission", "accounting", "load"),
            *("analysis", "stored analysis", "new analysis", "query", "selection"),
        ),
    ),
    Hook(stop_strings.BEGINS, ("self",), stop_strings.around_begins, "around", ("stop strings",)),
    Hook(stop_strings.OUTPUT, ("self", "req"), stop_strings.around_output, "around"),
    Hook(stop_strings.TAIL, ("self", "new_accepted_len"), stop_strings.around_tail, "around"),
    Hook(cancelled_pass.PULL, ("self",), cancelled_pass.around_pull, "around"),
    Hook(background_prefill.NEXT_CHUNK, ("self", "req"), background_prefill.around_next_chunk, "around"),
    Hook(
        "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation",
        ("self", "batch", "forward_batch"),
        _around_forward,
        "around",
        (
            *("usage", "decode plan", "offsets", "composition", "gather", "question", "recompute"),
            *("unlock", "forward", "sparse prefill", "extended", "document", "statistics"),
        ),
    ),
    Hook(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",
        ("batch", "model_runner"),
        _after_batch,
        "after",
        ("positions",),
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor.process_batch_result_prefill",
        ("self", "batch", "result"),
        _around_result,
        "around",
        ("report",),
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.handle_dumper_control",
        ("self", "recv_req"),
        _around_control,
        "around",
        ("control",),
    ),
    Hook(
        "sglang.srt.model_executor.model_runner.ModelRunner.sample",
        ("self", "logits_output", "forward_batch"),
        _before_sampling,
        "before",
        ("distribution", "seed"),
    ),
    Hook(
        "sglang.srt.layers.sampler.Sampler._sample_from_probs",
        ("self", "probs", "sampling_info", "positions", "simple_sampling_case"),
        _around_draw,
        "around",
        ("seeded draw",),
    ),
    Hook(
        "sglang.srt.model_executor.model_runner.ModelRunner._forward_raw",
        ("self", "forward_batch", "pp_proxy_tensors"),
        _around_model,
        "around",
        ("output",),
    ),
    Hook(grammar_masks.NEW, grammar_masks.SIZES, grammar_masks.around_mask_memory, "around"),
    Hook(grammar_masks.FILL, ("self", "vocab_mask", "idx"), grammar_masks.after_fill, "after"),
    Hook(grammar_masks.MASK, grammar_masks.MASKED, grammar_masks.around_mask, "around", ("grammar",)),
    Hook(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.capture_one_shape",
        ("self", "size", "forward", "stream_idx", "variant_label"),
        _around_capture,
        "around",
    ),
    Hook(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner._resolve_lora_variant",
        ("self", "forward_batch"),
        _around_variant,
        "around",
        ("graph",),
    ),
    Hook(
        pool_hooks.POOL,
        ("self", "max_total_num_tokens", "mha_pool_class", "quant_method"),
        pool_hooks.around_pool,
        "around",
    ),
    Hook(grammar_cache.BACKEND, ("self",), grammar_cache.after_backend, "after"),
    Hook(grammar_cache.COMPILER, ("self", "tokenizer"), grammar_cache.around_compiler, "around"),
    Hook(pool_hooks.CELL, ("self", "kvc", "num_layers"), pool_hooks.after_cell_size, "after"),
    Hook(pool_hooks.TOKENS, ("self", "available_bytes", "page_size"), pool_hooks.around_tokens, "around"),
    Hook(pool_hooks.ROWS, ("self", "token_capacity"), pool_hooks.after_rows, "after"),
    Hook(
        "sglang.srt.layers.logprob_processor.get_token_ids_logprobs",
        ("logprobs", "token_ids_logprobs", "no_copy_to_cpu"),
        _after_token_ids,
        "after",
    ),
    *(Hook(entry, ("self", "recv_req"), _around_weights, "around") for entry in weight_updates.ENTRIES),
)


def check() -> list[str]:
    """Return one line for each difference from the signatures written down here; empty if there is none."""
    problems = []
    for target, expected in ({hook.target: hook.parameters for hook in HOOKS} | versions.RELIED_ON).items():
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
    """Register the hooks: the plugin's last step. They do nothing in a process whose cache is not ours."""
    global _installed
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in HOOKS:
        HookRegistry.register(hook.target, hook.function, HookType(hook.kind))
    _installed = True


def require_loaded() -> None:
    """Raise RuntimeError, with what to do, unless the plugin runs in this process and SGLang's hooked
    functions are as expected.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    if not _installed:
        raise RuntimeError(
            "SGLang did not load the ragserve plugin: its entry point is missing (reinstall: pip install "
            "--no-deps -e .), SGLANG_PLUGINS excludes it (add 'ragserve'), or it failed (see the log above)"
        )
    problems = check() + [
        f"the hook on {hook.target} was not applied"
        for hook in HOOKS
        if hook.target not in HookRegistry._patched
    ]
    if problems:
        raise RuntimeError(
            f"ragserve is written for SGLang {' and '.join(SGLANG_VERSIONS)}, and this one differs:\n  "
            + "\n  ".join(problems)
        )
