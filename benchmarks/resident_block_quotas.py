"""Pages that offloaded requests load with the same number of resident blocks in every layer and KV head, and
with as many resident blocks in all, shared out freely.

    python -m benchmarks.resident_block_quotas OUT.json SET.jsonl.gz [--rows N] [--steps N] [--model MODEL]

The last ``--steps`` tokens of every prompt of a question set with long documents (ragserve/eval/data.py)
stand for decoded ones. Every 8th step each layer and KV head of the model chooses pages of 16 tokens by the
upper bounds of its scores: as many as a budget holds, or, progressive, until they have 95 % of the weight.
Resident blocks keep pages, and the least recently chosen is replaced. Shared out freely they go to the layers
and heads that miss most: known beforehand, planned anew every four choices by what the latest twelve would
have missed, or with one order of use for all. With a budget each has those of one choice at least. Runs on a
CPU, half a minute a prompt of 4k tokens."""

from __future__ import annotations

import argparse
import json
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from benchmarks import page_observers
from ragserve.answering.prompt import PromptBuilder, PromptDocument
from ragserve.config import DEFAULT_MODEL
from ragserve.eval.data import load

PAGE, EVERY, BUDGET, THRESHOLD = 16, 8, 512, 0.95
RECENT, REPLAN = 12, 4  # choices
SHARES = (1.25, 1.5, 2.0, 3.0)  # resident blocks per page of a choice
GRID = 20  # sizes of a layer's and head's resident blocks that are tried, in quarters of a mean choice
Choices = list[list[int]]
"""Pages by choice, of one layer and head."""


class ResidentBlocks:
    """Pages in order of use; ``load`` returns how many a choice misses."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._held: OrderedDict[object, None] = OrderedDict()

    def __contains__(self, page: object) -> bool:
        return page in self._held

    def load(self, choice: Iterable[object]) -> int:
        pages = list(choice)
        missed = [page for page in pages if page not in self._held]
        for page in pages:
            self._held[page] = None
            self._held.move_to_end(page)
        while len(self._held) > self.size:
            self._held.popitem(last=False)
        return len(missed)


def chosen(recorded: page_observers.Recorded, *, progressive: bool) -> list[Choices]:
    """Return the choices of each layer and head."""
    found: list[Choices] = []
    for q, k, scaling in recorded:
        q = q[:, ::EVERY]
        tokens = k.shape[1]
        scores = page_observers.bounds(q, k)  # [steps, kv_heads, pages]
        share = page_observers.weights(q, k, scaling, stride=EVERY)
        for head in range(k.shape[0]):
            own = []
            for step in range(q.shape[1]):
                newest = (tokens - (q.shape[1] - step) * EVERY) // PAGE
                ranked = scores[step, head, :newest].clone()
                ranked[0] = torch.inf
                order = ranked.argsort(descending=True)
                count = BUDGET // PAGE - 1
                if progressive:
                    weight = share[step, head, newest:].sum() + share[step, head, order].cumsum(0)
                    count = int((weight < THRESHOLD).sum()) + 1
                own.append(order[:count].tolist())
            found.append(own)
    return found


def misses(choices: Choices, sizes: Sequence[int]) -> torch.Tensor:
    """Return what each choice misses, int64 [sizes, choices]."""
    tables = [ResidentBlocks(size) for size in sizes]
    return torch.tensor([[table.load(choice) for choice in choices] for table in tables])


def plan(curves: torch.Tensor, sizes: Sequence[int], total: int) -> list[int]:
    """Share ``total`` resident blocks out to lists with these misses, [lists, sizes], beginning with the
    smallest size for each: always to that with the steepest way down, and what nobody misses to all alike."""
    missed = curves.tolist()
    at = [0] * len(missed)
    left = total - len(missed) * sizes[0]
    while True:
        best = (0.0, 0, 0)  # misses a resident block, list, number of its size
        for i, own in enumerate(missed):
            for j in range(at[i] + 1, len(sizes)):
                more = sizes[j] - sizes[at[i]]
                if more <= left:
                    best = max(best, ((own[at[i]] - own[j]) / more, i, j))
        slope, i, j = best
        if slope <= 0:
            return [sizes[j] + left // len(missed) for j in at]
        left -= sizes[j] - sizes[at[i]]
        at[i] = j


def compare(lists: list[Choices], share: float, *, progressive: bool) -> dict[str, int]:
    """Return misses by how the resident blocks are shared out."""
    mean = sum(len(choice) for own in lists for choice in own) / sum(len(own) for own in lists)
    each = round(share * mean)
    least = 1 if progressive else max(len(choice) for own in lists for choice in own)
    sizes = sorted({least, each, *(max(least, round(mean * (1 + i) / 4)) for i in range(GRID))})
    curves = torch.stack([misses(own, sizes) for own in lists])  # [lists, sizes, choices]
    total = each * len(lists)
    found = {"named": sum(len(choice) for own in lists for choice in own)}
    found["equal"] = int(curves[:, sizes.index(each)].sum())
    known = plan(curves.sum(2), sizes, total)
    found["known beforehand"] = sum(
        int(misses(own, [size]).sum()) for own, size in zip(lists, known, strict=True)
    )
    tables = [ResidentBlocks(each) for _ in lists]
    planned = 0
    for t in range(curves.shape[2]):
        if t and t % REPLAN == 0:
            recent = curves[:, :, max(1, t - RECENT) : t].sum(2)
            for table, size in zip(tables, plan(recent, sizes, total), strict=True):
                table.size = size
        planned += sum(table.load(own[t]) for table, own in zip(tables, lists, strict=True))
    found["planned by the latest"] = planned
    one = ResidentBlocks(total)
    found["one order of use"] = sum(
        one.load((i, page) for i, own in enumerate(lists) for page in own[t]) for t in range(curves.shape[2])
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("set", type=Path)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=512)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    given = parser.parse_args()
    page_observers.PAGE = PAGE
    builder = PromptBuilder.load(given.model)
    recorder = page_observers.Recorder(given.model, given.steps)
    started, lengths = time.perf_counter(), []
    sums: dict[tuple[str, float], dict[str, int]] = {}
    for row in load(given.set, given.rows):
        documents = [PromptDocument("", each.title, each.text) for each in row.documents]
        ids = builder.build(row.question, documents, max_prompt_tokens=10**9).input_ids
        lengths.append(len(ids))
        recorded = recorder(ids)
        for kind, progressive in ((f"budget {BUDGET}", False), (f"threshold {THRESHOLD}", True)):
            lists = chosen(recorded, progressive=progressive)
            for share in SHARES:
                total = sums.setdefault((kind, share), {})
                for name, count in compare(lists, share, progressive=progressive).items():
                    total[name] = total.get(name, 0) + count
    report = {
        "command": f"python -m {__spec__.name} OUT.json {given.set.name} --rows {given.rows}",
        "model": Path(given.model).name,
        "prompts": len(lengths),
        "tokens, mean": sum(lengths) // len(lengths),
        "seconds": round(time.perf_counter() - started, 1),
        "misses": [
            {"choice": kind, "resident_blocks per page of a choice": share} | counts
            for (kind, share), counts in sums.items()
        ],
    }
    given.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for line in report["misses"]:
        print(line)


if __name__ == "__main__":
    main()
