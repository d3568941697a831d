"""progressive_decode: blocks used, the weight really reached, and time against a fixed budget of the same
error.

On structured keys of an 8B model's shape, and on the queries and keys that a real model has over long
prompts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ragserve.bench.kernels.decode_cases import (
    LOGICAL,
    DecodeCase,
    Layer,
    block_weights,
    layer_ms,
    topic_case,
)
from ragserve.bench.kernels.decode_record import long_prompts, record, recorded_cases
from ragserve.bench.kernels.timing import Row, bandwidth, relative_error

if TYPE_CHECKING:
    import torch

    from ragserve_kernels.page_select import PageSelection
    from ragserve_kernels.progressive_decode import Progressive

Ranking = Literal["minmax", "center", "true"]
Bound = Literal["lowest", "round"]
BOUNDS: tuple[Bound, ...] = ("lowest", "round")
THRESHOLDS = (0.9, 0.95, 0.98)


class Fixed(NamedTuple):
    """A fixed budget, and the mean error of its output."""

    blocks: int
    error: float


def attended(
    case: DecodeCase, layer: Layer, selection: PageSelection | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(out, log-sum-exp)`` over everything, or over a selection."""
    import torch

    lse = torch.empty(layer.q.shape[:2], dtype=torch.float32, device=layer.q.device)
    return case.attend(layer, selection, lse=lse), lse


def ranked(case: DecodeCase, layer: Layer, ranking: Ranking) -> PageSelection:
    """Rank all blocks, the forced ones first; "true" ranks by the largest weight in the query group."""
    import torch

    from ragserve_kernels.page_select import PageSelection

    if ranking != "true":
        return case.select(layer, None, ranking)
    weights = block_weights(case, layer)
    keen = weights.view(case.batch, case.kv_heads, -1, weights.shape[-1]).amax(2)  # [batch, kv_heads, blocks]
    blocks = case.blocks
    at = torch.arange(keen.shape[-1], device=keen.device)
    keen = keen.masked_fill((at >= blocks[:, None])[:, None], -1.0)  # none there
    keen = keen.masked_fill(((at == 0) | (at == blocks[:, None] - 1))[:, None], 2.0)
    order = keen.sort(dim=-1, descending=True, stable=True).indices
    return PageSelection(
        order.int().contiguous(), blocks.int()[:, None].expand(-1, case.kv_heads).contiguous()
    )


def progress(
    case: DecodeCase, orders: Sequence[PageSelection], threshold: float, bound: Bound, i: int
) -> Progressive:
    """Attend to layer ``i`` in rounds over its blocks, ranked in ``orders``."""
    from ragserve_kernels.progressive_decode import progressive_decode

    layer = case.layers[i]
    return progressive_decode(
        layer.q, (layer.k, layer.v), case.paged, orders[i], threshold=threshold, bound=bound
    )


def _fixed(case: DecodeCase, ranking: str, blocks: int, layer: Layer) -> torch.Tensor:
    """Attend to a fixed budget of blocks."""
    return case.attend(layer, case.select(layer, blocks * case.page, ranking))


def _each_layer_ms(case: DecodeCase, run: Callable[[Layer], object]) -> float:
    return layer_ms(lambda i: run(case.layers[i]), len(case.layers), calls=max(8, len(case.layers)))


def quality(cases: Sequence[DecodeCase], ranking: Ranking, bound: Bound, threshold: float) -> dict[str, Any]:
    """Means over ``cases`` and their layers: blocks used, the true weight they hold, the share of query heads
    below the threshold, the error of the output; blocks used per layer."""
    import torch

    from ragserve_kernels.page_select import PageSelection

    used: list[list[float]] = []
    errors, reached = [], []
    for case in cases:
        used.append([])
        orders = [ranked(case, layer, ranking) for layer in case.layers]
        for i, layer in enumerate(case.layers):
            want, full = attended(case, layer)
            got = progress(case, orders, threshold, bound, i)
            _, held = attended(case, layer, PageSelection(orders[i].blocks, got.blocks_used))
            reached.append(torch.exp(held - full).flatten())
            errors.append(relative_error(got.out, want))
            used[-1].append(float(got.blocks_used.float().mean()))
    weight = torch.cat(reached)
    layers = [sum(counts) / len(used) for counts in zip(*used, strict=True)]
    return {
        "blocks_used": round(sum(layers) / len(layers), 1),
        "weight_mean": round(float(weight.mean()), 4),
        "weight_min": round(float(weight.min()), 4),
        "heads_below": round(float((weight < threshold).float().mean()), 4),
        "error": round(sum(errors) / len(errors), 4),
        **({"blocks_used_by_layer": [round(x, 1) for x in layers]} if len(layers) > 1 else {}),
    }


def fewest_blocks(cases: Sequence[DecodeCase], threshold: float) -> float:
    """Blocks that a KV head needs on average so that every query head of its group really has ``threshold``
    of its weight, taken in the order of the true ranking: what no rule over this ranking can undercut."""
    import torch

    found = []
    for case in cases:
        for layer in case.layers:
            weights = block_weights(case, layer)
            weights = weights.view(case.batch, case.kv_heads, -1, weights.shape[-1])
            order = ranked(case, layer, "true").blocks.long()[:, :, None].expand_as(weights)
            worst = weights.gather(-1, order).cumsum(-1).amin(2)  # [batch, kv_heads, blocks]
            needed = ((worst < threshold).sum(-1) + 1).clamp_max(case.blocks[:, None])
            found.append(needed.float().mean())
    return float(torch.stack(found).mean())


def ladder(cases: Sequence[DecodeCase], scoring: str) -> list[Fixed]:
    """The error of fixed budgets, from 4 blocks in steps of 1.05 until all are taken; means over ``cases``
    and layers.
    """
    most = max(int(case.blocks.max()) for case in cases)
    wanted = [[case.attend(layer) for layer in case.layers] for case in cases]
    steps = []
    budget = min(4, most)
    while True:
        errors = [
            relative_error(_fixed(case, scoring, budget, layer), want)
            for case, wants in zip(cases, wanted, strict=True)
            for layer, want in zip(case.layers, wants, strict=True)
        ]
        steps.append(Fixed(budget, sum(errors) / len(errors)))
        if budget == most:
            return steps
        budget = min(most, max(budget + 1, int(budget * 1.05)))


def compare(
    name: str,
    cases: Sequence[DecodeCase],
    ceiling: float,
    rankings: Sequence[Ranking],
) -> Iterator[Row]:
    """Yield a row per ranking, bound and threshold: what :func:`quality` says over all ``cases``, and the
    times of a call for the first of them, beside dense attention and the smallest budget of :func:`ladder`
    whose error is no larger. The true ranking is not timed."""
    case = cases[0]
    blocks = round(float(case.blocks.float().mean()), 1)
    pair = case.kv_heads * case.token_bytes  # bytes of a token in all KV heads
    summary_gb = int(case.lens.sum()) // min(LOGICAL, case.page) * pair / 1e9

    dense_ms = _each_layer_ms(case, case.attend)
    fewest = {threshold: round(fewest_blocks(cases, threshold), 1) for threshold in THRESHOLDS}
    for ranking in rankings:
        orders = [ranked(case, layer, ranking) for layer in case.layers]
        budgets = [] if ranking == "true" else ladder(cases, ranking)
        rank_ms = 0.0 if ranking == "true" else _each_layer_ms(case, partial(ranked, case, ranking=ranking))
        fixed_ms: dict[int, float] = {}
        for bound, threshold in itertools.product(BOUNDS, THRESHOLDS):
            held = quality(cases, ranking, bound, threshold)
            variant = f"{ranking} ranking, bound {bound}, threshold {threshold}"
            figures = {"blocks": blocks, "fewest_blocks": fewest[threshold], **held}
            if ranking == "true":
                yield {"case": name, "variant": variant, **figures}
                continue
            attend = partial(progress, case, orders, threshold, bound)
            ms = layer_ms(attend, len(orders), calls=max(8, len(orders)))
            gb = held["blocks_used"] / blocks * case.kv_bytes / 1e9
            top = next((step for step in budgets if step.error <= held["error"]), budgets[-1])
            if top.blocks not in fixed_ms:
                fixed_ms[top.blocks] = _each_layer_ms(case, partial(_fixed, case, ranking, top.blocks))
            read = min(1.0, top.blocks / blocks) * case.kv_bytes / 1e9
            yield bandwidth(name, variant, ms, gb, ceiling, **figures) | {
                "rank_ms": round(rank_ms, 4),
                "with_ranking_ms": round(rank_ms + ms, 4),
                "dense_ms": round(dense_ms, 4),
                "topk_blocks": top.blocks,
                "topk_error": round(top.error, 4),
                "topk_ms": round(fixed_ms[top.blocks], 4),
                "topk_gb": round(read + summary_gb * (0.5 if ranking == "center" else 1), 4),
            }


def progressive_rows(ceiling: float, quick: bool) -> Iterator[Row]:
    """Structured keys of an 8B model's shape."""
    import torch

    every = [(32768, 1), (32768, 8), (32768, 32), (131072, 1), (131072, 8)]
    shapes = [(*shape, "peaked", 9.0) for shape in every]
    shapes += [(*shape, "diffuse", 4.0) for shape in every if shape[1] == 8]
    for context, batch, kind, strength in shapes[1:2] if quick else shapes:
        case = topic_case(batch, context, strength=strength)
        rankings: list[Ranking] = ["minmax", "center", "true"] if batch == 8 else ["minmax"]
        name = f"{kind} keys, batch {batch} x {context}, blocks of {case.page}"
        yield from compare(name, [case], ceiling, rankings)
        del case
        torch.cuda.empty_cache()


def real_rows(ceiling: float, quick: bool, *, model: str, data: Sequence[Path]) -> Iterator[Row]:
    """Queries of several decode steps and the keys of all layers, per question set and block size."""
    import torch

    device = torch.device("cuda")
    for path in data[:1] if quick else data:
        prompts = long_prompts(model, path, count=4 if quick else 16)
        records = record(model, prompts, steps=8, device=device, dtype=torch.bfloat16)
        print(
            f"{path.name}: {len(prompts)} prompts of {min(map(len, prompts))} to {max(map(len, prompts))} "
            "tokens recorded",
            flush=True,
        )
        for page in (64, 16):
            cases = recorded_cases(records, page=page, steps=(7, 0, 3))
            tokens = int(cases[0].lens.float().mean())
            name = f"{path.name.split('.')[0]}, {len(prompts)} x {tokens} tokens, blocks of {page}"
            yield from compare(name, cases, ceiling, ("minmax", "center", "true"))
            del cases
            torch.cuda.empty_cache()
