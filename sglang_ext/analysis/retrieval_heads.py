"""Retrieval heads: the few KV heads whose keys tell where in a text something is, found once per model
without any labelled data.

A few words of a text are prefilled again, alone, for a place behind it. A retrieval head's query then meets
its largest key where they stand in the text: in how many of such probes decides. Of these heads documents
keep the keys of all tokens, which find a passage where the means of blocks do not
(sglang_ext/context/README.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from sglang_ext.analysis.forward import Kv, LayerState, Text, run

PROBE = 12  # tokens of a probe
_EVERY = 24  # tokens between probes
_AFTER = 4  # tokens behind the probe's words that count as found, too: heads that copy look at what came next
_SHARE = 0.007  # of a document's KV: what the keys of these heads may take
_MOST = 16


def affordable(layers: int, kv_heads: int, head_dim: int, itemsize: int) -> int:
    """How many heads' keys, one byte a value and a scale of two, stay within their share of the KV; at least
    one.
    """
    return max(1, min(_MOST, int(_SHARE * 2 * layers * kv_heads * head_dim * itemsize / (head_dim + 2))))


def probes(n: int) -> range:
    """Where the probes of a text of ``n`` tokens begin; none where it is too short."""
    return range(_EVERY, n - PROBE - _AFTER, _EVERY)


def found(
    model_runner: Any,
    texts: Sequence[Sequence[int]],
    contexts: Sequence[Sequence[Kv]],
    gather: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """f32 [layers, kv_heads] of all ranks: in what share of the probes a head finds their place, plus how
    much it attends to it, below.

    ``contexts``: K and V of each text alone, by layer. ``gather`` joins the ranks' heads along dim 1.
    """
    device = contexts[0][0][0].device
    asked, places = [], []
    for number, ids in enumerate(texts):
        for start in probes(len(ids)):
            words = torch.tensor(list(ids[start : start + PROBE]), dtype=torch.int64).to(device)
            asked.append(Text(words, len(ids) + torch.arange(PROBE, device=device)))
            places.append((number, start))
    if not asked:
        kv_heads = gather(contexts[0][0][0][:1]).shape[1]
        return torch.zeros(len(contexts[0]), kv_heads)
    rows: list[torch.Tensor] = []

    def observe(layer: int, states: Sequence[LayerState]) -> None:
        scores = []
        for (number, start), state in zip(places, states, strict=True):
            key = contexts[number][layer][0].float()  # [n, kv_heads, head_dim]
            query = state.q[-1].float().unflatten(0, (key.shape[1], -1))  # [kv_heads, group, head_dim]
            share = (
                (torch.einsum("hgd,nhd->hgn", query, key) * state.scaling)[..., 3:].softmax(-1).amax(1)
            )  # sinks left out
            inside = slice(start - 3, start + PROBE + _AFTER - 3)
            best = share.argmax(-1)
            hit = ((best >= inside.start) & (best < inside.stop)).float()
            scores.append(hit + 0.01 * share[:, inside].sum(-1))
        rows.append(torch.stack(scores).mean(0)[None])

    run(model_runner, asked, observe)
    return gather(torch.cat(rows)).cpu()


def best(score: torch.Tensor, count: int) -> list[tuple[int, int]]:
    """Layer and KV head of the ``count`` heads with the highest ``score`` [layers, kv_heads], in the order of
    layers.
    """
    chosen = score.flatten().argsort(descending=True, stable=True)[:count]
    return sorted((int(i) // score.shape[1], int(i) % score.shape[1]) for i in chosen)
