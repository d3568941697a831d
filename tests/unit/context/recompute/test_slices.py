"""The recompute pass in slices: the results of one piece, and never more rows in a call of the model than the
engine has memory for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sglang_ext.context.compose.composer import Composer, filling_of
from sglang_ext.context.recompute.job import question_job
from sglang_ext.context.recompute.recompute_pass import recompute
from sglang_ext.context.scheduler.query_pass import QueryWatch
from tests.unit.context.composed_cases import SLOTS, Case, assert_same_pools, composer_of, holes, some
from tests.unit.context.small_model import DIM, HEADS, KV_HEADS, LAYERS, runner_of

ODD = (1, 7, 13, 64)  # rows of a slice; the cases have up to 60 rows each


def by_layer(end: int, draw: Any) -> list[list[int]]:
    return [sorted(draw.sample(range(end), end // 2)) for _ in range(LAYERS)]


def everything(end: int, draw: Any) -> list[int]:
    return list(range(end))


MIXES: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "all": ("concat", [{"recompute": "all"}, {"recompute": "all"}]),
    "some": ("concat", [{"recompute": some}, {}, {"recompute": some}]),
    "not kept": ("concat", [{"experimental": {"kept": holes}, "recompute": everything}]),
    "by layer": ("concat", [{"experimental": {"kept": by_layer}, "recompute": "all"}]),
    "blended": ("concat", [{"recompute": some, "update": "fusion"}, {"recompute": "all"}]),
    "chosen": ("cacheblend", [{"share": 0.4}, {"share": 0.9}, {"share": 0.1}]),
    "burst": ("cacheblend", [{"share": 0.2}] * 5),
}


def runner_with(chunk: int | None, seed: int) -> Any:
    """The small model behind a prefill chunk of that size, noting the rows of each of its calls."""
    runner = runner_of(SLOTS, seed)
    runner.server_args.chunked_prefill_size = chunk
    model, runner.rows = runner.model.model, []

    def call(input_ids: torch.Tensor, **rest: Any) -> torch.Tensor:
        runner.rows.append(len(input_ids))
        return type(model).__call__(model, input_ids, **rest)

    runner.model.model = Counted(model, call)
    return runner


class Counted:
    """The decoder, with its calls counted."""

    def __init__(self, model: Any, call: Any) -> None:
        self._call, self.layers, self.norm, self.embed_tokens = (
            call,
            model.layers,
            model.norm,
            model.embed_tokens,
        )

    def __call__(self, **fields: Any) -> torch.Tensor:
        hidden: torch.Tensor = self._call(**fields)
        return hidden


def filled(mix: str, chunk: int | None, seed: int) -> tuple[Any, Composer, Case]:
    strategy, options = MIXES[mix]
    runner, case = runner_with(chunk, seed), Case(options, seed, strategy)
    composer = composer_of(runner)
    composer.fill(case.contexts, case.rows, whole=True)
    return runner, composer, case


@pytest.mark.parametrize("chunk", ODD)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("seed", range(3))
def test_slices_compute_what_one_piece_does(mix: str, seed: int, chunk: int) -> None:
    whole, composer, case = filled(mix, None, seed)
    sliced, other, same = filled(mix, chunk, seed)
    assert_same_pools(sliced.token_to_kv_pool, whole.token_to_kv_pool)
    assert max(sliced.rows) <= chunk < max(whole.rows) or max(whole.rows) <= chunk
    assert [c.outcome.recomputed for c in same.contexts] == [c.outcome.recomputed for c in case.contexts]
    one, two = composer.fused_question._hidden, other.fused_question._hidden
    assert (one is None) == (two is None)
    if one is not None and two is not None:
        torch.testing.assert_close(two, one)


def test_no_call_has_more_rows_than_a_chunk_however_many_requests_come_at_once() -> None:
    runner, _, case = filled("burst", 16, 1)
    kept = sum(context.slots for context in case.contexts)
    assert kept > 10 * 16
    assert max(runner.rows) == 16
    chosen = sum(context.outcome.recomputed for context in case.contexts)
    assert kept + chosen <= sum(runner.rows) < kept + chosen + kept // 2, "only the chosen run twice"


def test_rows_are_chosen_as_cacheblend_defines_it() -> None:
    """All kept tokens replace their KV in layer 0, and those whose values deviate most in layer 1 go on."""
    runner, _, case = filled("chosen", 7, 4)
    untouched, fresh = runner_of(SLOTS, 4), Case(MIXES["chosen"][1], 4, "cacheblend")
    composer = composer_of(untouched)
    composer.gather(
        [filling_of(c, row[: c.slots]) for c, row in zip(fresh.contexts, fresh.rows, strict=True)]
    )
    pool = untouched.token_to_kv_pool
    for context, row in zip(case.contexts, case.rows, strict=True):
        slots, rows = row[: context.slots], torch.arange(context.slots)
        hidden = 1.5 * untouched.model.model.embed_tokens(torch.tensor(context.ids[: context.slots]))
        for number, layer in enumerate(untouched.model.model.layers):
            keys, values = pool.k_buffer[number], pool.v_buffer[number]
            q, k, v = (hidden @ part for part in layer._projections)
            k, v = (part.view(-1, KV_HEADS, DIM) for part in (k + rows[:, None] / 100, v))
            if number == 1:
                first = context.plan.spans[0].end
                deviation = (v - values[slots]).square().sum((1, 2))[first:]
                best = first + deviation.topk(context.outcome.recomputed).indices.sort().values
                rows, q, k, v, hidden = best, q[best], k[best], v[best], hidden[best]
            keys[slots[rows]], values[slots[rows]] = k, v
            groups = [part[slots].repeat_interleave(HEADS // KV_HEADS, 1) for part in (keys, values)]
            score = torch.einsum("rhd,shd->rhs", q.view(-1, HEADS, DIM), groups[0]) * DIM**-0.5
            seen = torch.arange(len(slots)) <= rows[:, None]
            weight = score.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
            hidden = hidden + torch.einsum("rhs,shd->rhd", weight, groups[1]).flatten(1) @ layer._out
    written = torch.cat(case.rows)
    for got, want in zip(
        (*runner.token_to_kv_pool.k_buffer, *runner.token_to_kv_pool.v_buffer),
        (*pool.k_buffer, *pool.v_buffer),
        strict=True,
    ):
        torch.testing.assert_close(got[written], want[written], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk", [-1, 0, None])
def test_without_chunked_prefill_few_rows_are_one_piece(chunk: int | None) -> None:
    assert len(filled("all", chunk, 2)[0].rows) == 1


@pytest.mark.parametrize("chunk", ODD)
def test_queries_are_watched_across_slices(chunk: int) -> None:
    """Questions of 5, 17 and 3 tokens, whose last query and mean query must not depend on slices."""
    found = []
    for size in (None, chunk):
        runner = runner_with(size, 3)
        context, own = torch.arange(1, 40), torch.arange(100, 125)
        jobs = [question_job(torch.arange(len(part)), 39, context, part) for part in own.split([5, 17, 3])]
        watch = QueryWatch(torch.tensor([4, 21, 24]), {0: slice(0, 5), 1: slice(5, 22)})
        recompute(runner, jobs, watch=watch)
        found.append(watch)
    whole, sliced = found
    for (q, scaling), (other, same) in zip(whole.last.queries, sliced.last.queries, strict=True):
        assert scaling == same
        torch.testing.assert_close(other, q)
    for number in (0, 1):
        torch.testing.assert_close(torch.stack(sliced.means[number]), torch.stack(whole.means[number]))


def test_only_wanted_states_are_kept() -> None:
    runner = runner_with(4, 5)
    job = question_job(torch.arange(11), 0, torch.empty(0, dtype=torch.int64), torch.arange(1, 12))
    all_states = recompute(runner, [job], keep=np.arange(11)).hidden
    some_states = recompute(runner, [job], keep=np.array([3, 10])).hidden
    assert all_states is not None
    assert some_states is not None
    torch.testing.assert_close(some_states, all_states[[3, 10]])
