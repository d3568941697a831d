"""What the hooks of `sglang_ext.process.hooks` do that are not a module's own subject: they hand requests and
batches to the runtime of the process (`sglang_ext.state.current`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any

from sglang_ext import versions
from sglang_ext.sglang_internals import background_prefill, seeded_sampling, weight_updates
from sglang_ext.stages import stages
from sglang_ext.state import current


def after_request(result: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
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


def before_schedule(scheduler: Any, running_batch: Any, *args: Any, **kwargs: Any) -> None:
    if current.composition is not None:
        waiting = current.composition.stage
        stages.run_alike("queue", waiting.fail, current.composition.before_schedule, scheduler)
    if current.attention is not None:
        failed = stages.ending(filter(current.attention.may_lag, running_batch.reqs))
        stages.run_alike("offload plan", failed, current.attention.before_schedule, scheduler, running_batch)


def around_admission(original: Callable[..., Any], adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    from sglang.srt.managers.schedule_policy import AddReqResult

    from sglang_ext.context.compose.request import is_composed
    from sglang_ext.context.scheduler.document_pass import waits_for_own_step

    running = [*(adder.running_batch.reqs if adder.running_batch is not None else ()), *adder.can_run_list]
    due, failed = 0, stages.ending([req])
    if current.attention is not None and running:
        asking = [*running, req]
        due = stages.run_alike("offload plan", stages.nobody, current.attention.due_tokens, asking) or 0
    versions.reserve_tokens(adder, due)  # for as long as it decides on this request

    def add() -> Any:
        align = kwargs.get("truncation_align_size")
        return background_prefill.admit(adder, req, align, partial(original, adder, req, *args, **kwargs))

    try:
        if (attention := current.attention) is not None:
            ends = req.to_finish is not None
            found = stages.run_alike("offload admission", failed, lambda: (attention.admit(adder, req, add),))
            if found is None and not ends:
                return AddReqResult.CONTINUE  # it ends at its next turn, with all that it holds
            if found is not None and found[0] is not None:
                return found[0]
        if current.composition is not None and stages.run_alike(
            "admission", failed, waits_for_own_step, adder, req
        ):
            return AddReqResult.OTHER
        if current.composition is None or not is_composed(req):
            return add()
        return current.composition.admission.admit(adder, req, add)
    finally:
        versions.reserve_tokens(adder, -due)


def around_forward(original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
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


def before_sampling(runner: Any, logits_output: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
    from sglang_ext.diagnostics import distribution

    current.sampled = getattr(forward_batch, "ragserve_reqs", ())
    if measured := [req for _, req, _ in distribution.traced(current.sampled)]:
        logits = logits_output.next_token_logits
        stages.run_alike(
            "distribution", stages.ending(measured), distribution.before_sampling, forward_batch, logits
        )

    if seeds := [req for _, req, _ in seeded_sampling.seeded(current.sampled)]:
        stages.run_alike("seed", stages.ending(seeds), seeded_sampling.before_sampling, forward_batch)


def around_draw(
    original: Callable[..., Any], sampler: Any, probs: Any, sampling_info: Any, *args: Any, **kwargs: Any
) -> Any:
    result = original(sampler, probs, sampling_info, *args, **kwargs)
    if seeds := [req for _, req, _ in seeded_sampling.seeded(current.sampled)]:
        failed = stages.ending(seeds)
        tokens = versions.drawn(result)
        stages.run_alike("seeded draw", failed, seeded_sampling.draw, probs, current.sampled, tokens)
    return result


def around_model(
    original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    output = None
    if current.batch is not None and current.composition is not None:
        # a failure takes nothing: the model runs and computes the same
        output = stages.run("output", stages.nobody, current.composition.output_of, forward_batch)
    return original(runner, forward_batch, *args, **kwargs) if output is None else output


def after_batch(result: Any, cls: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    result.ragserve_reqs, result.ragserve_decoding = batch.reqs, batch.decoding_reqs or ()
    if current.composition is not None:
        from sglang_ext.context.compose.request import is_composed

        failed = stages.ending(filter(is_composed, batch.reqs))
        stages.run_alike("positions", failed, current.composition.shift_positions, result)
    return result


def around_result(
    original: Callable[..., Any], processor: Any, batch: Any, result: Any, *args: Any, **kwargs: Any
) -> Any:
    if current.composition is not None:
        current.composition.before_result(batch)
    return original(processor, batch, result, *args, **kwargs)


def around_control(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    from sglang_ext.wire.protocol import CONTROL_METHOD

    if recv_req.method != CONTROL_METHOD:
        return original(scheduler, recv_req)
    from sglang.srt.managers.io_struct import DumperControlReqOutput

    from sglang_ext.process.control import answer

    output = answer(current.runtime, recv_req.body)
    scheduler.ipc_channels.send_to_tokenizer.send_output(DumperControlReqOutput(**output), recv_req)
    return None


def around_weights(original: Callable[..., Any], updater: Any, recv_req: Any) -> Any:
    return weight_updates.guarded(original, updater, recv_req, composes=current.composition is not None)


def around_capture(
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


def around_variant(original: Callable[..., Any], runner: Any, forward_batch: Any) -> Any:
    label = None
    if (attention := current.attention) is not None:
        failed = stages.ending(getattr(forward_batch, "ragserve_reqs", ()))
        label = stages.run("graph", failed, lambda: attention.backend.variant.value)
    return original(runner, forward_batch) if label is None else label
