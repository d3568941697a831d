"""Pages that offloaded requests in progressive mode read from the host in a step, by how their resident
blocks are used.

    python -m benchmarks.host_reads OUT.json SET.jsonl.gz [--rows N] [--steps N] [--model MODEL]

The last ``--steps`` tokens of every prompt of a question set with long documents (ragserve/eval/data.py)
stand for decoded ones, and what comes before them for the offloaded prompt. In every step each layer and KV
head of the model ranks pages of 16 tokens by the upper bounds of their scores, and attends to them in rounds
until the estimate of progressive_decode passes the threshold. Every 16th step the ranking fills resident
blocks, which are read from the third step after it on. Pages that resident blocks lack are loaded beside
steps; offloaded pages that a step attends to and resident blocks lack are read by the step itself. Ways to
use as many resident blocks:

* choice: each layer and head has its own. Twice as many pages as it attended to, as far as the budget goes,
  are its choice, and steps read those in resident blocks.
* own: likewise, and steps read all that resident blocks hold.
* filled: its own resident blocks are filled from the start of its ranking, and steps read all of them.
* shared: one pool for all layers and heads, filled from the start of their rankings, by rank over pages
  attended to; steps read all of it.

Runs on a CPU, a minute a prompt of 4k tokens."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import torch

from benchmarks import page_observers
from benchmarks.resident_block_quotas import ResidentBlocks
from ragserve.answering.prompt import PromptBuilder, PromptDocument
from ragserve.config import DEFAULT_MODEL
from ragserve.eval.data import load, set_name
from ragserve.verification import report
from ragserve_kernels.progressive_decode import Rounds
from ragserve_kernels.progressive_decode.naive import weight_estimate

PAGE, EVERY, LAG = 16, 16, 2
THRESHOLDS = (0.7, 0.9, 0.95)
BUDGETS = (512, 1024)  # tokens of a choice
COLUMNS = (1, 2)  # for each page of a choice
WAYS = ("choice", "own", "filled", "shared")
NOTE = (
    "attended: offloaded pages that steps attended to, of all layers and heads. choice to shared: percent of "
    "these that steps read from the host, by how resident blocks are used. loaded: pages loaded into blocks "
    "beside steps; choice loads what own does. resident_blocks: for each page of the budget."
)
LISTED = 2  # pages of a choice for each that its step attended to
Step = tuple[list[int], int]
"""All pages in the order of their scores, and to how many of them a step attends."""


def attended(q: torch.Tensor, k: torch.Tensor, scaling: float, threshold: float) -> list[list[Step]]:
    """Return the steps of each KV head. q [heads, steps, dim], k [kv_heads, tokens, dim]."""
    scores = page_observers.bounds(q, k)  # [steps, kv_heads, full pages]
    logits = torch.einsum("hgsd,hnd->hgsn", q.unflatten(0, (k.shape[0], -1)), k) * scaling
    tokens, steps = k.shape[1], q.shape[1]
    seen = torch.arange(tokens) < (tokens - torch.arange(steps, 0, -1) + 1)[:, None]
    logits = torch.nn.functional.pad(
        logits.masked_fill(~seen, -torch.inf), (0, -tokens % PAGE), value=-torch.inf
    )
    logs = logits.unflatten(-1, (-1, PAGE)).logsumexp(-1)  # [kv_heads, group, steps, pages]
    found = []
    for head in range(k.shape[0]):
        own: list[Step] = []
        for step in range(steps):
            newest = (tokens - steps + step) // PAGE
            ranked = scores[step, head, 1:newest].argsort(descending=True) + 1
            order = torch.cat((torch.tensor([0, newest]), ranked))
            of_step = logs[head, :, step, order]
            ends = Rounds().ends(len(order), PAGE)
            for start, end in zip([0, *ends], ends, strict=False):
                left = len(order) - end
                if bool((weight_estimate(of_step[:, :end], 2, left, start) > threshold).all()):
                    break
            own.append((order.tolist(), end))
        found.append(own)
    return found


def count(steps: list[Step], prompt: int, budget: int, resident_blocks: int) -> Counter[str]:
    """Count the pages of one layer and head with resident blocks of its own; offloaded are the first
    ``prompt`` ones.
    """
    pages, counts = budget // PAGE, Counter[str]()
    size, current, pending = resident_blocks * pages, set[int](), set[int]()
    ways = {"own": ResidentBlocks(size), "filled": ResidentBlocks(size)}
    coming = {way: set[int]() for way in ways}
    for number, (order, used) in enumerate(steps):
        if number % EVERY == LAG + 1:
            current, coming = pending, {way: set() for way in ways}
        if number > LAG:
            offloaded = [page for page in order[:used] if page < prompt]
            counts["attended"] += len(offloaded)
            counts["choice"] += sum(page not in current for page in offloaded)
            for way, held in ways.items():
                counts[way] += sum(page not in held or page in coming[way] for page in offloaded)
        if number % EVERY == 0:
            pending = {page for page in order[: min(pages, LISTED * used)] if page < prompt}
            first = [page for page in order if page < prompt][:size]
            for way, named in (("own", sorted(pending)), ("filled", first)):
                coming[way] = {page for page in named if page not in ways[way]}
                counts[f"loaded {way}"] += ways[way].load(named)
    return counts


def count_shared(lists: list[list[Step]], prompt: int, budget: int, resident_blocks: int) -> Counter[str]:
    """Count the pages of all layers and heads, which share their resident blocks."""
    counts, size = Counter[str](), resident_blocks * budget // PAGE * len(lists)
    held, coming = ResidentBlocks(size), set[tuple[int, int]]()
    for number in range(len(lists[0])):
        if number % EVERY == LAG + 1:
            coming = set()
        if number > LAG:
            for i, steps in enumerate(lists):
                order, used = steps[number]
                offloaded = [(i, page) for page in order[:used] if page < prompt]
                counts["shared"] += sum(page not in held or page in coming for page in offloaded)
        if number % EVERY == 0:
            worth = [
                (rank / steps[number][1], rank, i, page)
                for i, steps in enumerate(lists)
                for rank, page in enumerate(steps[number][0])
                if page < prompt
            ]
            named = [(i, page) for _, _, i, page in sorted(worth)[:size]]
            coming = {page for page in named if page not in held}
            counts["loaded shared"] += held.load(named)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("set", type=Path)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    given = parser.parse_args()
    page_observers.PAGE = PAGE
    builder = PromptBuilder.load(given.model)
    recorder = page_observers.Recorder(given.model, given.steps)
    lengths: list[int] = []
    sums: dict[tuple[float, int, int], Counter[str]] = {}
    for row in load(given.set, given.rows):
        documents = [PromptDocument("", each.title, each.text) for each in row.documents]
        ids = builder.build(row.question, documents, max_prompt_tokens=10**9).input_ids
        lengths.append(len(ids))
        prompt = (len(ids) - given.steps) // PAGE
        recorded = list(recorder(ids))
        for threshold in THRESHOLDS:
            lists = [own for q, k, scaling in recorded for own in attended(q, k, scaling, threshold)]
            for budget in BUDGETS:
                for resident_blocks in COLUMNS:
                    total = sums.setdefault((threshold, budget, resident_blocks), Counter())
                    for steps in lists:
                        total.update(count(steps, prompt, budget, resident_blocks))
                    total.update(count_shared(lists, prompt, budget, resident_blocks))
    rows = [
        {
            "threshold": threshold,
            "budget": budget,
            "resident_blocks": resident_blocks,
            "attended": counts["attended"],
            **{way: round(100 * counts[way] / counts["attended"], 1) for way in WAYS},
            **{f"loaded {way}": counts[f"loaded {way}"] for way in WAYS[1:]},
        }
        for (threshold, budget, resident_blocks), counts in sums.items()
    ]
    workload = {
        "model": Path(given.model).name,
        "set": set_name(given.set),
        "prompts": len(lengths),
        "tokens": sum(lengths) // len(lengths),
        "steps": given.steps,
        "page": PAGE,
    }
    report.write("host reads", workload, rows, out=given.out, note=NOTE)


if __name__ == "__main__":
    main()
