"""Finds a model's retrieval heads: the few KV heads whose keys tell where in a text something is.

No labelled data is needed. A few words of a text are prefilled again, alone, at positions behind it. A
retrieval head's query then has its largest key where those words stand in the text; heads are ranked by how
many such probes they hit. Documents keep these heads' keys of all tokens, which find a passage where the
means of blocks do not (benchmarks/results/composed-contexts.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from sglang_ext.analysis.forward import Kv, LayerState, Text, run

PROBE = 12  # tokens per probe
_EVERY = 24  # tokens between probes
_AFTER = 4  # tokens behind the probe's words that count as a hit: heads that copy look at what comes next
_SHARE = 0.007  # most of a document's KV that these heads' keys may take
_MOST = 16  # heads
_LAYERS = 3  # that are looked at where single layers have to do


def affordable(layers: int, kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Return how many heads' keys, one byte a value and two for the scale, stay within their share of the KV;
    at least one.
    """
    return max(1, min(_MOST, int(_SHARE * 2 * layers * kv_heads * head_dim * itemsize / (head_dim + 2))))


def probes(n: int) -> range:
    """Starts of the probes of a text of ``n`` tokens; none if it is too short."""
    return range(_EVERY, n - PROBE - _AFTER, _EVERY)


def found(
    model_runner: Any,
    texts: Sequence[Sequence[int]],
    contexts: Sequence[Sequence[Kv]],
    gather: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Score every head of all ranks, f32 [layers, kv_heads]: the share of probes that it finds, plus a
    hundredth of its attention there.

    ``contexts``: K and V of each text alone, by layer. ``gather`` joins the ranks' heads along dim 1.
    """
    device = contexts[0][0][0].device
    texts_of_probes, places = [], []
    for number, ids in enumerate(texts):
        for start in probes(len(ids)):
            words = torch.tensor(list(ids[start : start + PROBE]), dtype=torch.int64).to(device)
            texts_of_probes.append(Text(words, len(ids) + torch.arange(PROBE, device=device)))
            places.append((number, start))
    if not places:
        kv_heads = gather(contexts[0][0][0][:1]).shape[1]
        return torch.zeros(len(contexts[0]), kv_heads)
    rows: list[torch.Tensor] = []

    def observe(layer: int, states: Sequence[LayerState]) -> None:
        scores = []
        for (number, start), state in zip(places, states, strict=True):
            key = contexts[number][layer][0].float()  # [n, kv_heads, head_dim]
            query = state.q[-1].float().unflatten(0, (key.shape[1], -1))  # [kv_heads, group, head_dim]
            logits = torch.einsum("hgd,nhd->hgn", query, key) * state.scaling
            share = logits[..., 3:].softmax(-1).amax(1)  # without the sinks
            inside = slice(start - 3, start + PROBE + _AFTER - 3)
            best = share.argmax(-1)
            hit = ((best >= inside.start) & (best < inside.stop)).float()
            scores.append(hit + 0.01 * share[:, inside].sum(-1))
        rows.append(torch.stack(scores).mean(0)[None])

    run(model_runner, texts_of_probes, observe)
    return gather(torch.cat(rows)).cpu()


def best(score: torch.Tensor, count: int) -> list[tuple[int, int]]:
    """Layer and KV head of the ``count`` heads with the highest ``score`` [layers, kv_heads], by layer."""
    chosen = score.flatten().argsort(descending=True, stable=True)[:count]
    return sorted((int(i) // score.shape[1], int(i) % score.shape[1]) for i in chosen)


def best_layers(score: torch.Tensor) -> tuple[int, ...]:
    """Return the layers with the highest mean ``score`` [layers, kv_heads] of their heads, ascending."""
    count = min(_LAYERS, len(score))
    return tuple(sorted(score.mean(1).argsort(descending=True, stable=True)[:count].tolist()))
