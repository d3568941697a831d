"""The attention half of the compose benchmark: prefix_rows_attention and block_summary, and rivals."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

from ragserve.bench.kernels import flashinfer as kernels_flashinfer
from ragserve.bench.kernels.flashinfer import RivalMissing
from ragserve.bench.kernels.timing import HEAD_DIM, KV_HEADS, QUERY_HEADS, Row, agree, median_ms, normal


def prefix_rows_attention_rows(ceiling: dict[str, float], quick: bool) -> Iterator[Row]:
    """Recompute random kept tokens: their rows attend to all kept tokens before them. One layer."""
    import torch

    from ragserve_kernels.prefix_rows_attention import prefix_rows_attention

    cases = (1, 614, 4096), (8, 614, 4096), (1, 4915, 32768), (16, 153, 1024), (1, 256, 8192)
    for requests, recomputed, kept in cases[:1] if quick else cases:
        pages = torch.randperm(requests * kept // 16, device="cuda")
        slots = (pages[:, None] * 16 + torch.arange(16, device="cuda")).flatten().int()
        q = normal(requests * recomputed, QUERY_HEADS, HEAD_DIM)
        k, v = (normal(requests * kept, KV_HEADS, HEAD_DIM) for _ in "kv")
        positions = torch.stack(
            [torch.randperm(kept, device="cuda")[:recomputed].sort().values for _ in range(requests)]
        )
        row_len = (positions.flatten() + 1).int()
        starts = torch.arange(requests + 1, device="cuda", dtype=torch.int32)
        args = (q, k, v, slots, starts[:-1] * kept, starts * recomputed, row_len)
        out = torch.full_like(q, float("nan"))
        ours = partial(prefix_rows_attention, *args, max_rows=recomputed, out=out)
        ours()
        times = {"default": median_ms(ours)}
        missing = ""
        try:
            for name, ms in _rivals(q, k, v, slots, positions, out):
                times[f"rival: {name}"] = ms
        except RivalMissing as error:
            missing = str(error)
        case = f"{requests} x {recomputed} rows of {kept} kept"
        tflop = 4 * HEAD_DIM * QUERY_HEADS * float(row_len.sum()) / 1e12
        for variant, ms in times.items():
            row: Row = {"case": case, "variant": variant, "ms": round(ms, 4)}
            row["tflop_per_s"] = round(tflop / ms * 1e3, 1)
            faster = {} if variant == "default" else {"ours_is_faster_by": round(ms / times["default"], 2)}
            yield row | faster
        if missing:
            yield {"case": case, "variant": "rival: FlashInfer", "skipped": missing}


def _rivals(q: Any, k: Any, v: Any, slots: Any, positions: Any, ours: Any) -> Iterator[tuple[str, float]]:
    """Times of SDPA with a mask, FlexAttention and FlashInfer's prefill with a custom mask; each agrees with
    ours.

    Raises RivalMissing after the first two where there is no FlashInfer.
    """
    import torch
    import torch.nn.functional as F
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    requests, recomputed = positions.shape
    kept = slots.shape[0] // requests
    batched = q.view(requests, recomputed, QUERY_HEADS, HEAD_DIM).transpose(1, 2).contiguous()
    keys, values = (
        t[slots.long()].view(requests, kept, KV_HEADS, HEAD_DIM).transpose(1, 2).contiguous() for t in (k, v)
    )
    mask = torch.arange(kept, device="cuda") <= positions[..., None]  # [requests, rows, kept]

    def check(out: Any, name: str) -> None:
        agree(out.transpose(1, 2).reshape(ours.shape), ours, name)

    wide_k, wide_v = (t.repeat_interleave(QUERY_HEADS // KV_HEADS, 1) for t in (keys, values))
    dense = partial(F.scaled_dot_product_attention, batched, wide_k, wide_v, attn_mask=mask[:, None])
    check(dense(), "SDPA")
    yield "SDPA with a mask, KV gathered and expanded beforehand", median_ms(dense)

    def visible(b: Any, h: Any, row: Any, key: Any) -> Any:
        return key <= positions[b, row]

    blocks = create_block_mask(visible, requests, None, recomputed, kept, device="cuda")
    flex = torch.compile(flex_attention, dynamic=False)
    sparse = partial(flex, batched, keys, values, block_mask=blocks, enable_gqa=True)
    check(sparse(), "FlexAttention")
    yield "FlexAttention, compiled, KV gathered and block mask made beforehand", median_ms(sparse)

    flashinfer = kernels_flashinfer.flashinfer()
    workspace = torch.empty(kernels_flashinfer.WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
    indptr = torch.arange(requests + 1, dtype=torch.int32, device="cuda")
    last = torch.ones(requests, dtype=torch.int32, device="cuda")
    sizes = (QUERY_HEADS, KV_HEADS, HEAD_DIM, 1)
    kinds = {"q_data_type": q.dtype, "kv_data_type": q.dtype}
    wrapper.plan(indptr * recomputed, indptr * kept, slots, last, *sizes, custom_mask=mask.flatten(), **kinds)
    pages = (k[:, None], v[:, None])
    agree(wrapper.run(q, pages), ours, "FlashInfer")
    name = f"FlashInfer {flashinfer.__version__} custom-mask prefill, page size 1, planned beforehand"
    yield name, median_ms(lambda: wrapper.run(q, pages))


def block_summary_rows(ceiling: dict[str, float], quick: bool) -> Iterator[Row]:
    """Compare a layer's summary with that layer's causal attention over the same documents (SDPA's flash
    kernel).
    """
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from ragserve_kernels.block_summary import BlockPlan, block_summary, block_summary_naive

    for documents, length in ((4, 2048),) if quick else ((32, 512), (4, 2048), (4, 8192), (1, 32768)):
        q, k = (normal(documents * length, heads, HEAD_DIM) for heads in (QUERY_HEADS, KV_HEADS))
        case = f"{documents} x {length} tokens"
        if length <= 2048:
            plan = BlockPlan.build([length], device="cuda")
            got = block_summary(q[:length], k[:length], plan)
            plain = partial(block_summary_naive, scale=1 / math.sqrt(HEAD_DIM), precision=torch.float32)
            want = plain(q[:length], k[:length], plan, token=got.token)
            for name in ("received", "mean_k", "local_q"):
                agree(getattr(got, name), getattr(want, name), f"block_summary {name}")
            fitted = got.exponent.isfinite()
            agree(got.exponent[fitted], want.exponent[fitted], "block_summary exponent")
        wide: list[Any] = [
            t.view(documents, length, -1, HEAD_DIM).transpose(1, 2).contiguous() for t in (q, k, k)
        ]

        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            sdpa = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
            prefill = median_ms(partial(sdpa, *wide))
        rival = "rival: the prefill's attention itself (SDPA, flash)"
        yield {"case": case, "variant": rival, "ms": round(prefill, 4)}
        lse = torch.full((QUERY_HEADS, documents * length), math.log(length), device="cuda")
        for stride, given in ((1, False), (1, True), (8, True), (16, False), (16, True), (32, True)):
            plan = BlockPlan.build([length] * documents, query_stride=stride, device="cuda")
            ms = median_ms(partial(block_summary, q, k, plan, lse=lse if given else None))
            name = "every query" + f" of {stride}" * (stride > 1) + ", log-sum-exp given" * given
            row = {"case": case, "variant": name, "ms": round(ms, 4)}
            yield row | {"of_prefill_attention": round(ms / prefill, 3)}
