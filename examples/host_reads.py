"""Pages that hosted requests in progressive mode read from the host in a step, by how many a choice lists for
columns.

    python examples/host_reads.py OUT.json SET.jsonl.gz [--rows N] [--steps N] [--model MODEL]

The last ``--steps`` tokens of every prompt of a question set with long documents (ragserve/eval/data.py)
stand for decoded ones, and what comes before them for the hosted prompt. In every step each layer and KV head
of the model ranks pages of 16 tokens by the upper bounds of their scores, and attends to them in rounds until
the estimate of progressive_decode passes the threshold. Every 16th step the first of them become the choice
whose pages are in columns from the third step after it on. Pages that a choice names and columns lack are
loaded beside steps; hosted pages that a step attends to and its choice does not name are read by the step
itself. Runs on a CPU, a minute a prompt of 4k tokens."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path

import page_observers
import torch
from column_quotas import Columns

from ragserve.answering.prompt import PromptBuilder, PromptDocument
from ragserve.config import DEFAULT_MODEL
from ragserve.eval.data import load
from ragserve_kernels.progressive_decode import Rounds
from ragserve_kernels.progressive_decode.naive import weight_estimate

PAGE, EVERY, LAG = 16, 16, 2
THRESHOLDS = (0.7, 0.9, 0.95)
BUDGETS = (512, 1024, 2048)  # tokens of a choice
LISTED = (1, 2, None)  # pages of a choice for each that its step attended to; None: as the budget holds
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


def count(steps: list[Step], prompt: int, budget: int, listed: int | None) -> Counter[str]:
    """Count the pages of one layer and head; hosted are the first ``prompt`` ones."""
    pages, counts = budget // PAGE, Counter[str]()
    columns, current, pending = Columns(2 * pages), set[int](), set[int]()
    for number, (order, used) in enumerate(steps):
        if number % EVERY == LAG + 1:
            current = pending
        hosted = [page for page in order[:used] if page < prompt]
        if number > LAG:
            counts["attended"] += len(hosted)
            counts["read by steps"] += sum(page not in current for page in hosted)
        if number % EVERY == 0:
            most = pages if listed is None else min(pages, listed * used)
            pending = {page for page in order[:most] if page < prompt}
            counts["loaded"] += columns.load(pending)
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
    started, lengths = time.perf_counter(), []
    sums: dict[tuple[float, int, int | None], Counter[str]] = {}
    for row in load(given.set, given.rows):
        documents = [PromptDocument("", each.title, each.text) for each in row.documents]
        ids = builder.build(row.question, documents, max_prompt_tokens=10**9).input_ids
        lengths.append(len(ids))
        prompt = (len(ids) - given.steps) // PAGE
        for q, k, scaling in recorder(ids):
            for threshold in THRESHOLDS:
                for steps in attended(q, k, scaling, threshold):
                    for budget in BUDGETS:
                        for listed in LISTED:
                            total = sums.setdefault((threshold, budget, listed), Counter())
                            total.update(count(steps, prompt, budget, listed))
    report = {
        "command": f"python examples/host_reads.py OUT.json {given.set.name} --rows {given.rows} "
        f"--steps {given.steps}",
        "model": Path(given.model).name,
        "prompts": len(lengths),
        "tokens, mean": sum(lengths) // len(lengths),
        "seconds": round(time.perf_counter() - started, 1),
        "pages": [
            {"threshold": threshold, "budget": budget, "listed": listed} | counts
            for (threshold, budget, listed), counts in sums.items()
        ],
    }
    given.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for line in report["pages"]:
        print(line)


if __name__ == "__main__":
    main()
