"""What choosing pages costs beside sparse attention, on a GPU: layer by layer at once, against all layers in one launch at a step's end.

    python examples/gpu_decode_selection.py OUT.json [--quick]

The attention of a whole decode step in Llama-3.1-8B's shape, 32 layers in one CUDA graph with KV of their own: pages of 64 with logical
pages of 16, a budget of 2,048 tokens. Both ways of choosing are held against each other and, for some layers, against the plain
implementation before anything is timed. OUT.json is written after every row. About 2 minutes on an H200; ``--quick``: one small case.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ragserve.bench.kernels.timing import HEAD_DIM, KV_HEADS, LAYERS, QUERY_HEADS, median_ms
from ragserve.measuring.report import environment
from ragserve_kernels._common import forced_naive
from ragserve_kernels.page_select import Selection, page_select
from ragserve_kernels.sparse_decode import sparse_decode

PAGE, LOGICAL, BUDGET = 64, 16, 2048
WIDTH = 131_072 // PAGE  # of the page table, as in an engine: what the model's context length takes
CASES = ((32_768, 16), (100_032, 4), (32_768, 1), (100_032, 1), (8192, 1), (8192, 16), (32_768, 4), (8192, 4))
QUICK = ((8192, 4),)
REUSE = (1, 4, 16)
CHECKED = (0, 17, 31)  # layers held against the plain implementation


@dataclass
class Step:
    """Tables of one decode step; all tensors have the layers in front but ``table`` and ``lens``."""

    q: torch.Tensor  # [layers, batch, heads, head_dim]
    k: torch.Tensor  # [layers, slots, kv_heads, head_dim]
    v: torch.Tensor
    k_min: torch.Tensor  # [layers, logical pages, kv_heads, head_dim]
    k_max: torch.Tensor
    table: torch.Tensor  # int32 [batch, WIDTH]
    lens: torch.Tensor  # int32 [batch]
    queries: torch.Tensor  # where a step keeps its queries for the choice at its end
    chosen: Selection

    def choose(self, layer: int | slice, q: torch.Tensor, into: Selection) -> Selection:
        return page_select(
            q, self.table, self.lens, block_size=PAGE, k_min=self.k_min[layer], k_max=self.k_max[layer], per_block=PAGE // LOGICAL,
            budget_tokens=BUDGET, into=into,
        )  # fmt: skip

    def attend(self, layer: int) -> torch.Tensor:
        return sparse_decode(
            self.q[layer], self.k[layer], self.v[layer], self.table, self.lens, page_size=PAGE, index=self.chosen.blocks[layer],
            counts=self.chosen.counts[layer],
        )  # fmt: skip

    def reused(self) -> None:
        for layer in range(LAYERS):
            self.attend(layer)

    def at_once(self) -> None:
        for layer in range(LAYERS):
            self.choose(layer, self.q[layer], Selection(self.chosen.blocks[layer], self.chosen.counts[layer]))
            self.attend(layer)

    def at_the_end(self) -> None:
        for layer in range(LAYERS):
            self.queries[layer].copy_(self.q[layer])
            self.attend(layer)
        self.choose(slice(None), self.queries, self.chosen)


def make(context: int, batch: int) -> Step:
    """Random Q, K and V, every request with pages of its own in random order."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()

    slots = context * batch
    row = (KV_HEADS, HEAD_DIM)
    k = normal(LAYERS, slots, *row)
    runs = k.view(LAYERS, slots // LOGICAL, LOGICAL, *row)
    k_min, k_max = (torch.stack([bound(runs[layer], 1) for layer in range(LAYERS)]) for bound in (torch.amin, torch.amax))
    table = torch.zeros(batch, WIDTH, dtype=torch.int32, device="cuda")
    table[:, : context // PAGE] = torch.randperm(slots // PAGE, device="cuda").to(torch.int32).view(batch, -1)
    lens = torch.full((batch,), context - 5, dtype=torch.int32, device="cuda")
    q = normal(LAYERS, batch, QUERY_HEADS, HEAD_DIM)
    blocks = torch.zeros(LAYERS, batch, KV_HEADS, BUDGET // PAGE, dtype=torch.int32, device="cuda")
    chosen = Selection(blocks, torch.zeros(LAYERS, batch, KV_HEADS, dtype=torch.int32, device="cuda"))
    return Step(q, k, normal(LAYERS, slots, *row), k_min, k_max, table, lens, torch.empty_like(q), chosen)


def check(step: Step) -> None:
    """Raises RuntimeError unless both ways choose the same, and what the plain implementation does but for near ties."""
    step.at_once()
    layerwise = step.chosen.blocks.clone()
    step.chosen.blocks.zero_()
    step.at_the_end()
    if not torch.equal(step.chosen.blocks, layerwise):
        raise RuntimeError("choosing for all layers in one launch gives other pages than layer by layer")
    for layer in CHECKED:
        own = Selection(torch.zeros_like(step.chosen.blocks[layer]), torch.zeros_like(step.chosen.counts[layer]))
        with forced_naive():
            step.choose(layer, step.q[layer], own)
        same = float((own.blocks[..., None] == step.chosen.blocks[layer][..., None, :]).any(-1).float().mean())
        if not torch.equal(own.counts, step.chosen.counts[layer]) or same < 0.99:
            raise RuntimeError(f"layer {layer}: {same:.2%} of the pages are those of the plain implementation")


def measure(step: Step, context: int, batch: int) -> dict[str, Any]:
    ways: dict[str, Callable[[], None]] = {"reused": step.reused, "at once": step.at_once, "at the end": step.at_the_end}
    ms = {name: median_ms(run, repeats=9) for name, run in ways.items()}
    copies = median_ms(lambda: [step.queries[layer].copy_(step.q[layer]) for layer in range(LAYERS)], repeats=9)
    row: dict[str, Any] = {"context": context, "batch": batch, "attention ms": round(ms["reused"], 3)}
    for name in ("at once", "at the end"):
        cost = ms[name] - ms["reused"]
        row[f"choosing {name} ms"] = round(cost, 3)
        for reuse in REUSE:
            row[f"share, {name}, reuse {reuse}"] = round(cost / reuse / (ms["reused"] + cost / reuse), 3)
    row["of it keeping queries ms"] = round(copies, 3)
    row["statistics GB"] = round(2 * step.k_min.nbytes / 1e9, 3)
    return row


def one(context: int, batch: int) -> dict[str, Any]:
    step = make(context, batch)
    check(step)
    return measure(step, context, batch)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: kernels are timed on a GPU", file=sys.stderr)
        return 1
    report: dict[str, Any] = {"environment": environment(), "page": PAGE, "logical page": LOGICAL, "budget": BUDGET, "rows": []}
    failed = 0
    for context, batch in QUICK if given.quick else CASES:
        started = time.perf_counter()
        try:
            row = one(context, batch)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            row, failed = {"context": context, "batch": batch, "failed": str(error)}, 1
        torch.cuda.empty_cache()
        report["rows"].append(row)
        given.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(f"{time.perf_counter() - started:.1f} s", row, flush=True)
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
