"""page_stats: statistics of whole prompts' pages after prefill, and of pages that fill in decode."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ragserve.bench.kernels.decode_cases import LOGICAL
from ragserve.bench.kernels.timing import HEAD_DIM, KV_HEADS, LAYERS, Row, agree, bandwidth, median_ms, normal

PAGE = 64


def page_stats_rows(ceiling: float, quick: bool) -> Iterator[Row]:
    """Compare all layers in one launch with plain torch layer by layer; the bytes are the keys read and the
    statistics written.
    """
    import torch

    from ragserve_kernels.dispatch import forced_naive
    from ragserve_kernels.kv import KVLayers
    from ragserve_kernels.page_stats import PageStats, page_stats

    pool = 2048 if quick else 8192  # pages
    keys = [normal(pool * PAGE, KV_HEADS, HEAD_DIM) for _ in range(LAYERS)]
    kv = KVLayers(keys, keys)  # values are not looked at
    into, want = (PageStats.zeros(kv, PAGE, LOGICAL) for _ in range(2))
    for name, count in (
        ("32k tokens prefilled", 512),
        ("100k tokens prefilled", 1563),
        ("pages of 16 requests became full", 16),
    ):
        pages = torch.randperm(pool, device="cuda")[:count].to(torch.int32)

        ours = partial(page_stats, kv, pages, into, page_size=PAGE)
        plain = partial(page_stats, kv, pages, want, page_size=PAGE)
        ours()
        with forced_naive():
            plain()
            for field in ("k_min", "k_max", "k_center"):
                agree(getattr(into, field), getattr(want, field), "page_stats")
            plain_ms = median_ms(plain, graph=False)
        key_bytes = len(pages) * PAGE * KV_HEADS * HEAD_DIM * 2 * LAYERS
        gb = key_bytes * (1 + 2 / LOGICAL + 1 / PAGE) / 1e9
        case = f"{name}, {len(pages)} pages of {PAGE} with logical pages of {LOGICAL}"
        yield bandwidth(case, "page_stats", median_ms(ours), gb, ceiling)
        yield bandwidth(case, "rival: torch, layer by layer", plain_ms, gb, ceiling)
