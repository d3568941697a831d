"""Compares composed KV with the model's own prefill when the engine starts.

A model may rotate some layers' keys only, scale its embeddings, or attend in a way that no check of its
modules sees; composed, it would answer wrongly without an error. So one short made-up prompt goes through
SGLang's prefill at two places, and through each of our own ways to the second place. All must agree.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sglang_ext.analysis.forward import LayerState, Text, run
from sglang_ext.context.compose.gather import Filling, Gather
from sglang_ext.context.recompute.job import RecomputeJob
from sglang_ext.context.recompute.recompute_pass import recompute
from sglang_ext.sglang_internals.model import (
    NotComposable,
    forward_stream,
    prompt_batch,
    unlike_plain_attention,
)

log = logging.getLogger(__name__)
_TOKENS, _QUESTION = 48, 8  # of the prompt; the question is its end
_SHIFT = 301  # positions between the two places: at least a radian for most of the frequencies in use
# Largest difference, as a share of the value, by dtype of the KV. What a wrong model differs by is near 1.
_TOLERANCE = {torch.float32: 0.01, torch.float16: 0.1, torch.bfloat16: 0.25}


@dataclass(frozen=True, eq=False)
class _Prompt:
    """The prompt moved by ``_SHIFT``, or as far as the context allows. int64 on the model's device."""

    ids: torch.Tensor
    places: torch.Tensor
    shift: int

    @classmethod
    def of(cls, runner: Any, device: torch.device) -> _Prompt:
        config = runner.model_config
        drawn = torch.randint(0, config.vocab_size, (_TOKENS,), generator=torch.Generator().manual_seed(0))
        shift = max(1, min(_SHIFT, config.context_len - _TOKENS))
        places = torch.arange(_TOKENS, device=device)
        return cls(drawn.to(device), places, shift)


def check_composition(model_runner: Any, gather: Gather, allocator: Any) -> None:
    """Raise NotComposable, with what differs, unless moved, recomputed and analysed KV are the model's own.

    Uses free slots and SGLang's padding row, and gives them back. All ranks must call it together.
    """
    if (reason := unlike_plain_attention(model_runner.model)) is not None:
        raise NotComposable(f"composed contexts are not computed as this model does: {reason}{_ADVICE}")
    started = time.perf_counter()
    pool = model_runner.token_to_kv_pool
    tolerance = _TOLERANCE[pool.dtype]
    with forward_stream(model_runner), _slots(model_runner, allocator) as slots:
        found = _differences(model_runner, gather, *slots)
        log.info(
            "composed KV differs from prefilled KV by %s (%.0f ms)",
            ", ".join(f"{value:.2g} ({what})" for what, value in found.items()),
            (time.perf_counter() - started) * 1e3,
        )
    wrong = {what: value for what, value in found.items() if not value <= tolerance}  # not a number is wrong
    if wrong:
        what, value = next(iter(wrong.items()))
        raise NotComposable(
            f"composed contexts would answer wrongly with this model: {what} differ from its own prefill by "
            f"{value:.0%}, more than {tolerance:.0%}{_ADVICE}"
        )


_ADVICE = ": use strategy 'prefix' or 'full'"


def _differences(
    runner: Any, gather: Gather, first: torch.Tensor, own: torch.Tensor, ours: torch.Tensor
) -> dict[str, float]:
    """Differences from the model's own prefill at the second place, by what was compared, in ``own``. The
    prompt is prefilled at the first place into ``first``; ``ours`` takes what is moved and recomputed.
    """
    pool = runner.token_to_kv_pool
    prompt = _Prompt.of(runner, first.device)
    moved = prompt.places + prompt.shift
    _prefill(runner, prompt.ids, prompt.places, first)
    logits = _prefill(runner, prompt.ids, moved, own)
    kept = np.arange(_TOKENS)
    start = np.zeros(1, dtype=np.int64)
    gather([Filling(kept, ours, start, np.full(1, prompt.shift), [first])])
    gather.finish()
    found = {"moved keys and values": _largest(pool, lambda layer: _at(pool, layer, ours), own)}
    for layer in range(pool.layer_num):  # what is not written again must not look right
        pool.get_key_buffer(layer)[ours] = 0
        pool.get_value_buffer(layer)[ours] = 0
    positions = kept + prompt.shift
    ids = prompt.ids.cpu().numpy()
    recompute(runner, [RecomputeJob.plan(ids, positions, positions, ours, first_document=0)])
    found["recomputed keys and values"] = _largest(pool, lambda layer: _at(pool, layer, ours), own)
    asked = _prefill(runner, prompt.ids[-_QUESTION:], moved[-_QUESTION:], ours)
    found["logits behind a recomputed context"] = _difference(asked.T, logits.T)
    found["analysed keys and values"] = _largest(pool, _run(runner, Text(prompt.ids, moved)), own)
    head, rest = own[:-_QUESTION], own[-_QUESTION:]
    behind = Text(prompt.ids[-_QUESTION:], moved[-_QUESTION:], lambda layer: _at(pool, layer, head))
    found["keys and values behind a prefix"] = _largest(pool, _run(runner, behind), rest)
    return found


def _run(runner: Any, text: Text) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    """K and V of a text by layer, by a pass in memory."""
    states: list[tuple[torch.Tensor, torch.Tensor]] = []

    def observe(layer: int, found: Sequence[LayerState]) -> None:
        states.append((found[0].k.clone(), found[0].v.clone()))

    run(runner, [text], observe)
    return states.__getitem__


def _prefill(runner: Any, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Run SGLang's own forward over the last ``ids`` of ``slots``; logits of the last token, f32 [1, vocab],
    less their mean.
    """
    runner.req_to_token_pool.req_to_token[0, : len(slots)] = slots.to(torch.int32)
    output = runner.forward(prompt_batch(ids, positions, slots))
    logits: torch.Tensor = output.logits_output.next_token_logits.float()
    return logits - logits.mean(-1, keepdim=True)


def _at(pool: Any, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return pool.get_key_buffer(layer)[slots], pool.get_value_buffer(layer)[slots]


def _largest(pool: Any, ours: Callable[[int], tuple[torch.Tensor, torch.Tensor]], own: torch.Tensor) -> float:
    """The largest difference of a layer's keys or values from those in the slots ``own``."""
    return max(
        _difference(found, wanted)
        for layer in range(pool.layer_num)
        for found, wanted in zip(ours(layer), _at(pool, layer, own), strict=True)
    )


def _difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Distance of two [tokens, ...] over the tokens, as a share of ``wanted``, mean over all channels: a few
    channels of large values, which many models have, must not hide the others.
    """
    found, wanted = found.float(), wanted.float()
    return float(((found - wanted).norm(dim=0) / wanted.norm(dim=0).clamp(min=1e-6)).mean())


@contextmanager
def _slots(runner: Any, allocator: Any) -> Iterator[list[torch.Tensor]]:
    """Three times the slots of the prompt, int64, and the padding row for them."""
    page = allocator.page_size
    each = -(-_TOKENS // page) * page
    slots = allocator.alloc(3 * each)
    if slots is None:
        raise NotComposable(f"the KV pool has no room for {3 * each} tokens: raise max_total_tokens")
    row = runner.req_to_token_pool.req_to_token[0]
    before = row[:_TOKENS].clone()
    try:
        yield [part[:_TOKENS] for part in slots.to(torch.int64).split(each)]
    finally:
        row[:_TOKENS] = before
        allocator.free(slots)
