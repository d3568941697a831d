"""`ragserve bench kernels-decode`, the half that decodes: sparse_decode, page_select, progressive_decode,
quantised KV.

The rivals, PyTorch's SDPA over contiguous KV and FlashInfer over the same pages, run in the same process on
the same shapes; results are compared before they are timed. Shapes are one layer of Llama-3.1-8B: 32 query
and 8 KV heads of 128, bfloat16, pages of 64 tokens in random order; the queries and keys of a real model have
its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragserve.bench.kernels import flashinfer as kernels_flashinfer
from ragserve.bench.kernels.decode_cases import LOGICAL, TOKEN_BYTES, DecodeCase, layer_ms, random_case
from ragserve.bench.kernels.decode_progressive import progressive_rows, real_rows
from ragserve.bench.kernels.decode_stats import page_stats_rows
from ragserve.bench.kernels.flashinfer import RivalMissing
from ragserve.bench.kernels.parts import chosen_parts, run_parts
from ragserve.bench.kernels.timing import (
    HEAD_DIM,
    KV_HEADS,
    QUERY_HEADS,
    Row,
    agree,
    bandwidth,
    copy_gb_per_s,
    require_cuda,
)
from ragserve.errors import InvalidRequest

if TYPE_CHECKING:
    import torch

    from ragserve_kernels.page_select import PageSelection
    from ragserve_kernels.quantize_kv import QuantizedKV


def sdpa_inputs(case: DecodeCase, layer: int) -> tuple[Any, Any, Any]:
    """The same keys and values without pages: ``(q, k, v)`` for scaled_dot_product_attention, contiguous."""
    import torch

    at = case.layers[layer]
    positions = torch.arange(case.context, device="cuda")
    slots = case.table[:, positions // case.page].long() * case.page + positions % case.page
    k, v = (x[slots].transpose(1, 2).contiguous() for x in (at.k, at.v))
    return at.q[:, :, None], k, v


def full_heads(case: DecodeCase, layer: int) -> torch.Tensor:
    return case.attend(case.layers[layer])


def _flashinfer_rows(name: str, case: DecodeCase, want: torch.Tensor, ceiling: float) -> list[Row]:
    """FlashInfer on the same KV: its tensor-core kernel with the case's pages and as SGLang calls it, and its
    decode kernel.
    """
    rows: list[Row] = []
    for page_size, tensor_cores in dict.fromkeys([(case.page, True), (1, True), (case.page, False)]):
        kernel = "tensor cores" if tensor_cores else "decode kernel"
        variant = f"rival: FlashInfer, {kernel}, pages of {page_size}, planned beforehand"
        try:
            call = kernels_flashinfer.decode(case, page_size=page_size, tensor_cores=tensor_cores)
        except RivalMissing as missing:
            rows.append({"case": name, "variant": variant, "skipped": str(missing)})
            continue
        agree(call(0), want, variant)
        rows.append(bandwidth(name, variant, layer_ms(call, len(case.layers)), case.kv_bytes / 1e9, ceiling))
    return rows


def dense_rows(ceiling: float, quick: bool) -> list[Row]:
    """All pages against SDPA and FlashInfer: the walk in order, and through an index table that names every
    page.
    """
    import torch
    import torch.nn.functional as F

    from ragserve_kernels.page_select import PageSelection

    shapes = [(1, 262144, 64), (8, 32768, 64), (32, 8192, 64), (32, 32768, 64), (8, 131072, 64)]
    shapes += [(8, 32768, page) for page in (1, 16, 32, 128)]
    rows: list[Row] = []
    for batch, context, page in [(8, 32768, 64)] if quick else shapes:
        case = random_case(batch, context, page=page)
        name = f"batch {batch} x {context}, pages of {page}"
        gb = case.kv_bytes / 1e9
        blocks = context // page
        every = PageSelection(
            torch.arange(blocks, dtype=torch.int32, device="cuda")
            .expand(batch, KV_HEADS, blocks)
            .contiguous(),
            torch.full((batch, KV_HEADS), blocks, dtype=torch.int32, device="cuda"),
        )

        def look_up(i: int, case: DecodeCase = case, every: PageSelection = every) -> Any:
            return case.attend(case.layers[i], every)

        flat = [sdpa_inputs(case, i) for i in range(len(case.layers))]

        def rival(i: int, flat: list[tuple[Any, Any, Any]] = flat) -> Any:
            q, k, v = flat[i]
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)[:, :, 0]

        agree(full_heads(case, 0), rival(0), "sparse_decode")
        agree(look_up(0), rival(0), "sparse_decode over an index")
        count = len(case.layers)
        rivals = [bandwidth(name, "rival: SDPA, contiguous KV", layer_ms(rival, count), gb, ceiling)]
        rivals += _flashinfer_rows(name, case, rival(0), ceiling)
        beside = {"slower_than_sdpa": rivals[0]["ms"]}
        if timed := [row["ms"] for row in rivals[1:] if "ms" in row]:
            beside["slower_than_flashinfer"] = min(timed)
        for variant, call in (("full heads", partial(full_heads, case)), ("every page selected", look_up)):
            ms = layer_ms(call, count)
            slower = {key: round(ms / other - 1, 4) for key, other in beside.items()}
            rows.append(bandwidth(name, f"sparse_decode, {variant}", ms, gb, ceiling, **slower))
        rows += rivals
        del case, flat
        torch.cuda.empty_cache()
    return rows


def selected_rows(ceiling: float, quick: bool) -> list[Row]:
    """A token budget of a long context: selection, attention, both, and both with the selection reused for
    four steps.
    """
    import torch

    from ragserve_kernels.dispatch import forced_naive

    rows: list[Row] = []
    for context in (32768,) if quick else (32768, 131072, 524288):
        for batch in (8,) if quick else (1, 8, 32):
            summary_bytes = batch * context // LOGICAL * KV_HEADS * HEAD_DIM * 2
            touched = 2 * summary_bytes + batch * 2048 * KV_HEADS * TOKEN_BYTES
            case = random_case(batch, context, summaries=True, touched=touched)
            count = len(case.layers)
            dense = layer_ms(partial(full_heads, case), count)
            for budget, scoring in ((2048, "minmax"), (4096, "minmax"), (2048, "center")):
                name = f"batch {batch} x {context}, budget {budget}"
                attended = batch * budget * KV_HEADS * TOKEN_BYTES / 1e9
                read = (2 if scoring == "minmax" else 1) * summary_bytes / 1e9

                def choose(
                    i: int, case: DecodeCase = case, budget: int = budget, scoring: str = scoring
                ) -> PageSelection:
                    return case.select(case.layers[i], budget, scoring)

                chosen = [choose(i) for i in range(count)]

                def attend(
                    i: int,
                    selection: PageSelection | None = None,
                    case: DecodeCase = case,
                    chosen: list[PageSelection] = chosen,
                ) -> Any:
                    return case.attend(case.layers[i], selection or chosen[i])

                if context == 32768 and batch == 1:
                    with forced_naive():
                        want = attend(0)
                    agree(attend(0), want, "sparse_decode over a selection")
                select_ms = layer_ms(choose, count)
                attend_ms = layer_ms(attend, count)

                def select_and_attend(
                    i: int,
                    attend: Callable[..., Any] = attend,
                    choose: Callable[[int], PageSelection] = choose,
                ) -> Any:
                    return attend(i, choose(i))

                both = layer_ms(select_and_attend, count)
                reused = select_ms / 4 + attend_ms
                rows.append(bandwidth(name, f"page_select, {scoring}", select_ms, read, ceiling))
                rows.append(bandwidth(name, "sparse_decode of the selection", attend_ms, attended, ceiling))
                extra = {"every_4th_step_ms": round(reused, 4), "dense_ms": round(dense, 4)}
                rows.append(bandwidth(name, f"both, {scoring}", both, read + attended, ceiling, **extra))
            del case, chosen
            torch.cuda.empty_cache()
    return rows


def quantised(case: DecodeCase, bits: int) -> list[tuple[QuantizedKV, QuantizedKV]]:
    import torch

    from ragserve_kernels.quantize_kv import QuantizedKV, quantize_kv

    made = []
    for layer in case.layers:
        pair = []
        for x in (layer.k, layer.v):
            cache = QuantizedKV.empty(*x.shape, bits=bits, device=x.device)
            quantize_kv(x, torch.arange(x.shape[0], device=x.device), cache)
            pair.append(cache)
        made.append((pair[0], pair[1]))
    return made


def quantised_rows(ceiling: float, quick: bool) -> list[Row]:
    """Dense decode over 8 and 4 bits against bf16, and the quantisation of a long prompt."""
    import torch

    from ragserve_kernels.quantize_kv import quantize_kv
    from ragserve_kernels.sparse_decode import sparse_decode

    rows: list[Row] = []
    for batch, context in ((8, 32768),) if quick else ((8, 32768), (32, 32768)):
        case = random_case(batch, context)
        count = len(case.layers)
        name = f"batch {batch} x {context}, full heads"
        plain = full_heads(case, 0).float()
        plain_ms = layer_ms(partial(full_heads, case), count)
        rows.append(bandwidth(name, "sparse_decode, bf16", plain_ms, case.kv_bytes / 1e9, ceiling))
        for bits in (8, 4):
            caches = quantised(case, bits)

            def attend(
                i: int, case: DecodeCase = case, caches: list[tuple[QuantizedKV, QuantizedKV]] = caches
            ) -> Any:
                return sparse_decode(case.layers[i].q, caches[i], case.paged)

            error = float((attend(0).float() - plain).norm() / plain.norm())
            gb = 2 * batch * context * KV_HEADS * caches[0][0].token_bytes / 1e9
            rows.append(
                bandwidth(
                    name,
                    f"sparse_decode, {bits} bits",
                    layer_ms(attend, count),
                    gb,
                    ceiling,
                    error_of_bf16=round(error, 4),
                )
            )
            if batch == 8:
                slots = torch.arange(case.layers[0].k.shape[0], device="cuda")
                moved = case.layers[0].k.nbytes + len(slots) * (KV_HEADS * caches[0][0].token_bytes + 8)

                def store(
                    i: int,
                    case: DecodeCase = case,
                    caches: list[tuple[QuantizedKV, QuantizedKV]] = caches,
                    slots: Any = slots,
                ) -> None:
                    quantize_kv(case.layers[i].k, slots, caches[i][0])

                rows.append(
                    bandwidth(
                        f"{len(slots)} tokens",
                        f"quantize_kv, {bits} bits",
                        layer_ms(store, count),
                        moved / 1e9,
                        ceiling,
                    )
                )
            del caches
        del case
        torch.cuda.empty_cache()
    return rows


PARTS: dict[str, Callable[[float, bool], list[Row]]] = {
    "dense decode": dense_rows,
    "selected pages": selected_rows,
    "progressive decode": progressive_rows,
    "quantised KV": quantised_rows,
    "page statistics": page_stats_rows,
}
REAL = "progressive decode, real keys"


def run(
    out_dir: Path | None,
    *,
    quick: bool = False,
    parts: Sequence[str] = (),
    model: str | None = None,
    data: Sequence[Path] = (),
) -> dict[str, Any]:
    """Measure and write ``kernels_decode.json``; ``parts``: names out of :data:`PARTS` and :data:`REAL`,
    default all.

    ``model`` (default: the embedded one) and ``data``, question sets (JSON lines, see
    ``ragserve/eval/data.py``) with long documents, are what :data:`REAL` takes its queries and keys from;
    without ``data`` it is left out.

    Raises: InvalidRequest: no CUDA device, no such part, :data:`REAL` without data. RagserveError: a result
        disagrees with its reference.
    """
    chosen = chosen_parts(parts, [*PARTS, REAL], "kernels-decode")
    if not data and REAL in parts:
        raise InvalidRequest(
            f"The part {REAL!r} needs question sets.", hint="Give them with --data FILE.jsonl.gz; repeatable."
        )
    require_cuda("kernels-decode")
    import torch

    torch.manual_seed(int(time.time()))
    ceiling = round(copy_gb_per_s())
    print(f"copy bandwidth: {ceiling} GB/s", flush=True)
    measures = {name: partial(measure, ceiling, quick) for name, measure in PARTS.items()}
    if data and model is None:
        from ragserve.config import DEFAULT_MODEL

        model = DEFAULT_MODEL
    measures[REAL] = partial(real_rows, ceiling, quick, model=model or "", data=data)
    if not data:
        chosen = [part for part in chosen if part != REAL]
        print(f"{REAL}: left out, it needs question sets (--data)", flush=True)
    return run_parts(
        "kernels_decode",
        measures,
        chosen,
        workload={
            "model shape": f"one layer, {QUERY_HEADS}/{KV_HEADS} heads x {HEAD_DIM}, bfloat16; {REAL}: "
            "its own"
        },
        ceilings={"copy_gb_per_s": ceiling},
        note=(
            "Times are medians of a CUDA graph of 8 layers' calls (real keys: of all layers), per call, "
            "L2 emptied before. GB count the "
            "bytes that must move: K and V attended to, and the summaries where pages are selected. "
            "every_4th_step_ms: selection reused "
            "for 4 steps (select / 4 + attend). slower_than_*: 0.02 is 2 % slower than the rival, "
            "FlashInfer's fastest variant."
        ),
        out_dir=out_dir,
    )
