"""progressive_decode on structured keys: blocks used, the weight really reached, and time against a fixed budget of the same error."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from ragserve.bench.kernels_decode_cases import LOGICAL, TOKEN_BYTES, Case, Layer, layer_ms, topic_case
from ragserve.bench.kernels_timing import HEAD_DIM, KV_HEADS, Row, bandwidth

if TYPE_CHECKING:
    import torch

    from ragserve_kernels.page_select import Selection
    from ragserve_kernels.progressive_decode import Progressive


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


def _dense(case: Case, selection: Selection | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """``(out, log-sum-exp)`` over everything, or over a selection."""
    import torch

    from ragserve_kernels.sparse_decode import sparse_decode

    layer = case.layers[0]
    lse = torch.empty(layer.q.shape[:2], dtype=torch.float32, device="cuda")
    index: dict[str, Any] = {} if selection is None else {"index": selection.blocks, "counts": selection.counts}
    return sparse_decode(*case.attention(layer), page_size=case.page, lse=lse, **index), lse


def progressive_rows(ceiling: float, quick: bool) -> list[Row]:
    """Per kind of keys, shape and threshold: ranking and rounds; beside it the smallest budget, in steps of 1.25, of no larger error."""
    import torch

    from ragserve_kernels.page_select import Selection
    from ragserve_kernels.progressive_decode import progressive_decode
    from ragserve_kernels.sparse_decode import sparse_decode

    rows: list[Row] = []
    every = [(32768, 1), (32768, 8), (32768, 32), (131072, 1), (131072, 8)]
    shapes = [(*shape, "peaked", 9.0) for shape in every] + [(*shape, "diffuse", 4.0) for shape in every if shape[1] == 8]
    for context, batch, kind, strength in shapes[1:2] if quick else shapes:
        case = topic_case(batch, context, strength=strength)
        layer = case.layers[0]
        blocks = context // case.page
        want, full = _dense(case)

        def dense(_: int, case: Case = case, layer: Layer = layer) -> torch.Tensor:
            return sparse_decode(*case.attention(layer), page_size=case.page)

        def rank(_: int, case: Case = case, layer: Layer = layer) -> Selection:
            return case.select(layer, None)

        ranking = rank(0)
        dense_ms, rank_ms = layer_ms(dense, 1), layer_ms(rank, 1)
        summary_gb = 2 * batch * context // LOGICAL * KV_HEADS * HEAD_DIM * 2 / 1e9
        for bound, threshold in itertools.product(("lowest", "round"), (0.9, 0.95, 0.98)):

            def attend(
                _: int,
                case: Case = case,
                layer: Layer = layer,
                ranking: Selection = ranking,
                threshold: float = threshold,
                bound: Any = bound,
            ) -> Progressive:
                return progressive_decode(*case.attention(layer), *ranking, page_size=case.page, threshold=threshold, bound=bound)

            got = attend(0)
            reached = torch.exp(_dense(case, Selection(ranking.blocks, got.blocks_used))[1] - full)
            error = _error(got.out, want)
            ms = layer_ms(attend, 1)
            name = f"{kind} keys, batch {batch} x {context}, threshold {threshold}, bound {bound}"
            gb = int(got.blocks_used.sum()) * case.page * TOKEN_BYTES / 1e9
            rows.append(
                bandwidth(
                    name, "progressive_decode", ms, gb, ceiling, rank_ms=round(rank_ms, 4), with_ranking_ms=round(rank_ms + ms, 4),
                    dense_ms=round(dense_ms, 4), blocks_used=round(float(got.blocks_used.float().mean()), 1), blocks=blocks,
                    weight_mean=round(float(reached.mean()), 4), weight_min=round(float(reached.min()), 4),
                    heads_below=round(float((reached < threshold).float().mean()), 4), error=round(error, 4),
                )
            )  # fmt: skip
            budget = 4
            while budget < blocks:
                chosen = case.select(layer, budget * case.page)
                if _error(_dense(case, chosen)[0], want) <= error:
                    break
                budget = min(blocks, max(budget + 1, int(budget * 1.25)))

            def fixed(_: int, case: Case = case, layer: Layer = layer, budget: int = budget) -> torch.Tensor:
                at = case.select(layer, budget * case.page)
                return sparse_decode(*case.attention(layer), page_size=case.page, index=at.blocks, counts=at.counts)

            gb = budget * case.page * batch * KV_HEADS * TOKEN_BYTES / 1e9 + summary_gb
            rows.append(
                bandwidth(
                    name, "top-k of the same error, selection included", layer_ms(fixed, 1), gb, ceiling, blocks_used=budget, blocks=blocks,
                    error=round(_error(fixed(0), want), 4),
                )
            )  # fmt: skip
        del case, layer, want
        torch.cuda.empty_cache()
    return rows
