"""How far apart rounding alone lets answers be whose pages are chosen: a control for the offloaded stress.

    python examples/rounding_and_pages.py OUT.json [--page 16] [--seed 1] [--seconds 100] [--merge]
        [--float32]

The small model in transformers on a CPU, without an engine and without offloading. All that it hands on is
rounded to bfloat16, as on a GPU: results of matrix products, norms, attention and layers, queries, keys and
values. A second model multiplies each before rounding with 1 + 1e-6 x, x normal, as sums in another order do.
Both answer prompts like those of gpu_offloaded_stress.py, with its budgets of 3, 4 and 8 pages, reuses and
lags; the second one once more by the pages that the first one has chosen. Log-probabilities are compared up
to the first token that differs. Rows are added to OUT with ``--merge``; ``--float32`` does not round. Five to
ten seconds a prompt."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from gpu_context import BFLOAT16, apart
from offloaded_jobs import Jobs

from ragserve.answering.prompt import PromptBuilder
from ragserve.config import DEFAULT_MODEL
from ragserve.files import write_json
from ragserve.verification import report
from sglang_ext.wire.protocol import DecodeOptions

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.integration.sparse_reference import Chosen, SparseReference

POOLS = {16: 1100, 64: 2400}  # by page: tokens of the pool that prompts are drawn for
ANSWER = 48  # tokens, at most
NOISE = 1e-6
ONLY = ("offloaded", "larger than the pool")  # kinds of prompts; where their KV is, says nothing here


class Rounded(SparseReference):
    """Rounds as bfloat16 does, after ``noise`` times a normal number; its choices are in ``chosen_pages``."""

    def __init__(self, page: int, *, rounds: bool) -> None:
        super().__init__(Path(DEFAULT_MODEL), page, page // 4)
        self.rounds = rounds
        self.noise = 0.0
        self.chosen_pages: list[list[list[int]]] = []
        self.follows: list[list[list[int]]] | None = None
        for module in self.model.modules():
            kind = type(module).__name__
            if isinstance(module, torch.nn.Linear) or kind.endswith(("RMSNorm", "DecoderLayer")):
                module.register_forward_hook(self._hook)

    def _hook(self, _module: Any, _given: Any, out: Any) -> Any:
        return (self._round(out[0]), *out[1:]) if isinstance(out, tuple) else self._round(out)

    def _round(self, x: torch.Tensor) -> torch.Tensor:
        if self.noise:
            x = x * (1 + self.noise * torch.randn(x.shape))
        return self._stored(x)

    def _stored(self, x: torch.Tensor) -> torch.Tensor:
        return x.bfloat16().float() if self.rounds else x

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
        out, rest = super()._attend(module, self._stored(q), k, v, mask, scaling)
        return self._round(out), rest

    def _choose(self, q: torch.Tensor, k: torch.Tensor, step: int, *, first: bool = False) -> Chosen:
        newest = (k.shape[1] - 1) // self.page
        number = len(self.chosen_pages)
        if self.follows is not None and number < len(self.follows):
            pages = self.follows[number]
        else:
            pages = self._best_pages(q, k, newest)
        self.chosen_pages.append(pages)
        return Chosen(self.step, step, first, newest, pages)

    def _best_pages(self, q: torch.Tensor, k: torch.Tensor, newest: int) -> list[list[int]]:
        """As `_best`, for all heads at once. q [heads, head_dim], k [kv_heads, tokens, head_dim]."""
        free = self.decode.budget // self.page - 2
        runs = k[:, self.page : newest * self.page].unflatten(1, (newest - 1, -1, self.logical))
        low, high = runs.amin(3)[:, None], runs.amax(3)[:, None]  # [kv_heads, 1, pages, logical, head_dim]
        queries = q.view(k.shape[0], -1, 1, 1, q.shape[1])
        bounds = torch.maximum(queries * low, queries * high).sum(-1).amax((1, 3))  # [kv_heads, pages]
        best = torch.sort(bounds, dim=-1, descending=True, stable=True).indices[:, :free] + 1
        return [[0, newest, *pages] for pages in best.tolist()]

    def answer(
        self, ids: list[int], n_new: int, *, noise: float, follows: list[list[list[int]]] | None = None
    ) -> tuple[list[int], list[float], None]:
        """Answer greedily; see the class."""
        self.noise, self.follows, self.chosen_pages = noise, follows, []
        found = self.plain(ids, n_new)
        return found.ids, found.logprobs, None


def first_other(one: list[list[list[int]]], other: list[list[list[int]]]) -> int | None:
    """Return the number of the first choice of a layer that differs; None: there is none."""
    for number, (a, b) in enumerate(zip(one, other, strict=False)):
        if [set(pages) for pages in a] != [set(pages) for pages in b]:
            return number
    return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--merge", action="store_true")
    parser.add_argument("--float32", action="store_true")
    given = parser.parse_args()
    begun = time.monotonic()
    chance = random.Random(f"{given.seed} {given.page}")
    torch.manual_seed(given.seed)
    pool = POOLS[given.page]
    builder = PromptBuilder.load(DEFAULT_MODEL)
    jobs = Jobs(builder, pool, page=given.page, longest=4 * pool // 3, answer=ANSWER)
    model = Rounded(given.page, rounds=not given.float32)
    rows: list[dict[str, Any]] = []
    if given.merge and given.out.exists():
        rows = json.loads(given.out.read_text(encoding="utf-8"))["rows"][0]["each"]
    while time.monotonic() - begun < given.seconds:
        job = jobs.draw(chance, list(ONLY))
        asked = {
            name: value for name, value in job.decode.items() if name not in ("offloaded", "resident_blocks")
        }
        model.decode = DecodeOptions(**asked, dense_below=0)
        if len(job.ids) <= 2 * model.decode.budget:
            continue
        one = model.answer(job.ids, job.n_new, noise=0.0)
        pages = model.chosen_pages
        own = model.answer(job.ids, job.n_new, noise=NOISE)
        other = first_other(pages, model.chosen_pages)
        led = model.answer(job.ids, job.n_new, noise=NOISE, follows=pages)
        (same, most), (led_same, led_most) = apart(one, own), apart(one, led)
        row: dict[str, Any] = {"dtype": "float32" if given.float32 else "bfloat16", "page": given.page}
        row |= {"seed": given.seed, "prompt": len(job.ids), "tokens": job.n_new}
        row |= {"pages": model.decode.budget // given.page, "reuse": model.decode.reuse}
        row |= {"lag": model.decode.lag_steps, "same tokens": same, "apart": round(most, 4)}
        row |= {"chosen otherwise": other is not None, "led, same tokens": led_same}
        row["led, apart"] = round(led_most, 4)
        rows.append(row)
        print(row, flush=True)
        write(given.out, rows)


def write(out: Path, rows: list[dict[str, Any]]) -> None:
    """Write the report: sums of the answers of each kind, and the answers."""
    kinds = sorted({(row["dtype"], row["page"]) for row in rows})
    sums = [
        summed(dtype, page, name, [row for row in rows if (row["dtype"], row["page"]) == (dtype, page)])
        for dtype, page in kinds
        for name in ("apart", "led, apart")
    ]
    sums[0]["each"] = rows
    workload = {"model": "ragserve-tiny", "noise": NOISE, "rounding explains": BFLOAT16}
    write_json(out, report.assemble("rounding-and-pages", workload, sums, ""))


def summed(dtype: str, page: int, name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    values = sorted(row[name] for row in rows)
    own = name == "apart"
    return {
        "dtype": dtype,
        "page": page,
        "compared by": "pages of its own choice" if own else "the same pages",
        "answers": len(rows),
        "chosen otherwise": sum(row["chosen otherwise"] for row in rows) if own else 0,
        "with the same tokens": sum(row["same tokens" if own else "led, same tokens"] for row in rows),
        "median apart": round(statistics.median(values), 4),
        "worst apart": values[-1],
        "beyond 0.15": sum(value > BFLOAT16 for value in values),
    }


if __name__ == "__main__":
    main()
