"""How much attention weight chosen pages hold, by the age of the choice and by what the pages are scored with, on a real model's keys.

    python examples/page_choice.py OUT.json SET.jsonl.gz [--rows N] [--steps N] [--model MODEL]

Over every prompt of a question set with long documents (see ragserve/eval/data.py) the last ``--steps`` tokens stand for decoded ones. The
pages of 64 tokens that a budget holds are chosen by the query of one step; the exact attention weight in them, and in pages that began
since, is summed at that step and at later ones: mean over layers, heads, prompts and steps. Runs on a CPU, about 3 s a prompt.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from pathlib import Path
from typing import Any

import torch

from ragserve.answering.prompt import PromptBuilder, PromptDocument
from ragserve.config import DEFAULT_MODEL

PAGE, LOGICAL = 64, 16
AGES = (0, 1, 4, 8, 16, 32, 64)
BUDGETS = (512, 1024, 2048)
SCORES = ("min and max of 16", "centre of 16", "min and max of 64", "centre of 64", "exact")
NAME = "ragserve_page_choice"


class Recorder:
    """A Hugging Face model whose layers leave their queries of the last tokens and all keys, both rotated."""

    def __init__(self, path: str, steps: int) -> None:
        from transformers import AttentionInterface, AutoModelForCausalLM

        self.steps = steps
        self.layers: list[tuple[torch.Tensor, torch.Tensor, float]] = []
        AttentionInterface.register(NAME, self._attend)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.model.set_attn_implementation(NAME)

    def _attend(self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        """q [1, heads, tokens, head_dim]; k, v [1, kv_heads, tokens, head_dim]."""
        self.layers.append((q[0, :, -self.steps :].clone(), k[0].clone(), scaling))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2), None

    @torch.no_grad()
    def __call__(self, ids: list[int]) -> list[tuple[torch.Tensor, torch.Tensor, float]]:
        self.layers = []
        self.model.base_model(torch.tensor([ids]), use_cache=False)
        return self.layers


def weights(q: torch.Tensor, k: torch.Tensor, scaling: float) -> torch.Tensor:
    """Attention weight by page, [steps, kv_heads, pages]: mean over the heads of a query group.

    q [heads, steps, dim], k [kv_heads, n, dim].
    """
    steps, tokens = q.shape[1], k.shape[1]
    group = q.shape[0] // k.shape[0]
    scores = torch.einsum("hgsd,hnd->hgsn", q.view(k.shape[0], group, steps, -1), k) * scaling
    seen = torch.ones(steps, tokens, dtype=torch.bool).tril(tokens - steps)
    share = scores.masked_fill(~seen, -torch.inf).softmax(-1).mean(1)  # [kv_heads, steps, n]
    share = torch.nn.functional.pad(share, (0, -tokens % PAGE))
    return share.view(*share.shape[:2], -1, PAGE).sum(-1).transpose(0, 1)


def page_scores(q: torch.Tensor, k: torch.Tensor, kind: str) -> torch.Tensor:
    """Scores of all full pages, [steps, kv_heads, full pages]: the best over a page's runs and the heads of the group."""
    full = k.shape[1] // PAGE
    run = int(kind.rsplit(" ", 1)[1])
    runs = k[:, : full * PAGE].view(k.shape[0], full * PAGE // run, run, -1)
    low, high = runs.amin(2), runs.amax(2)  # [kv_heads, runs, dim]
    query = q.view(k.shape[0], q.shape[0] // k.shape[0], q.shape[1], -1)
    if kind.startswith("centre"):
        scores = torch.einsum("hgsd,hrd->hgsr", query, (low + high) / 2)
    else:
        scores = torch.einsum("hgsd,hrd->hgsr", query.clamp_min(0), high) + torch.einsum("hgsd,hrd->hgsr", query.clamp_max(0), low)
    best = scores.amax(1)  # [kv_heads, steps, runs]
    return best.view(*best.shape[:2], full, PAGE // run).amax(-1).transpose(0, 1)


def held(share: torch.Tensor, scores: torch.Tensor, tokens: int, budget: int, age: int) -> float:
    """Mean share of the weight [steps, kv_heads, pages] in the pages chosen ``age`` steps before, and in those that began since."""
    steps, _, pages = share.shape
    newest = (tokens - steps + torch.arange(steps)) // PAGE  # page of each step's own token
    place = torch.arange(pages)
    ranked = torch.full_like(share, -torch.inf)
    ranked[..., : scores.shape[-1]] = scores
    ranked.masked_fill_(place >= newest[:, None, None], -torch.inf)
    ranked[..., 0] = torch.inf
    ranked.masked_fill_(place == newest[:, None, None], torch.inf)
    best = ranked.topk(min(budget // PAGE, pages), -1).indices
    chosen = torch.zeros_like(share, dtype=torch.bool).scatter_(-1, best, torch.ones_like(best, dtype=torch.bool))
    chosen = chosen[: steps - age] | (place > newest[: steps - age, None, None])
    return float((share[age:] * chosen).sum(-1).mean())


def measure(recorder: Recorder, prompts: list[list[int]], note: Any) -> None:
    """``note(budget, scores, age, share)`` for every prompt and layer."""
    for ids in prompts:
        for q, k, scaling in recorder(ids):
            share = weights(q, k, scaling)
            for kind in SCORES:
                scores = share if kind == "exact" else page_scores(q, k, kind)
                for budget in BUDGETS:
                    for age in AGES:
                        note(budget, kind, age, held(share, scores, len(ids), budget, age))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("set", type=Path)
    parser.add_argument("--rows", type=int, default=20)
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    given = parser.parse_args()
    builder = PromptBuilder.load(given.model)
    with gzip.open(given.set, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines][: given.rows]
    prompts = []
    for row in rows:
        documents = [PromptDocument(str(i), title, text) for i, (title, text) in enumerate(row["docs"])]
        prompts.append(builder.build(row["question"], documents, max_prompt_tokens=10**9).input_ids)
    sums: dict[tuple[int, str, int], list[float]] = {}
    started = time.perf_counter()
    measure(Recorder(given.model, given.steps), prompts, lambda *key: sums.setdefault(key[:3], []).append(key[3]))
    found = [
        {"budget": budget, "scores": kind} | {f"age {age}": round(sum(s := sums[budget, kind, age]) / len(s), 4) for age in AGES}
        for budget in BUDGETS
        for kind in SCORES
    ]
    report = {
        "command": f"python examples/page_choice.py OUT.json {given.set.name} --rows {given.rows} --steps {given.steps}",
        "model": Path(given.model).name,
        "prompts": len(prompts),
        "tokens, mean": sum(map(len, prompts)) // len(prompts),
        "seconds": round(time.perf_counter() - started, 1),
        "weight in the chosen pages": found,
    }
    given.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for row in found:
        print(row)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
