"""The functions of SGLang that ragserve hooks, as one table. It fits all of `protocol.SGLANG_VERSIONS`: what
differs between them is in `sglang_ext.versions`, with the methods that our cache overrides or calls.

`install()` registers the hooks with SGLang's own registry. `check()` compares signatures with the table, at
start and in a test, so that another version fails with a list of what moved instead of with a wrong answer.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from sglang_ext import versions
from sglang_ext.attention.pools import pool_hooks
from sglang_ext.process import grammar_masks, hook_functions
from sglang_ext.sglang_internals import (
    background_prefill,
    grammar_cache,
    stop_strings,
    weight_updates,
)
from sglang_ext.stages import cancelled_pass
from sglang_ext.wire.protocol import SGLANG_VERSIONS

_installed = False


@dataclass(frozen=True, slots=True)
class Hook:
    """Runs ``function`` before, after or around SGLang's ``target``, whose leading ``parameters`` it relies
    on.

    ``stages``: those of `sglang_ext.stages.stages` that it runs. Empty for a hook within another's stage,
    and for one that runs at the start only, whose error must end the process.
    ``until``: what SGLang would have to offer for the hook to be needless, and its issue or pull request.
    """

    target: str
    parameters: tuple[str, ...]
    function: Callable[..., Any]
    kind: Literal["before", "after", "around"]
    stages: tuple[str, ...] = ()
    until: str = ""


def _weights(entry: str) -> Hook:
    until = "a setting that refuses changes of the weights"
    return Hook(entry, ("self", "recv_req"), hook_functions.around_weights, "around", until=until)


_SRT = "sglang.srt"
_RUNNER = f"{_SRT}.model_executor.model_runner.ModelRunner"
_GRAPHS = f"{_SRT}.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"
_RESULTS = f"{_SRT}.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
_POOL = "a registered KV pool that says its own cell size, on CUDA as on platforms of plugins (sglang#21388)"
_STOPS = "stop strings held back in all outputs, incomplete characters included (streams: sglang#11462)"

SHARED = (
    Hook(
        f"{_SRT}.managers.schedule_batch.Req.__init__",
        ("self", "rid", "origin_input_text", "origin_input_ids", "sampling_params"),
        hook_functions.after_request,
        "after",
        ("request", "decode options"),
        until="a callback for a request that the scheduler has taken, which may refuse it",
    ),
    Hook(
        f"{_SRT}.managers.scheduler.Scheduler.get_new_batch_prefill",
        ("self", "running_batch"),
        hook_functions.before_schedule,
        "before",
        (
            *("queue", "offload plan", "segments", "offloading"),
            *("analysis", "stored analysis", "new analysis", "query", "selection"),
        ),
        until="a callback before each scheduling step",
    ),
    Hook(
        f"{_SRT}.managers.schedule_policy.PrefillAdder.add_one_req",
        ("self", "req", "has_chunked_req", "truncation_align_size"),
        hook_functions.around_admission,
        "around",
        ("offload admission", "admission", "accounting", "load"),
        until="a prefix cache that may fill slots for a request when it is admitted, not when it is matched",
    ),
    Hook(
        *(stop_strings.BEGINS, ("self",), stop_strings.around_begins, "around", ("stop strings",)),
        until=_STOPS,
    ),
    Hook(stop_strings.OUTPUT, ("self", "req"), stop_strings.around_output, "around", until=_STOPS),
    Hook(stop_strings.TAIL, ("self", "new_accepted_len"), stop_strings.around_tail, "around", until=_STOPS),
    Hook(
        *(cancelled_pass.PULL, ("self",), cancelled_pass.around_pull, "around"),
        until="aborts that are seen within a step (between steps of a prefill: sglang#11139)",
    ),
    Hook(
        *(background_prefill.NEXT_CHUNK, ("self", "req"), background_prefill.around_next_chunk, "around"),
        until="a chunk size by request",
    ),
    Hook(
        f"{_SRT}.managers.tp_worker.TpModelWorker.forward_batch_generation",
        ("self", "batch", "forward_batch"),
        hook_functions.around_forward,
        "around",
        (
            *("usage", "decode plan", "offsets", "composition", "gather", "question", "recompute"),
            *("unlock", "forward", "sparse prefill", "extended", "document", "statistics"),
        ),
        until="callbacks around a batch's forward pass, on its stream",
    ),
    Hook(
        f"{_SRT}.model_executor.forward_batch_info.ForwardBatch.init_new",
        ("batch", "model_runner"),
        hook_functions.after_batch,
        "after",
        ("positions",),
        until="an offset of positions by request",
    ),
    Hook(
        f"{_RESULTS}.process_batch_result_prefill",
        ("self", "batch", "result"),
        hook_functions.around_result,
        "around",
        ("report",),
        until="a callback before the first token of a prefill is sent",
    ),
    Hook(
        f"{_SRT}.managers.scheduler.Scheduler.handle_dumper_control",
        ("self", "recv_req"),
        hook_functions.around_control,
        "around",
        ("control",),
        until="messages between a plugin's parts in the server and in the scheduler",
    ),
    Hook(
        f"{_RUNNER}.sample",
        ("self", "logits_output", "forward_batch"),
        hook_functions.before_sampling,
        "before",
        ("distribution", "seed"),
        until="the requests' own objects in a custom logits processor (0.5.23's sampling observer has none)",
    ),
    Hook(
        f"{_SRT}.layers.sampler.Sampler._sample_from_probs",
        ("self", "probs", "sampling_info", "positions", "simple_sampling_case"),
        hook_functions.around_draw,
        "around",
        ("seeded draw",),
        until="seeds by request without deterministic inference (sglang#1335)",
    ),
    Hook(
        f"{_RUNNER}._forward_raw",
        ("self", "forward_batch", "pp_proxy_tensors"),
        hook_functions.around_model,
        "around",
        ("output",),
        until="a batch that brings its output, as the callbacks around a forward pass might return",
    ),
    Hook(
        *(grammar_masks.FILL, ("self", "vocab_mask", "idx"), grammar_masks.after_fill, "after", ("grammar",)),
        until="grammars that allow no token end their own request only",
    ),
    Hook(
        f"{_GRAPHS}.capture_one_shape",
        ("self", "size", "forward", "stream_idx", "variant_label"),
        hook_functions.around_capture,
        "around",
        until="attention backends that name several graphs of a batch size (0.5.23's attention variants)",
    ),
    Hook(
        f"{_GRAPHS}._resolve_lora_variant",
        ("self", "forward_batch"),
        hook_functions.around_variant,
        "around",
        ("graph",),
        until="the same",
    ),
    Hook(
        pool_hooks.POOL,
        ("self", "max_total_num_tokens", "mha_pool_class", "quant_method"),
        pool_hooks.around_pool,
        "around",
        until=_POOL,
    ),
    Hook(
        *(grammar_cache.BACKEND, ("self",), grammar_cache.after_backend, "after"),
        until="a bound on compiled grammars (sglang#22196)",
    ),
    Hook(
        *(grammar_cache.COMPILER, ("self", "tokenizer"), grammar_cache.around_compiler, "around"),
        until="the same",
    ),
    Hook(pool_hooks.CELL, ("self", "kvc", "num_layers"), pool_hooks.after_cell_size, "after", until=_POOL),
    Hook(
        *(pool_hooks.TOKENS, ("self", "available_bytes", "page_size"), pool_hooks.around_tokens, "around"),
        until=_POOL,
    ),
    Hook(pool_hooks.ROWS, ("self", "token_capacity"), pool_hooks.after_rows, "after", until=_POOL),
    *map(_weights, weight_updates.ENTRIES),
)
"""Hooks that all versions need."""
HOOKS = (
    *SHARED,
    *(_weights(f"{weight_updates.UPDATER}.{name}") for name in versions.WEIGHT_ENTRIES),
    *(Hook(*each, until="the newest version that is served") for each in versions.OWN_HOOKS),
)
"""Those of the installed version."""


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
    from sglang.srt.plugins import hook_registry
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hook_registry._propagate_patch = _propagating_functions(hook_registry._propagate_patch)
    for hook in HOOKS:
        HookRegistry.register(hook.target, hook.function, HookType(hook.kind))
    _installed = True


def _propagating_functions(propagate: Callable[..., int]) -> Callable[..., int]:
    """SGLang's search of all modules for a name that holds a patched function. It takes 40 ms for each hook,
    and no module holds a method: all of ours are found in their class."""

    def only_functions(original: object, wrapped: object, owner: object) -> int:
        return 0 if isinstance(owner, type) else propagate(original, wrapped, owner)

    return only_functions


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
