"""Compare what chooses a decode step's pages: the last query, a window of queries, or one choice for good.

    python -m benchmarks.page_observers OUT.json SET.jsonl.gz [--rows N] [--steps N] [--model MODEL]

The last ``--steps`` tokens of every prompt of a question set with long documents (ragserve/eval/data.py)
stand for decoded ones. Pages of 64 tokens are chosen anew every 16 steps, or once before the first step, and
the exact attention weight in them, in the first page and in pages that began since is averaged over layers,
heads, steps and prompts. Runs on a CPU, 15 seconds a prompt of 4k tokens."""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from ragserve.answering.prompt import PromptBuilder, PromptDocument
from ragserve.config import DEFAULT_MODEL
from ragserve.eval.data import load

PAGE, LOGICAL, EVERY, LONGEST = 64, 16, 16, 32
BUDGETS = (512, 1024, 2048)
WINDOWS = (1, 4, 8, 16, 32)
SCORES = ("bound", "exact")  # of logical pages by their min and max keys; attention weights
# by a running mean of the queries, as decoding does it: the bound, the largest q . k of a page's keys
MEAN_SCORES = ("bound of the mean", "largest of the mean")
_ATTENTION = "ragserve_page_observers"
Recorded = list[tuple[torch.Tensor, torch.Tensor, float]]
"""By layer: queries [heads, tokens, head_dim], keys [kv_heads, tokens, head_dim], scale of scores."""
Key = tuple[str, str, int]
"""Observer, scores, budget."""


class Recorder:
    """A Hugging Face model whose layers leave queries of the last tokens, and all keys, both rotated."""

    def __init__(self, path: str, n: int) -> None:
        from transformers import AttentionInterface, AutoModelForCausalLM

        self._n = n
        self.layers: Recorded = []
        AttentionInterface.register(_ATTENTION, self._attend)
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._model.set_attn_implementation(_ATTENTION)

    def _attend(
        self,
        module: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: Any,
        scaling: float,
        **_: Any,
    ) -> Any:
        """q [1, heads, tokens, head_dim]; k, v [1, kv_heads, tokens, head_dim]."""
        self.layers.append((q[0, :, -self._n :].clone(), k[0].clone(), scaling))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2), None

    @torch.no_grad()
    def __call__(self, ids: list[int]) -> Recorded:
        self.layers = []
        self._model.base_model(torch.tensor([ids]), use_cache=False)
        return self.layers


def weights(q: torch.Tensor, k: torch.Tensor, scaling: float, *, stride: int = 1) -> torch.Tensor:
    """Attention weight by page, [steps, kv_heads, pages], mean over a query group, of q [heads, steps, dim]
    over k [kv_heads, tokens, dim]; queries are ``stride`` tokens apart."""
    steps, tokens = q.shape[1], k.shape[1]
    logits = torch.einsum("hgsd,hnd->hgsn", q.unflatten(0, (k.shape[0], -1)), k) * scaling
    ends = tokens - stride * torch.arange(steps, 0, -1) + 1  # tokens that a query sees
    seen = torch.arange(tokens) < ends[:, None]
    share = logits.masked_fill(~seen, -torch.inf).softmax(-1).mean(1)
    share = torch.nn.functional.pad(share, (0, -tokens % PAGE))
    return share.unflatten(-1, (-1, PAGE)).sum(-1).transpose(0, 1)


def bounds(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Upper bound of q . k in each full page, [steps, kv_heads, pages]: the best of its logical pages and of
    the heads of a group."""
    full = k.shape[1] // PAGE
    runs = k[:, : full * PAGE].unflatten(1, (-1, LOGICAL))
    low, high = runs.amin(2), runs.amax(2)
    query = q.unflatten(0, (k.shape[0], -1))
    found = torch.einsum("hgsd,hrd->hgsr", query.clamp_min(0), high)
    found += torch.einsum("hgsd,hrd->hgsr", query.clamp_max(0), low)
    return found.amax(1).unflatten(-1, (full, -1)).amax(-1).transpose(0, 1)


def largest(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Largest q . k of each full page, [steps, kv_heads, pages], and of the heads of a group."""
    full = k.shape[1] // PAGE
    found = torch.einsum("hgsd,hnd->hgsn", q.unflatten(0, (k.shape[0], -1)), k[:, : full * PAGE])
    return found.amax(1).unflatten(-1, (full, PAGE)).amax(-1).transpose(0, 1)


def running_mean(q: torch.Tensor, window: int) -> torch.Tensor:
    """Mean of each query of q [heads, steps, dim] and those before, where the share of one is never below one
    ``window``-th."""
    means = [q[:, 0]]
    for step in range(1, q.shape[1]):
        means.append(means[-1] + (q[:, step] - means[-1]) / min(step + 1, window))
    return torch.stack(means, 1)


def held(share: torch.Tensor, score: torch.Tensor, newest: int, budget: int) -> float:
    """Sum over steps of the mean weight, share [steps, kv_heads, pages], in the first page, the best of score
    [kv_heads, pages], and all from ``newest`` on."""
    pages = share.shape[-1]
    ranked = torch.full((share.shape[1], pages), -torch.inf)
    ranked[:, : score.shape[-1]] = score
    ranked[:, newest:] = -torch.inf
    ranked[:, 0] = torch.inf
    best = ranked.topk(min(budget // PAGE - 1, newest), -1).indices
    chosen = torch.zeros(ranked.shape, dtype=torch.bool).scatter_(-1, best, value=True)
    chosen[:, newest:] = True
    return float((share * chosen).sum(-1).mean(1).sum())


def observe(q: torch.Tensor, k: torch.Tensor, scaling: float, steps: int) -> dict[Key, float]:
    """Mean weight in the chosen pages by observer, scores and budget. q [heads, LONGEST + steps, dim]."""
    tokens = k.shape[1]
    share = weights(q, k, scaling)
    found: dict[Key, float] = defaultdict(float)
    for kind in SCORES:
        scores = share if kind == "exact" else bounds(q, k)
        for budget in BUDGETS:
            for start in range(LONGEST, LONGEST + steps, EVERY):
                newest = (tokens - len(share) + start) // PAGE
                serves = share[start : start + EVERY]
                for window in WINDOWS:
                    score = scores[start + 1 - window : start + 1].mean(0)
                    found[f"window {window}", kind, budget] += held(serves, score, newest, budget)
                once = (tokens - len(share) + LONGEST) // PAGE
                score = scores[:LONGEST].mean(0)
                found["once, by the prompt's last 32", kind, budget] += _once(
                    serves, score, once, newest, budget
                )
            recent = torch.arange(scores.shape[-1], dtype=torch.float32).expand(scores.shape[1], -1)
            found["sinks and newest", kind, budget] = sum(
                held(share[s : s + EVERY], recent, (tokens - len(share) + s) // PAGE, budget)
                for s in range(LONGEST, LONGEST + steps, EVERY)
            )
    for window in WINDOWS:
        mean = running_mean(q, window)
        for start in range(LONGEST, LONGEST + steps, EVERY):
            newest = (tokens - len(share) + start) // PAGE
            one = mean[:, start : start + 1]
            for kind, score in zip(MEAN_SCORES, (bounds(one, k)[0], largest(one, k)[0]), strict=True):
                for budget in BUDGETS:
                    serves = share[start : start + EVERY]
                    found[f"window {window}", kind, budget] += held(serves, score, newest, budget)
    return {key: value / steps for key, value in found.items()}


def _once(share: torch.Tensor, score: torch.Tensor, once: int, newest: int, budget: int) -> float:
    """As `held` for a choice among the pages before ``once``; later ones take places of the worst chosen."""
    since = min(newest - once, budget // PAGE - 2)
    ranked = score.clone()
    ranked[:, once:] = -torch.inf
    recent = range(newest - since, newest)
    ranked[:, [page for page in recent if page < ranked.shape[-1]]] = torch.inf
    return held(share, ranked, newest, budget)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("set", type=Path)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    given = parser.parse_args()
    builder = PromptBuilder.load(given.model)
    started, lengths = time.perf_counter(), []
    sums: dict[Key, list[float]] = defaultdict(list)
    recorder = Recorder(given.model, LONGEST + given.steps)
    for row in load(given.set, given.rows):
        documents = [PromptDocument("", each.title, each.text) for each in row.documents]
        ids = builder.build(row.question, documents, max_prompt_tokens=10**9).input_ids
        lengths.append(len(ids))
        for q, k, scaling in recorder(ids):
            for key, value in observe(q, k, scaling, given.steps).items():
                sums[key].append(value)
    report = {
        "command": f"python -m benchmarks.page_observers OUT.json {given.set.name} --rows {given.rows}",
        "model": Path(given.model).name,
        "prompts": len(lengths),
        "tokens, mean": sum(lengths) // len(lengths),
        "seconds": round(time.perf_counter() - started, 1),
        "weight in the chosen pages": [
            {"budget": budget, "scores": kind, "observer": name, "weight": round(sum(v) / len(v), 4)}
            for (name, kind, budget), v in sorted(sums.items(), key=lambda one: (one[0][2], one[0][1]))
        ],
    }
    given.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for row in report["weight in the chosen pages"]:
        print(row)


if __name__ == "__main__":
    main()
