"""What a question attends to once it has read the anchors, against plain loops over the model."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sglang_ext.analysis.document_analysis import Analysis
from sglang_ext.context.compose.composer import filling_of
from sglang_ext.context.recompute import anchor_attention as module
from sglang_ext.context.recompute.anchor_attention import anchor_attention, mean_attention
from sglang_ext.context.recompute.question_attention import QuestionRows
from sglang_ext.context.selection.anchors import anchors_of
from sglang_ext.context.selection.recompute_rules import Kept
from sglang_ext.wire.protocol import ContextPlan, Span
from tests.unit.context.composed_cases import SLOTS, Case, composer_of
from tests.unit.context.small_model import DIM, HEADS, KV_HEADS, LAYERS, runner_of

GROUP = HEADS // KV_HEADS


@pytest.mark.parametrize(("rows", "n"), [(1, 1), (1, 63), (7, 7), (5, 111)])
@pytest.mark.parametrize("scores", [1, 2**26], ids=["row by row", "at once"])
def test_the_mean_is_over_rows_and_heads(
    rows: int, n: int, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SCORES", scores)
    draw = torch.Generator().manual_seed(n)
    q = torch.randn(rows, HEADS, DIM, generator=draw)
    keys = torch.randn(n, KV_HEADS, DIM, generator=draw)
    wanted = torch.zeros(n)
    for row in range(rows):
        seen = n - rows + row + 1
        for head in range(HEADS):
            weights = torch.stack([q[row, head] @ keys[j, head // GROUP] for j in range(seen)]) * 0.3
            wanted[:seen] += weights.softmax(0) / (rows * HEADS)
    found = mean_attention(q, keys, 0.3)
    torch.testing.assert_close(found, wanted)
    assert float(found.sum()) == pytest.approx(1)


def reference(
    runner: object,
    ids: list[int],
    at: int,
    slots: torch.Tensor,
    anchors: list[torch.Tensor],
    layers: list[int],
) -> torch.Tensor:
    """Attention of a question to each of ``slots``, summed over ``layers``; the question reads ``anchors``
    only. Row by row, head by head."""
    model, pool = runner.model.model, runner.token_to_kv_pool
    hidden = torch.stack([model.embed_tokens(token) for token in ids])
    positions = at + torch.arange(len(ids))
    found = torch.zeros(len(slots))
    for number, layer in enumerate(model.layers):
        q, k, v = (hidden @ projection for projection in layer._projections)
        q = q.view(-1, HEADS, DIM)
        k, v = (k + positions[:, None] / 100).view(-1, KV_HEADS, DIM), v.view(-1, KV_HEADS, DIM)
        out = torch.zeros(len(ids), HEADS, DIM)
        for row in range(len(ids)):
            for head in range(HEADS):
                own = slice(0, row + 1)
                keys = torch.cat((pool.get_key_buffer(number)[anchors[number]], k[own]))[:, head // GROUP]
                values = torch.cat((pool.get_value_buffer(number)[anchors[number]], v[own]))[:, head // GROUP]
                out[row, head] = (keys @ q[row, head] * DIM**-0.5).softmax(0) @ values
                if number in layers:
                    every = torch.cat((pool.get_key_buffer(number)[slots], k[own]))[:, head // GROUP]
                    weights = (every @ q[row, head] * DIM**-0.5).softmax(0)
                    found += weights[: len(slots)] / (len(ids) * HEADS * len(layers))
        hidden = hidden + out.flatten(1) @ layer._out
    return found


@pytest.mark.parametrize("layers", [[0], [1, 2]])
def test_questions_read_their_anchors_alone(layers: list[int]) -> None:
    runner = runner_of(200, seed=9)
    draw = torch.Generator().manual_seed(1)
    questions, anchors, wanted = [], [], []
    for n, ids in ((63, [3]), (40, [7, 1, 7, 30, 2])):
        slots = torch.randperm(200, generator=draw)[:n]
        own = [
            torch.cat((slots[:5], slots[torch.randperm(n, generator=draw)[:6]])).unique()
            for _ in range(LAYERS)
        ]
        question = QuestionRows(np.array(ids), n + 9, n + 9, 5, np.arange(n), slots, None)
        questions.append(question)
        anchors.append(own)
        by_slot = reference(runner, ids, n + 9, slots, own, layers)
        wanted.append(torch.cat((by_slot[5:], torch.zeros(9))))
    before = [buffer.clone() for buffer in runner.token_to_kv_pool.k_buffer]
    found = anchor_attention(runner, questions, anchors, layers)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want)
    together = zip(before, runner.token_to_kv_pool.k_buffer, strict=True)
    assert all(torch.equal(*both) for both in together), "nothing is written"


def analysis(n: int, block: int, seed: int) -> Analysis:
    """An analysis of which only the most attended tokens count; the last block has none."""
    draw = torch.Generator().manual_seed(seed)
    blocks = math.ceil(n / block)
    token = torch.randint(0, block, (LAYERS, blocks), generator=draw, dtype=torch.uint8)
    token[:, -1] = 0
    attention = torch.rand(LAYERS, blocks, generator=draw)
    attention[:, -1] = torch.inf
    nothing = torch.empty(0)
    return Analysis(
        n, block, 2, torch.empty(LAYERS, blocks, 0), *[nothing] * 3, token, attention, *[nothing] * 6
    )


@pytest.mark.parametrize("by_layer", [False, True], ids=["the same", "by layer"])
def test_anchors_are_the_system_text_beginnings_and_most_attended_tokens(by_layer: bool) -> None:
    plan = ContextPlan("compose", "n", "concat", (Span(0, 4), Span(4, 67), Span(67, 107)), {})
    analyses = [analysis(63, 8, 1), analysis(40, 16, 2)]
    kept = torch.arange(107)
    if by_layer:
        kept = torch.stack([torch.tensor([*range(4), *range(4 + i, 107 - 3 + i)]) for i in range(3)])
    found = anchors_of(Kept(plan, kept, analyses), LAYERS)
    for layer, places in enumerate(found):
        row = (kept[layer] if by_layer else kept).tolist()
        wanted = {0, 1, 2, 3, 4, 5, 6, 67, 68, 69}
        for start, own in ((4, analyses[0]), (67, analyses[1])):
            for block in range(own.blocks - 1):
                wanted.add(start + block * own.block + int(own.token[layer, block]))
        assert [row[i] for i in places.tolist()] == sorted(wanted & set(row))


def test_a_context_recomputes_what_its_question_finds_from_the_anchors() -> None:
    runner, layers = runner_of(SLOTS, 4), (1, 2)
    case = Case([{"recompute": "anchors", "share": 0.2}, {"recompute": "question", "share": 0.2}], 4)
    first, second = case.contexts
    first.critical_layers = layers
    first.analyses = {
        number: analysis(span.end - span.start, 8, number)
        for number, span in enumerate(first.plan.spans)
        if number
    }
    slots = case.rows[0][: first.slots]
    places = anchors_of(Kept(first.plan, first.selection.kept, first.in_order), LAYERS)
    composer = composer_of(runner)
    composer.gather([filling_of(c, row[: c.slots]) for c, row in zip(case.contexts, case.rows, strict=True)])
    by_slot = reference(
        runner, first.question.tolist(), first.question_at, slots, [slots[p] for p in places], layers
    )
    start = first.plan.spans[0].end
    count = max(1, round(0.2 * (first.plan.question_start - start)))
    wanted = start + by_slot[start:].topk(count).indices.sort().values
    composer.fill(case.contexts, case.rows)
    assert first.selection.recomputed.tolist() == wanted.tolist()
    assert first.outcome.recomputed == count
    assert second.outcome.recomputed > 0
