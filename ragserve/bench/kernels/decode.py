"""`ragserve bench kernels-decode`, the half that decodes: sparse_decode, page_select, progressive_decode,
quantised KV.

The rivals, PyTorch's SDPA over contiguous KV and FlashInfer over the same pages, run in the same process on
the same shapes; results are compared before they are timed. Shapes are one layer of Llama-3.1-8B: 32 query
and 8 KV heads of 128, bfloat16, pages of 64 tokens in random order; the queries and keys of a real model have
its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragserve.bench.kernels import flashinfer as kernels_flashinfer
from ragserve.bench.kernels.decode_cases import (
    LOGICAL,
    TOKEN_BYTES,
    DecodeCase,
    layer_ms,
    random_case,
    slots_of,
)
from ragserve.bench.kernels.decode_progressive import progressive_rows, real_rows
from ragserve.bench.kernels.decode_stats import page_stats_rows
from ragserve.bench.kernels.flashinfer import RivalMissing
from ragserve.bench.kernels.parts import Part, begin, run_parts
from ragserve.bench.kernels.timing import (
    HEAD_DIM,
    KV_HEADS,
    QUERY_HEADS,
    Row,
    agree,
    bandwidth,
    copy_gb_per_s,
    relative_error,
)
from ragserve.config import DEFAULT_MODEL
from ragserve.errors import InvalidRequest

if TYPE_CHECKING:
    import torch

    from ragserve_kernels.page_select import PageSelection


def _dense(case: DecodeCase) -> Callable[[int], torch.Tensor]:
    return lambda i: case.attend(case.layers[i])


def _sdpa(case: DecodeCase) -> Callable[[int], torch.Tensor]:
    """The rival on the same keys and values, made contiguous beforehand."""
    import torch.nn.functional as F

    slots = slots_of(case.table, case.context, case.page)
    layers = [
        (at.q[:, :, None], *(x[slots].transpose(1, 2).contiguous() for x in (at.k, at.v)))
        for at in case.layers
    ]
    attend: Any = partial(F.scaled_dot_product_attention, enable_gqa=True)
    return lambda i: attend(*layers[i])[:, :, 0]


def _flashinfer_rows(name: str, case: DecodeCase, want: torch.Tensor, ceiling: float) -> Iterator[Row]:
    """FlashInfer on the same KV: its tensor-core kernel with the case's pages and as SGLang calls it, and its
    decode kernel.
    """
    for page_size, tensor_cores in dict.fromkeys([(case.page, True), (1, True), (case.page, False)]):
        kernel = "tensor cores" if tensor_cores else "decode kernel"
        variant = f"rival: FlashInfer, {kernel}, pages of {page_size}, planned beforehand"
        try:
            call = kernels_flashinfer.decode(case, page_size=page_size, tensor_cores=tensor_cores)
        except RivalMissing as missing:
            yield {"case": name, "variant": variant, "skipped": str(missing)}
            continue
        agree(call(0), want, variant)
        yield bandwidth(name, variant, layer_ms(call, len(case.layers)), case.kv_bytes / 1e9, ceiling)


def dense_rows(ceiling: float, quick: bool) -> Iterator[Row]:
    """Compare decoding over all pages with SDPA and FlashInfer: the walk in order, and through an index table
    that names every page."""
    import torch

    shapes = [(1, 262144, 64), (8, 32768, 64), (32, 8192, 64), (32, 32768, 64), (8, 131072, 64)]
    shapes += [(8, 32768, page) for page in (1, 16, 32, 128)]
    for shape in [(8, 32768, 64)] if quick else shapes:
        yield from _dense_case(*shape, ceiling)
        torch.cuda.empty_cache()


def _dense_case(batch: int, context: int, page: int, ceiling: float) -> Iterator[Row]:
    import torch

    from ragserve_kernels.page_select import PageSelection

    case = random_case(batch, context, page=page)
    name = f"batch {batch} x {context}, pages of {page}"
    gb = case.kv_bytes / 1e9
    blocks = context // page
    named = torch.arange(blocks, dtype=torch.int32, device="cuda").expand(batch, KV_HEADS, blocks)
    every = PageSelection(named.contiguous(), torch.full_like(named[:, :, 0], blocks))

    def look_up(i: int) -> torch.Tensor:
        return case.attend(case.layers[i], every)

    dense, rival = _dense(case), _sdpa(case)
    agree(dense(0), rival(0), "sparse_decode")
    agree(look_up(0), rival(0), "sparse_decode over an index")
    count = len(case.layers)
    rivals = [bandwidth(name, "rival: SDPA, contiguous KV", layer_ms(rival, count), gb, ceiling)]
    rivals += _flashinfer_rows(name, case, rival(0), ceiling)
    beside = {"slower_than_sdpa": rivals[0]["ms"]}
    if timed := [row["ms"] for row in rivals[1:] if "ms" in row]:
        beside["slower_than_flashinfer"] = min(timed)
    for variant, call in (("full heads", dense), ("every page selected", look_up)):
        ms = layer_ms(call, count)
        slower = {key: round(ms / other - 1, 4) for key, other in beside.items()}
        yield bandwidth(name, f"sparse_decode, {variant}", ms, gb, ceiling, **slower)
    yield from rivals


def selected_rows(ceiling: float, quick: bool) -> Iterator[Row]:
    """A token budget of a long context: selection, attention, both, and both with the selection reused for
    four steps.
    """
    import torch

    for context in (32768,) if quick else (32768, 131072, 524288):
        for batch in (8,) if quick else (1, 8, 32):
            summary_bytes = batch * context // LOGICAL * KV_HEADS * HEAD_DIM * 2
            touched = 2 * summary_bytes + batch * 2048 * KV_HEADS * TOKEN_BYTES
            case = random_case(batch, context, summaries=True, touched=touched)
            dense_ms = layer_ms(_dense(case), len(case.layers))
            for budget, scoring in ((2048, "minmax"), (4096, "minmax"), (2048, "center")):
                read = (2 if scoring == "minmax" else 1) * summary_bytes / 1e9
                yield from _budget_rows(case, budget, scoring, read, dense_ms, ceiling)
            del case
            torch.cuda.empty_cache()


def _budget_rows(
    case: DecodeCase, budget: int, scoring: str, read: float, dense_ms: float, ceiling: float
) -> Iterator[Row]:
    """``read``: GB of the summaries."""
    from ragserve_kernels.dispatch import forced_naive

    count = len(case.layers)
    name = f"batch {case.batch} x {case.context}, budget {budget}"
    attended = case.batch * budget * KV_HEADS * TOKEN_BYTES / 1e9

    def choose(i: int) -> PageSelection:
        return case.select(case.layers[i], budget, scoring)

    chosen = [choose(i) for i in range(count)]

    def attend(i: int) -> torch.Tensor:
        return case.attend(case.layers[i], chosen[i])

    if case.context == 32768 and case.batch == 1:
        with forced_naive():
            want = attend(0)
        agree(attend(0), want, "sparse_decode over a selection")
    select_ms, attend_ms = layer_ms(choose, count), layer_ms(attend, count)
    both = layer_ms(lambda i: case.attend(case.layers[i], choose(i)), count)
    yield bandwidth(name, f"page_select, {scoring}", select_ms, read, ceiling)
    yield bandwidth(name, "sparse_decode of the selection", attend_ms, attended, ceiling)
    extra = {"every_4th_step_ms": round(select_ms / 4 + attend_ms, 4), "dense_ms": round(dense_ms, 4)}
    yield bandwidth(name, f"both, {scoring}", both, read + attended, ceiling, **extra)


def quantised_rows(ceiling: float, quick: bool) -> Iterator[Row]:
    """Dense decode over 8 and 4 bits against bf16, and the quantisation of a long prompt."""
    import torch

    for batch in (8,) if quick else (8, 32):
        case = random_case(batch, 32768)
        name = f"batch {batch} x 32768, full heads"
        plain_ms = layer_ms(_dense(case), len(case.layers))
        yield bandwidth(name, "sparse_decode, bf16", plain_ms, case.kv_bytes / 1e9, ceiling)
        for bits in (8, 4):
            yield from _bits_rows(name, case, bits, ceiling)
        del case
        torch.cuda.empty_cache()


def _bits_rows(name: str, case: DecodeCase, bits: int, ceiling: float) -> Iterator[Row]:
    import torch

    from ragserve_kernels.quantize_kv import QuantizedKV, quantize_kv
    from ragserve_kernels.sparse_decode import sparse_decode

    count, slots = len(case.layers), torch.arange(case.layers[0].k.shape[0], device="cuda")
    caches = []
    for layer in case.layers:
        k, v = (QuantizedKV.empty(*layer.k.shape, bits=bits, device=layer.k.device) for _ in "kv")
        quantize_kv(layer.k, slots, k)
        quantize_kv(layer.v, slots, v)
        caches.append((k, v))

    def attend(i: int) -> torch.Tensor:
        return sparse_decode(case.layers[i].q, caches[i], case.paged)

    error = round(relative_error(attend(0), case.attend(case.layers[0])), 4)
    row_bytes = KV_HEADS * caches[0][0].token_bytes
    gb, ms = 2 * case.batch * case.context * row_bytes / 1e9, layer_ms(attend, count)
    yield bandwidth(name, f"sparse_decode, {bits} bits", ms, gb, ceiling, error_of_bf16=error)
    if case.batch == 8:
        moved = case.layers[0].k.nbytes + len(slots) * (row_bytes + 8)
        ms = layer_ms(lambda i: quantize_kv(case.layers[i].k, slots, caches[i][0]), count)
        yield bandwidth(f"{len(slots)} tokens", f"quantize_kv, {bits} bits", ms, moved / 1e9, ceiling)


PARTS: dict[str, Callable[[float, bool], Iterator[Row]]] = {
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
    model: str = DEFAULT_MODEL,
    data: Sequence[Path] = (),
) -> dict[str, Any]:
    """Measure and write ``kernels_decode.json``; ``parts``: names out of :data:`PARTS` and :data:`REAL`,
    default all.

    ``model`` and ``data``, question sets (JSON lines, see ``ragserve/eval/data.py``) with long documents, are
    what :data:`REAL` takes its queries and keys from; without ``data`` it is left out.

    Raises: InvalidRequest: no CUDA device, no such part, :data:`REAL` without data. RagserveError: a result
        disagrees with its reference.
    """
    if not data and REAL in parts:
        raise InvalidRequest(
            f"The part {REAL!r} needs question sets.", hint="Give them with --data FILE.jsonl.gz; repeatable."
        )
    chosen = begin("kernels-decode", parts, [*PARTS, REAL])
    ceiling = round(copy_gb_per_s())
    print(f"copy bandwidth: {ceiling} GB/s", flush=True)
    measures: dict[str, Part] = {name: partial(measure, ceiling, quick) for name, measure in PARTS.items()}
    measures[REAL] = partial(real_rows, ceiling, quick, model=model, data=data)
    if not data:
        chosen = [part for part in chosen if part != REAL]
        print(f"{REAL}: left out, it needs question sets (--data)", flush=True)
    shape = f"one layer, {QUERY_HEADS}/{KV_HEADS} heads x {HEAD_DIM}, bfloat16; {REAL}: its own"
    return run_parts(
        "kernels_decode",
        measures,
        chosen,
        workload={"model shape": shape},
        ceilings={"copy_gb_per_s": ceiling},
        note=(
            "Times are medians of a CUDA graph of 8 layers' calls (real keys: of all layers), per call, "
            "L2 emptied before. GB count the bytes that must move: K and V attended to, and the summaries "
            "where pages are selected. every_4th_step_ms: selection reused for 4 steps (select / 4 + "
            "attend). slower_than_*: 0.02 is 2 % slower than the rival, FlashInfer's fastest variant."
        ),
        out_dir=out_dir,
    )
