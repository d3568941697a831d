"""The question in the recompute pass: what two passes one after the other compute, and when it is left to
SGLang.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang_ext.context.compose import fused_question
from sglang_ext.context.compose.request import ComposedContext
from sglang_ext.context.recompute.job import RecomputeJob, question_job
from sglang_ext.context.recompute.layers import run_layers
from sglang_ext.context.recompute.recompute_pass import recompute
from sglang_ext.context.recompute.row_attention import Rows
from tests.unit.context.composed_cases import SLOTS, Case, assert_same_pools, composer_of, holes, some
from tests.unit.context.small_model import HIDDEN, LAYERS, runner_of
from tests.unit.request_shapes import group


class Graphs:
    """Runs passes of up to ``most`` rows as a captured graph does, the same memory for the result of each."""

    def __init__(self, runner: Any, most: int) -> None:
        self._runner = runner
        self._hidden = torch.full((most, HIDDEN), float("nan"))

    def fits(self, jobs: Sequence[RecomputeJob]) -> bool:
        return all(job.uniform for job in jobs) and sum(len(job.ids) for job in jobs) <= len(self._hidden)

    def replay(self, jobs: Sequence[RecomputeJob]) -> torch.Tensor | None:
        if not self.fits(jobs):
            return None
        ids, positions = torch.cat([job.ids for job in jobs]), torch.cat([job.positions for job in jobs])
        self._hidden[: len(ids)] = run_layers(self._runner, Rows.of(jobs), ids, positions)
        return self._hidden[: len(ids)]


def batch_of(case: Case) -> Any:
    return SimpleNamespace(
        input_ids=torch.cat([torch.tensor(c.ids[c.plan.question_start :]) for c in case.contexts])
    )


def in_two(options: Sequence[dict[str, Any]], seed: int) -> tuple[torch.Tensor, Any]:
    """The questions' logits of a pass of their own over the recomputed contexts, and the pool behind it."""
    runner, case = runner_of(SLOTS, seed), Case(options, seed)
    composer = composer_of(runner)
    composer.fill(case.contexts, case.rows)
    assert composer.fused_question.output(batch_of(case)) is None
    jobs = [
        question_job(
            torch.tensor(c.ids[c.plan.question_start :]), c.question_at, row[: c.slots], row[c.slots :]
        )
        for c, row in zip(case.contexts, case.rows, strict=True)
    ]
    hidden = recompute(runner, jobs, keep=np.arange(sum(len(job.ids) for job in jobs))).hidden
    assert hidden is not None
    return hidden @ runner.model.lm_head, runner.token_to_kv_pool


MIXES: dict[str, list[dict[str, Any]]] = {
    "all": [{"recompute": "all"}],
    "some": [{"recompute": some}],
    "compact": [{"experimental": {"kept": holes}, "kept_positions": "compact", "recompute": "all"}],
    "several": [
        {"recompute": some},
        {},
        {"recompute": "all"},
        {"recompute": some},
        {"recompute": "first", "first": 2},
    ],
    "none": [{}, {"experimental": {"kept": holes}}],
}


@pytest.mark.parametrize("graph", [False, True], ids=["layers", "graph"])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("seed", range(5))
def test_one_pass_computes_what_two_do(mix: str, seed: int, graph: bool) -> None:
    wanted, pool = in_two(MIXES[mix], seed)
    runner, case = runner_of(SLOTS, seed), Case(MIXES[mix], seed)
    composer = composer_of(runner, Graphs(runner, 400) if graph else None)
    composer.fill(case.contexts, case.rows, whole=True)
    output = composer.fused_question.output(batch_of(case))
    if mix == "none" and not graph:
        assert output is None, "nothing is saved by a pass of questions alone that is launched layer by layer"
        assert not any(c.outcome.fused for c in case.contexts)
        return
    torch.testing.assert_close(output.logits_output, wanted)
    assert_same_pools(runner.token_to_kv_pool, pool)
    assert all(c.outcome.fused and c.outcome.by_graph == graph for c in case.contexts)
    assert sum(c.outcome.recomputed for c in case.contexts) == sum(
        c.outcome.recomputed for c in _filled(MIXES[mix], seed)
    )


def _filled(options: Sequence[dict[str, Any]], seed: int) -> list[ComposedContext]:
    case = Case(options, seed)
    composer_of(runner_of(SLOTS, seed)).fill(case.contexts, case.rows)
    return case.contexts


@pytest.mark.parametrize("seed", range(5))
def test_with_everything_recomputed_the_question_has_its_states_of_a_whole_prompt(seed: int) -> None:
    """Against the model over the whole prompt with causal attention, nothing cached."""
    runner, case = runner_of(SLOTS, seed), Case([{"recompute": "all"}], seed)
    composer = composer_of(runner)
    composer.fill(case.contexts, case.rows, whole=True)
    (context,) = case.contexts
    n = len(context.ids)
    slots = torch.arange(100, 100 + n)
    prompt = RecomputeJob(
        torch.tensor(context.ids), torch.arange(n), slots, torch.arange(1, n + 1)[None], slots[None], None, 0
    )
    whole = recompute(runner_of(SLOTS, seed), [prompt], keep=np.arange(n)).hidden
    assert whole is not None
    output = composer.fused_question.output(batch_of(case))
    torch.testing.assert_close(
        output.logits_output, whole[context.plan.question_start :] @ runner.model.lm_head
    )


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("cacheblend", {"share": 0.5}),
        ("concat", {"recompute": some, "update": "fusion"}),
        (
            "concat",
            {"experimental": {"kept": holes}, "recompute": lambda end, _: list(range(end))},
        ),  # rows that no layer keeps
        (
            "concat",
            {
                "experimental": {
                    "kept": lambda end, draw: [
                        sorted(draw.sample(range(end), end // 2)) for _ in range(LAYERS)
                    ]
                },
                "recompute": "all",
            },
        ),
    ],
    ids=["chosen", "blended", "not kept", "by layer"],
)
def test_a_pass_that_is_not_the_same_in_every_layer_leaves_the_question_to_sglang(
    strategy: str, options: dict[str, Any]
) -> None:
    case, composer = Case([options], 1, strategy), composer_of(runner_of(SLOTS))
    composer.fill(case.contexts, case.rows, whole=True)
    assert case.contexts[0].outcome.recomputed
    assert not case.contexts[0].outcome.fused
    assert composer.fused_question.output(batch_of(case)) is None


@pytest.mark.parametrize("cut", [-1, 1], ids=["a chunk", "with answers"])
def test_only_whole_questions_without_answers_are_in_the_pass(cut: int) -> None:
    case, composer = Case([{"recompute": "all"}, {"recompute": "all"}], 2), composer_of(runner_of(SLOTS))
    case.rows[1] = case.rows[1][:-1] if cut < 0 else torch.cat((case.rows[1], case.rows[1][-1:]))
    composer.fill(case.contexts, case.rows, whole=True)
    assert not any(c.outcome.fused for c in case.contexts)
    assert composer.fused_question.output(batch_of(case)) is None


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("why", ["", "short load", "loading", "slots", "rows"])
def test_questions_alone_go_by_graph_only_where_that_pays(
    why: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks launch collectives besides, so for them a graph pays while much KV is loading, too."""
    runner, case = runner_of(SLOTS), Case([{}, {}], 3)
    if ranks > 1:
        runner.tp_group = SimpleNamespace(world_size=ranks, rank_in_group=0)
    most = max(c.slots for c in case.contexts)
    monkeypatch.setattr(fused_question, "SLOTS", -(-most // ranks) - (why == "slots"))
    keys = runner.token_to_kv_pool.get_key_buffer(0)
    loads = sum(c.slots for c in case.contexts) * 2 * keys[0].numel() * keys.itemsize
    monkeypatch.setattr(fused_question, "SHORT_LOAD", loads - (why == "loading"))
    rows = sum(c.question_tokens for c in case.contexts)
    graphs: Any = Graphs(runner, rows - 1 if why == "rows" else rows)
    with group(runner.tp_group):
        passes = fused_question.FusedQuestion(runner, graphs)
        passed = passes.run(case.contexts, case.rows, [None, None], loading="load" in why)
    assert (passed is not None) == (why in ("", "short load") or (why, ranks) == ("loading", 2))


@pytest.mark.parametrize("why", ["enable_lora", "split", "lm_head", "window", "cap", "dtype"])
def test_models_that_end_or_attend_another_way_extend_by_themselves(why: str) -> None:
    runner, case = runner_of(SLOTS), Case([{"recompute": "all"}], 4)
    attn = runner.model.model.layers[-1].self_attn.attn
    if why == "split":
        runner.model = SimpleNamespace(model=runner.model.model, lm_head=None, logits_processor=None)
    elif why == "lm_head":
        del runner.model.lm_head
    elif why == "window":
        attn.sliding_window_size = 128
    elif why == "cap":
        attn.logit_cap = 30.0
    elif why == "dtype":
        runner.dtype = torch.bfloat16
    else:
        setattr(runner.server_args, why, True)
    composer = composer_of(runner)
    composer.fill(case.contexts, case.rows, whole=True)
    assert not case.contexts[0].outcome.fused


def test_states_are_given_once_to_their_batch_and_no_other_pass_touches_them() -> None:
    runner, case = runner_of(SLOTS), Case([{"recompute": "all"}], 5)
    graphs = Graphs(runner, 400)
    composer, batch = composer_of(runner, graphs), batch_of(case)
    composer.fill(case.contexts, case.rows, whole=True)
    wanted = composer.fused_question.output(batch).logits_output
    assert composer.fused_question.output(batch) is None, "given once"

    composer.fill(case.contexts, case.rows, whole=True)
    graphs.replay([question_job(torch.tensor([1] * 60), 0, case.rows[0], torch.arange(500, 560))])
    torch.testing.assert_close(composer.fused_question.output(batch).logits_output, wanted)

    composer.fill(case.contexts, case.rows, whole=True)
    assert composer.fused_question.output(SimpleNamespace(input_ids=torch.zeros(99))) is None, "another batch"
    assert composer.fused_question.output(batch) is None

    composer.fill(case.contexts, case.rows, whole=True)
    composer.fused_question.drop()
    assert composer.fused_question.output(batch) is None, "the forward has failed"


def test_analyses_are_let_go_once_the_slots_are_filled() -> None:
    runner, case = runner_of(SLOTS), Case([{"recompute": "all"}], 5)
    (context,) = case.contexts
    context.analyses = {1: object(), 2: object()}  # type: ignore[dict-item]
    composer = composer_of(runner)
    composer.fill(case.contexts, case.rows)
    assert context.analyses == {}
    composer.fill(case.contexts, case.rows)
