"""Sparse prefill on a Hopper GPU: is the block-list kernel right, and how fast by the share of blocks?

    python -m benchmarks.gpu_sparse_prefill OUT_FOLDER [choosing]

One layer with the heads of Llama-3.1-8B in bfloat16. First the kernel is compared with float64 attention
over random lists, and with FlashInfer over all blocks. Then tiles are compared at 20 % of the blocks of 32k
tokens, and the fastest is timed at 10, 20, 40 and 100 % of the blocks of 32k and 128k tokens, beside
FlashInfer's dense `single_prefill_with_kv_cache` with FA3 and FA2 in the same run. Then
the making of lists is compared with plain torch and timed. Writes OUT_FOLDER/h200-sparse-prefill.json. Takes
about three minutes, and as much again where FlashInfer has to compile its kernels. With `choosing` only the
making of lists, for the blocks that requests get, written to OUT_FOLDER/h200-choosing.json."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from flashinfer import single_prefill_with_kv_cache
from triton.runtime.errors import OutOfResources

from ragserve.bench.kernels.timing import event_ms
from ragserve.verification import report
from ragserve_kernels.dispatch import forced_naive
from ragserve_kernels.prefill_lists import (
    LinePlan,
    block_lse,
    choose_blocks,
    choose_lines,
    list_blocks,
    list_lines,
)
from ragserve_kernels.sparse_prefill import (
    BlockLists,
    PrefillBatch,
    all_blocks,
    list_room,
    mask_of,
    sparse_prefill_naive,
)
from ragserve_kernels.sparse_prefill.triton import PrefillTile, sparse_prefill_triton

Candidate = tuple[tuple[int, int], PrefillTile]  # query and key block, and the tile
HEADS, KV_HEADS, DIM = 32, 8, 128
SCALE = DIM**-0.5
PAGE = 64
SHARES = (0.1, 0.2, 0.4, 1.0)
# cached and new tokens of the one request: whole prompts, and a chunk behind a long prefix
TIMED = ((0, 32_768), (0, 131_072), (122_880, 8192))
COMPARED = (([1000], [777], 16), ([0, 515], [300, 65], 64), ([2049], [1], 64))  # prefixes, new, page
BLOCKS = (128, 64)
TILES = (
    *((BLOCKS, PrefillTile(*tile)) for tile in ((128, 64, 4, 2), (128, 64, 4, 3), (128, 64, 4, 4))),
    *((BLOCKS, PrefillTile(*tile)) for tile in ((128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 3))),
    *(((128, 128), PrefillTile(*tile)) for tile in ((128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 4, 3))),
    ((64, 64), PrefillTile(64, 64, 4, 3)),
)
NOTE = (
    "One layer, milliseconds, medians; choosing blocks is apart. share: of the blocks that causal "
    "attention computes; lists are random with the first and the last block, of each query head or of each "
    "KV head. error: relative, norms. Our KV is paged (64) and scattered, FlashInfer's contiguous."
)
CHOOSING_NOTE = (
    "Milliseconds to make the lists of one layer for a chunk of new tokens behind cached ones, medians, "
    "beside dense attention of that chunk. asked: what the lists hold by their estimate, or a fixed share."
)


@dataclass
class Work:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    batch: PrefillBatch

    def run(self, lists: BlockLists, tile: PrefillTile | None = None) -> torch.Tensor:
        out = torch.full_like(self.q, float("nan"))
        sparse_prefill_triton(self.q, self.k, self.v, self.batch, lists, out, scale=SCALE, tile=tile)
        return out

    def gathered(self, request: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a request by position."""
        page = self.batch.page_size
        tokens = torch.arange(self.batch.prefix[request] + self.batch.new[request], device="cuda")
        slots = self.batch.page_table[request, tokens // page].long() * page + tokens % page
        return self.k[slots], self.v[slots]


def work(prefix: list[int], new: list[int], page: int = PAGE, blocks: tuple[int, int] = BLOCKS) -> Work:
    pages = [-(-(a + b) // page) for a, b in zip(prefix, new, strict=True)]
    order = torch.randperm(sum(pages) + 3, device="cuda").to(torch.int32)
    table = torch.zeros(len(new), max(pages), dtype=torch.int32, device="cuda")
    for i, count in enumerate(pages):
        table[i, :count] = order[sum(pages[:i]) : sum(pages[:i]) + count]
    sizes = [(sum(new), HEADS, DIM), *[(len(order) * page, KV_HEADS, DIM)] * 2]
    q, k, v = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in sizes)
    return Work(q, k, v, PrefillBatch.of(table, page, prefix, new, block_q=blocks[0], block_k=blocks[1]))


def random_lists(batch: PrefillBatch, heads: int, share: float) -> BlockLists:
    """A share of each query block's key blocks, the first and the last among them."""
    most = all_blocks(batch, heads).counts  # [query blocks, heads]
    count = (most * share).round().to(torch.int32).clamp_min(1).maximum(most.clamp_max(2))
    parts, width = [], int(most.max())
    step = torch.arange(width, device="cuda")
    for own, chosen in zip(most.split(64), count.split(64), strict=True):
        score = torch.rand(*own.shape, width, device="cuda")
        score = score.masked_fill((step == 0) | (step == own[..., None] - 1), 2.0)
        score = score.masked_fill(step >= own[..., None], -1.0)
        best = score.argsort(dim=-1, descending=True)
        best = best.masked_fill(step >= chosen[..., None], width).sort(-1).values  # ascending, then the rest
        parts.append(best[best < width].to(torch.int32))
    ends = count.flatten().cumsum(0).view(count.shape).to(torch.int32)
    return BlockLists(torch.cat(parts), (ends - count).contiguous(), count.contiguous())


def share_of(batch: PrefillBatch, lists: BlockLists) -> float:
    return float(lists.counts.sum() / all_blocks(batch, lists.counts.shape[1]).counts.sum())


def error(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found.float() - right.float()).norm() / right.float().norm())


def dense(work: Work, kernel: str) -> Callable[[], torch.Tensor]:
    k, v = work.gathered()
    return lambda: single_prefill_with_kv_cache(work.q, k, v, causal=True, sm_scale=SCALE, backend=kernel)


def fits(blocks: tuple[int, int], tile: PrefillTile) -> bool:
    """Return False for a tile that wants more shared memory than there is."""
    case = work([0], [256], blocks=blocks)
    try:
        case.run(all_blocks(case.batch, HEADS), tile)
    except OutOfResources:
        return False
    return True


def compared(tiles: Sequence[Candidate]) -> list[dict[str, Any]]:
    """Errors against float64 over random lists and against FlashInfer over all blocks. Ends if too large."""
    rows = []
    for prefix, new, page in COMPARED:
        for blocks, tile in tiles:
            for heads in (HEADS, KV_HEADS):
                case = work(prefix, new, page, blocks)
                lists = random_lists(case.batch, heads, 0.3)
                right = torch.empty_like(case.q)
                sparse_prefill_naive(case.q, case.k, case.v, case.batch, lists, right, scale=SCALE)
                rows.append(
                    _checked("float64", prefix, new, blocks, tile, error(case.run(lists, tile), right))
                )
    case = work([8192], [8192])
    found = case.run(all_blocks(case.batch, KV_HEADS))
    for kernel in ("fa2", "fa3"):
        rows.append(_checked(kernel, [8192], [8192], BLOCKS, None, error(found, dense(case, kernel)())))
    return rows


def _checked(
    against: str,
    prefix: list[int],
    new: list[int],
    blocks: tuple[int, int],
    tile: PrefillTile | None,
    found: float,
) -> dict[str, Any]:
    if not found < 1e-2:
        raise SystemExit(f"wrong: error {found:.3g} against {against}, {prefix} {new} {blocks} {tile}")
    return {
        "part": "compared with " + against,
        "cached": str(prefix),
        "new": str(new),
        "blocks": str(blocks),
        "tile": "default" if tile is None else str(tuple(tile)),
        "error": round(found, 5),
    }


def swept(tiles: Sequence[Candidate]) -> tuple[list[dict[str, Any]], Candidate]:
    """Time all tiles at 20 % of the blocks of 32k tokens; return the rows and the fastest."""
    times = {}
    for blocks, tile in tiles:
        case = work([0], [32_768], blocks=blocks)
        lists = random_lists(case.batch, HEADS, 0.2)
        times[blocks, tile] = event_ms(lambda c=case, ls=lists, t=tile: c.run(ls, t))
    rows = [
        {"part": "tiles", "new": "32,768", "blocks": str(blocks), "tile": str(tuple(tile)), "ms": ms}
        for (blocks, tile), ms in times.items()
    ]
    return rows, min(times, key=lambda each: times[each])


def timed(blocks: tuple[int, int], tile: PrefillTile) -> list[dict[str, Any]]:
    rows = []
    for cached, new in TIMED:
        case = work([cached], [new], blocks=blocks)
        rivals = {kernel: event_ms(dense(case, kernel)) for kernel in ("fa3", "fa2")}
        for share in SHARES:
            for heads in (HEADS, KV_HEADS):
                lists = (
                    all_blocks(case.batch, heads) if share == 1 else random_lists(case.batch, heads, share)
                )
                ms = event_ms(lambda c=case, ls=lists: c.run(ls, tile))
                entries = int(lists.counts.sum()) * (HEADS // heads)
                rows.append(
                    {
                        "part": "timed",
                        "cached": f"{cached:,}",
                        "new": f"{new:,}",
                        "share": round(share_of(case.batch, lists), 3),
                        "lists of": "query heads" if heads == HEADS else "KV heads",
                        "ms": ms,
                        **{f"{kernel} ms": rival for kernel, rival in rivals.items()},
                        "times fa3": round(rivals["fa3"] / ms, 2),
                        "times fa2": round(rivals["fa2"] / ms, 2),
                        "TFLOP/s": round(4 * DIM * blocks[0] * blocks[1] * entries / ms / 1e9),
                    }
                )
                print(rows[-1], flush=True)
                del lists
        del case
        torch.cuda.empty_cache()
    return rows


def apart(case: Work, share: float | None) -> dict[str, float]:
    """Return by mode which part of the entries the lists and the choice in plain torch do not have in common:
    rounding decides between alike scores."""
    plan, counts = LinePlan.of(case.batch, HEADS), torch.zeros(1, 2, dtype=torch.int64, device="cuda")
    taken = {"alpha": 0.955, "share": share}
    with forced_naive():
        want = {
            "lines": choose_lines(case.q, case.k, plan, **taken).mask,
            "blocks": choose_blocks(case.q, case.k, case.batch, **taken),
        }
    room = list_room(case.batch, HEADS)
    found = {}
    list_lines(case.q, case.k, plan, room, **taken, counts=counts)
    found["lines"] = mask_of(room, want["lines"].shape[2])
    list_blocks(case.q, case.k, case.batch, room, **taken)
    found["blocks"] = mask_of(room, want["blocks"].shape[2])
    return {mode: float((found[mode] != want[mode]).sum() / want[mode].sum()) for mode in want}


def choosing(blocks: tuple[int, int]) -> list[dict[str, Any]]:
    """Time the making of lists for a chunk of 8,192 tokens, by a fixed share and by ``alpha``. Random inputs
    choose nearly all blocks, which takes as long as choosing few."""
    small = work([1000], [777])
    positions = torch.arange(1000, 1777, 5, dtype=torch.int32, device="cuda")
    found = block_lse(small.q, small.k, small.batch, 0, positions).exp()
    with forced_naive():
        right = block_lse(small.q, small.k, small.batch, 0, positions).exp()
    if not (wrong := error(found, right)) < 1e-2:
        raise SystemExit(f"wrong: block_lse has an error of {wrong:.3g}")
    for share in (None, 0.1):
        for mode, wrong in apart(work([3000], [1777], blocks=blocks), share).items():
            print(
                f"{mode}, share {share}: {wrong:.3g} of the entries are others than in plain torch",
                flush=True,
            )
            if wrong > 0.02:
                raise SystemExit(f"wrong: {mode} lists other blocks than plain torch")
    rows = []
    for cached in (24_576, 122_880):
        case = work([cached], [8192], blocks=blocks)
        dense_ms = event_ms(dense(case, "fa3"))
        plan = LinePlan.of(case.batch, HEADS)  # made once for all layers, as the room for lists
        room = list_room(case.batch, HEADS)
        counts = torch.zeros(1, 2, dtype=torch.int64, device="cuda")
        for share in (None, 0.1):
            taken = {"alpha": 0.955, "share": share}
            choices: dict[str, Callable[[], object]] = {
                "lines": lambda c=case, p=plan, r=room, n=counts, t=taken: list_lines(
                    c.q, c.k, p, r, **t, counts=n, last=False
                ),
                "blocks": lambda c=case, r=room, t=taken: list_blocks(c.q, c.k, c.batch, r, **t),
            }
            for name, choose in choices.items():
                rows.append(
                    {
                        "part": f"choosing {name}",
                        "cached": f"{cached:,}",
                        "new": "8,192",
                        "asked": "alpha 0.955" if share is None else f"share {share}",
                        "ms": event_ms(choose),
                        "fa3 ms": dense_ms,
                    }
                )
                print(rows[-1], flush=True)
    return rows


def main() -> int:
    torch.manual_seed(torch.seed() % 2**31)
    if sys.argv[2:] == ["choosing"]:
        heads = {
            "query heads": HEADS,
            "KV heads": KV_HEADS,
            "head size": DIM,
            "query and key block": str(BLOCKS),
        }
        out = Path(sys.argv[1]) / "h200-choosing.json"
        report.write("lists of a sparse prefill", heads, choosing(BLOCKS), out=out, note=CHOOSING_NOTE)
        return 0
    tiles = [each for each in TILES if fits(*each)]
    print(f"{len(tiles)} of {len(TILES)} tiles fit", flush=True)
    right = compared(tiles)
    print(f"right: {len(right)} comparisons", flush=True)
    sweep, (blocks, tile) = swept(tiles)
    print(*sweep, f"fastest: {blocks} {tile}", sep="\n", flush=True)
    rows = [*timed(blocks, tile), *choosing(blocks), *sweep, *right]
    workload = {
        "query heads": HEADS,
        "KV heads": KV_HEADS,
        "head size": DIM,
        "dtype": "bfloat16",
        "page": PAGE,
        "query and key block": str(blocks),
        "tile (rows, keys, warps, stages)": str(tuple(tile)),
        "flashinfer": version("flashinfer-python"),
        "triton": version("triton"),
        "seed": torch.initial_seed(),
    }
    path = Path(sys.argv[1]) / "h200-sparse-prefill.json"
    report.write("sparse prefill", workload, rows, out=path, note=NOTE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
