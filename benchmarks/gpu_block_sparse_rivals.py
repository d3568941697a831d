"""Block-sparse prefill kernels on a Hopper GPU, ours among them: are they right, and how fast by the share of
blocks?

    python -m benchmarks.gpu_block_sparse_rivals OUT_FOLDER [--only 'NAME; ...'] [--tokens N] [--embedded]

One layer with the heads of Llama-3.1-8B in bfloat16, prompts of 32k and 128k tokens, and 8,192 tokens behind
122,880; 10, 20, 40 and 100 % of the blocks. All kernels get the same random blocks of 128 x 128, divided
where theirs are smaller, so that they compute the same attention. Four query blocks of each result are
compared with attention in float32 before anything is timed. Blocks are drawn for each KV head, and besides
for each query head and for all heads at once where a kernel takes that.

Each kernel runs in a process of its own: one that cannot be imported, compiled or given such a shape, or that
breaks the device, is a row with the reason. Rows are added to OUT_FOLDER/h200-block-sparse-rivals.json as
they are measured; those of a kernel that is measured again replace the earlier ones. Dense FA3 always is.
FlashInfer and FA4 compile their kernels at first use. FA4 needs `nvidia-cutlass-dsl`, its libraries and
`quack-kernels`; `sparse_attn_func` needs `sglang-kernel`.

`--embedded` tries the script without a GPU: small shapes, no times, a reason for each kernel that needs
one."""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.block_lists import SIDE, Pattern, attended, packed, random_pattern
from benchmarks.lib.fan_out import this_script
from ragserve.bench.kernels.timing import event_ms, relative_error
from ragserve.verification import report
from ragserve_kernels.sparse_prefill import PrefillBatch, lists_of, sparse_prefill

Run = Callable[[], torch.Tensor]
HEADS, KV_HEADS, DIM = 32, 8, 128
SCALE = DIM**-0.5
PAGE = 64
SHARES = (0.1, 0.2, 0.4, 1.0)
SIZES = ((0, 32_768), (0, 131_072), (122_880, 8192))  # cached and new tokens
SMALL = ((0, 512), (256, 256))
LARGEST_ERROR = 1e-2  # relative; bfloat16 has 2e-3 to 3e-3
LIMIT_S = 300  # for one kernel, compiling included
LISTS = {KV_HEADS: "KV heads", HEADS: "query heads", 1: "all heads"}
KEY = ("kernel", "lists of", "cached", "new", "asked")
BASELINE = "FA3, dense (FlashInfer)"
PACKAGES = ("flashinfer-python", "triton", "sglang-kernel", "nvidia-cutlass-dsl", "quack-kernels")
NOTE = (
    "One layer, milliseconds, medians; making lists and planning are apart. asked, share: of the blocks of "
    "128 x 128 that causal attention computes; random, with the first and the last block. blocks: queries by "
    "keys in the kernel's lists. TFLOP/s: of the blocks that the kernel computes. error: relative, of four "
    "query blocks, against float32 attention. times fa3: FlashInfer's dense FA3 in the same run. KV: how it "
    "lies in memory. reason: why there are no figures."
)


class Wrong(Exception):
    """A kernel's result differs from plain attention."""


@dataclass(frozen=True, eq=False)
class Prompt:
    """Random ``q`` ``[new, HEADS, DIM]``, ``k`` and ``v`` ``[prefix + new, KV_HEADS, DIM]`` by position."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    prefix: int

    @classmethod
    def of(cls, prefix: int, new: int, device: str) -> Prompt:
        torch.manual_seed(prefix + new)
        sizes = ((new, HEADS, DIM), *[(prefix + new, KV_HEADS, DIM)] * 2)
        return cls(*(torch.randn(s, dtype=torch.bfloat16, device=device) for s in sizes), prefix)

    @property
    def new(self) -> int:
        return self.q.shape[0]

    @property
    def tokens(self) -> int:
        return self.k.shape[0]

    @property
    def device(self) -> torch.device:
        return self.q.device

    @cached_property
    def slots(self) -> torch.Tensor:
        """int32 [tokens]: where a token's KV lies in `pool`, scattered by pages."""
        pages = torch.randperm(self.tokens // PAGE, device=self.device)
        position = torch.arange(self.tokens, device=self.device)
        return (pages[position // PAGE] * PAGE + position % PAGE).to(torch.int32)

    @cached_property
    def pool(self) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(
            torch.empty_like(side).index_copy_(0, self.slots.long(), side) for side in (self.k, self.v)
        )

    def numbers(self, *values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


Attention = Callable[[Prompt, Pattern], Run]


@dataclass(frozen=True)
class Kernel:
    """``blocks``: queries and keys of its blocks; ``heads``: how many lists it may get per query block, a
    dense kernel none; ``load``: imports it and returns what makes the call to time."""

    blocks: tuple[int, int]
    heads: tuple[int, ...]
    kv: str
    load: Callable[[], Attention]


def ours(block_k: int) -> Callable[[], Attention]:
    def made(prompt: Prompt, pattern: Pattern) -> Run:
        table = prompt.slots[::PAGE].div(PAGE, rounding_mode="floor").to(torch.int32)[None]
        batch = PrefillBatch.of(table, PAGE, [prompt.prefix], [prompt.new], block_q=SIDE, block_k=block_k)
        heads = max(pattern.mask.shape[0], KV_HEADS)
        lists = lists_of(pattern.divided(heads, SIDE, block_k).transpose(0, 1).contiguous())
        return lambda: sparse_prefill(prompt.q, *prompt.pool, batch, lists, scale=SCALE)

    return lambda: made


def served(block_k: int) -> Callable[[], Attention]:
    """FA4 as requests get it: with the copy of the KV and the division of the lists."""

    def load() -> Attention:
        from sglang_ext.attention.prefill.hopper_prefill import HopperPrefill

        def made(prompt: Prompt, pattern: Pattern) -> Run:
            table = prompt.slots[::PAGE].div(PAGE, rounding_mode="floor").to(torch.int32)[None]
            batch = PrefillBatch.of(table, PAGE, [prompt.prefix], [prompt.new], block_q=SIDE, block_k=block_k)
            heads = max(pattern.mask.shape[0], KV_HEADS)
            lists = lists_of(pattern.divided(heads, SIDE, block_k).transpose(0, 1).contiguous())
            attend, out = HopperPrefill(prompt.device), torch.empty_like(prompt.q)
            return lambda: attend(prompt.q, *prompt.pool, batch, lists, scale=SCALE, out=out)

        return made

    return load


def sglang_triton(block_q: int, block_k: int) -> Callable[[], Attention]:
    """SGLang's kernel of MiniMax-M3: lists of a KV head serve its query group; any token's KV anywhere."""

    def load() -> Attention:
        from ragserve.engine.compat import prepare

        prepare()
        from sglang.kernels.ops.attention.minimax_sparse.prefill.topk_sparse import (
            flash_prefill_with_gqa_share_sparse,
        )

        def made(prompt: Prompt, pattern: Pattern) -> Run:
            index = packed(pattern.divided(KV_HEADS, block_q, block_k))[1]
            ends = prompt.numbers(0, prompt.new)
            settings: dict[str, Any] = {
                "sink": None,
                "req_to_token": prompt.slots[None],
                "slot_ids": prompt.numbers(0),
                "topk_idx": index,
                "block_size_q": block_q,
                "block_size_k": block_k,
                "cu_seqlens": ends,
                "seq_lens": prompt.numbers(prompt.tokens),
                "prefix_lens": prompt.numbers(prompt.prefix),
                "max_seqlen_q": prompt.new,
                "sm_scale": SCALE,
                "cu_seqblocks_q": ends // block_q,
                "max_seqblock_q": prompt.new // block_q,
            }
            return lambda: flash_prefill_with_gqa_share_sparse(prompt.q, *prompt.pool, **settings)

        return made

    return load


def fa4() -> Attention:
    """FA4 with lists of blocks that are wholly before their queries and of those that need a mask."""
    import cutlass
    from cutlass import cute
    from sglang.kernels.ops.attention.flash_attn.cute import flash_attn_func, utils
    from sglang.kernels.ops.attention.flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    @cute.jit
    def causal(batch, head, query, key, lengths, tensors):  # FA4 compiles it
        prefix = utils.scalar_to_ssa(lengths.seqlen_k - lengths.seqlen_q, cutlass.Int32)
        return key <= query + prefix

    def made(prompt: Prompt, pattern: Pattern) -> Run:
        heads = 1 if pattern.mask.shape[0] == 1 else HEADS  # one list for all heads packs query groups
        mask = pattern.for_heads(heads)[None]
        rows = torch.arange(mask.shape[2], device=prompt.device)
        own = torch.arange(mask.shape[3], device=prompt.device) == (rows + prompt.prefix // SIDE)[:, None]
        lists = BlockSparseTensorsTorch(*packed(mask & own), *packed(mask & ~own), block_size=(SIDE, SIDE))
        inputs = [side[None] for side in (prompt.q, prompt.k, prompt.v)]
        return lambda: first(
            flash_attn_func(*inputs, softmax_scale=SCALE, mask_mod=causal, block_sparse_tensors=lists)
        )[0]

    return made


def fa4_dense() -> Attention:
    from sglang.kernels.ops.attention.flash_attn.cute import flash_attn_func

    def made(prompt: Prompt, pattern: Pattern) -> Run:
        inputs = [side[None] for side in (prompt.q, prompt.k, prompt.v)]
        return lambda: first(flash_attn_func(*inputs, softmax_scale=SCALE, causal=True))[0]

    return made


def fa3_dense() -> Attention:
    from flashinfer import single_prefill_with_kv_cache

    def made(prompt: Prompt, pattern: Pattern) -> Run:
        options: dict[str, Any] = {"causal": True, "sm_scale": SCALE, "backend": "fa3"}
        return lambda: single_prefill_with_kv_cache(prompt.q, prompt.k, prompt.v, **options)

    return made


def sparse_attn() -> Attention:
    """`sparse_attn_func` of sglang-kernel (MInference's kernel): blocks of 64 x 64, and no single columns."""
    from sgl_kernel.sparse_flash_attn import sparse_attn_func

    def made(prompt: Prompt, pattern: Pattern) -> Run:
        count, index = packed(pattern.divided(HEADS, 64, 64)[None])
        columns = torch.full((*count.shape, 1), 0, dtype=torch.int32, device=prompt.device)
        lists = (count, index.clamp_min(0) * 64, torch.full_like(count, 0), columns)
        inputs = [side[None] for side in (prompt.q, prompt.k, prompt.v)]
        return lambda: sparse_attn_func(*inputs, *lists, softmax_scale=SCALE, causal=True)[0]

    return made


def with_room(wrapper: Any, device: torch.device) -> Any:
    """Return a FlashInfer ``wrapper`` with room for the plan of many lists."""
    room, plan = (torch.empty(size << 20, dtype=torch.uint8, device=device) for size in (512, 256))
    made = wrapper(room)
    made.reset_workspace_buffer(room, plan)
    return made


def flashinfer_blocks() -> Attention:
    """FlashInfer's BlockSparseAttentionWrapper: one list for all heads. The last block of a list is that of
    its queries, and as large, so that a causal mask from the list's end is right."""
    from flashinfer import BlockSparseAttentionWrapper

    def made(prompt: Prompt, pattern: Pattern) -> Run:
        wrapper = with_room(BlockSparseAttentionWrapper, prompt.device)
        mask = pattern.mask[0]
        ends = torch.cat([prompt.numbers(0), mask.sum(1).cumsum(0).to(torch.int32)])
        sizes = (prompt.new, prompt.tokens, SIDE, SIDE, HEADS, KV_HEADS, DIM)
        kinds = dict.fromkeys(("q_data_type", "kv_data_type", "o_data_type"), torch.bfloat16)
        wrapper.plan(ends, mask.nonzero()[:, 1].to(torch.int32), *sizes, causal=True, sm_scale=SCALE, **kinds)
        return lambda: wrapper.run(prompt.q, prompt.k, prompt.v)

    return made


def flashinfer_variable() -> Attention:
    """FlashInfer's VariableBlockSparseAttentionWrapper: lists of KV heads, heads before tokens. Causal as
    `flashinfer_blocks`."""
    from flashinfer import VariableBlockSparseAttentionWrapper

    def made(prompt: Prompt, pattern: Pattern) -> Run:
        wrapper = with_room(VariableBlockSparseAttentionWrapper, prompt.device)
        mask = pattern.for_heads(KV_HEADS)
        sizes = [
            torch.full((KV_HEADS, n), SIDE, dtype=torch.int32, device=prompt.device) for n in mask.shape[1:]
        ]
        kinds = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
        wrapper.plan(mask, *sizes, HEADS, KV_HEADS, DIM, causal=True, sm_scale=SCALE, **kinds)
        inputs = [side.transpose(0, 1).contiguous() for side in (prompt.q, prompt.k, prompt.v)]
        return lambda: wrapper.run(*inputs).transpose(0, 1)

    return made


def first(found: Any) -> torch.Tensor:
    return found[0] if isinstance(found, tuple) else found


PIECE, SCATTERED, PAGES = "in one piece", "scattered", f"pages of {PAGE}, scattered"
KERNELS = {
    BASELINE: Kernel((SIDE, SIDE), (), PIECE, fa3_dense),
    "ragserve, 128 x 128": Kernel((SIDE, SIDE), (KV_HEADS, HEADS, 1), PAGES, ours(SIDE)),
    "ragserve, 128 x 64": Kernel((SIDE, 64), (KV_HEADS, HEADS), PAGES, ours(64)),  # as requests get it
    "ragserve by FA4, 128 x 128": Kernel((SIDE, SIDE), (KV_HEADS, HEADS), PAGES, served(SIDE)),
    "ragserve by FA4, 128 x 64": Kernel((SIDE, 64), (KV_HEADS, HEADS), PAGES, served(64)),
    "SGLang Triton, 32 x 128": Kernel((32, 128), (KV_HEADS,), SCATTERED, sglang_triton(32, 128)),
    "FA4": Kernel((SIDE, SIDE), (KV_HEADS, HEADS, 1), PIECE, fa4),
    "FA4, dense": Kernel((SIDE, SIDE), (), PIECE, fa4_dense),
    "sparse_attn_func": Kernel((64, 64), (KV_HEADS, HEADS), PIECE, sparse_attn),
    "FlashInfer, variable blocks": Kernel(
        (SIDE, SIDE), (KV_HEADS,), PIECE + ", head by head", flashinfer_variable
    ),
    "FlashInfer, blocks": Kernel((SIDE, SIDE), (1,), PIECE, flashinfer_blocks),
}


def reason(error: BaseException) -> str:
    """The first line of an error."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"[:300]


def measured(name: str, small: bool, tokens: int | None) -> Iterator[dict[str, Any]]:
    """Yield a kernel's rows. After an error the larger shares of the same lists are left out."""
    kernel, device = KERNELS[name], "cuda" if torch.cuda.is_available() else "cpu"
    row = {"kernel": name, "blocks": f"{kernel.blocks[0]} x {kernel.blocks[1]}", "KV": kernel.kv}
    try:
        load = kernel.load()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the row
        yield row | {"reason": reason(error)}
        return
    for prefix, new in SMALL if small else SIZES:
        if tokens and prefix + new > tokens:
            continue
        for heads in kernel.heads or (1,):
            for share in SHARES if kernel.heads else (1.0,):
                place = {"cached": f"{prefix:,}", "new": f"{new:,}", "asked": share}
                place["lists of"] = LISTS[heads] if kernel.heads else "none"
                try:
                    figures = _figures(kernel, load, prefix, new, heads, share, device)
                except Exception as error:  # noqa: BLE001
                    yield row | place | {"reason": reason(error)}
                    break
                finally:
                    gc.collect()
                    torch.cuda.empty_cache()
                yield row | place | figures


def _figures(
    kernel: Kernel, load: Attention, prefix: int, new: int, heads: int, share: float, device: str
) -> dict[str, Any]:
    prompt = Prompt.of(prefix, new, device)
    pattern = random_pattern(prefix, new, heads, share, seed=heads + round(100 * share), device=device)
    run = load(prompt, pattern)
    found = run()
    last = new // SIDE - 1
    checked = sorted({0, last // 3, last * 2 // 3, last})
    right = [attended(prompt.q, prompt.k, prompt.v, pattern, block, SCALE) for block in checked]
    error = relative_error(torch.cat([found[block * SIDE :][:SIDE] for block in checked]), torch.cat(right))
    del found, right
    if not error < LARGEST_ERROR:
        raise Wrong(f"relative error {error:.3g}")
    figures = {"share": round(pattern.share, 3), "error": round(error, 5)}
    if device == "cpu":
        return figures | {"reason": "not timed: no GPU"}
    ms = event_ms(run, 7 if new < 65_536 else 3)
    entries = int(pattern.divided(heads, *kernel.blocks).sum()) * (HEADS // heads)
    flops = 4 * DIM * kernel.blocks[0] * kernel.blocks[1] * entries
    return figures | {"ms": ms, "TFLOP/s": round(flops / ms / 1e9)}


def grown(out: Path, without: str = "") -> report.GrowingReport:
    """The report so far; ``without`` the rows of a kernel that is measured anew."""
    workload, rows = report.read_report(out)
    rows = [row for row in rows if row["kernel"] != without]
    growing = report.GrowingReport("block-sparse prefill kernels", out, note=NOTE, key=KEY, earlier=rows)
    growing.workload = workload or _workload()
    return growing


def _workload() -> dict[str, Any]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "query heads": HEADS,
        "KV heads": KV_HEADS,
        "head size": DIM,
        "dtype": "bfloat16",
        **versions,
    }


def child(out: Path, name: str, small: bool, tokens: int | None) -> None:
    """Measure one kernel in this process and add its rows."""
    growing = grown(out, without=name)
    dense = {
        (row.get("cached"), row.get("new")): row["ms"]
        for row in report.read_report(out)[1]
        if row["kernel"] == BASELINE != name and "ms" in row
    }
    for row in measured(name, small, tokens):
        rival = dense.get((row.get("cached"), row.get("new")))
        compared = {"times fa3": round(rival / row["ms"], 2)} if rival and "ms" in row else {}
        growing.add(row | compared)


def main() -> int:
    parser = argparse.ArgumentParser(description="Time block-sparse prefill kernels beside each other.")
    parser.add_argument("out", type=Path, help="folder of h200-block-sparse-rivals.json")
    parser.add_argument("--only", help=f"kernels, separated by semicolons: {'; '.join(KERNELS)}")
    parser.add_argument("--tokens", type=int, help="leave out prompts of more tokens")
    parser.add_argument("--embedded", action="store_true", help="small shapes, for a machine without a GPU")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    out = given.out / "h200-block-sparse-rivals.json"
    if given.child:
        child(out, given.child, given.embedded, given.tokens)
        return 0
    names = given.only.split(";") if given.only else list(KERNELS)
    if unknown := [name for name in map(str.strip, names) if name not in KERNELS]:
        parser.error(f"no kernels {unknown}; there are {list(KERNELS)}")
    if not given.embedded and not torch.cuda.is_available():
        parser.error("no GPU; --embedded tries the script without one")
    given.out.mkdir(parents=True, exist_ok=True)
    for name in dict.fromkeys((BASELINE, *map(str.strip, names))):  # what others are compared with, first
        command = [*this_script(), *sys.argv[1:], "--child", name]
        try:
            ended = subprocess.run(command, timeout=LIMIT_S, env=os.environ, check=False).returncode
            failed = f"its process ended with {ended}" if ended else ""
        except subprocess.TimeoutExpired:
            failed = f"not done after {LIMIT_S} s"
        if failed:
            grown(out).add({"kernel": name, "reason": failed})
    grown(out).show()
    return 0


if __name__ == "__main__":
    sys.exit(main())
