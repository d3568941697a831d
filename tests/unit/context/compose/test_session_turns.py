"""A later turn of a session: what its key holds stays as it is, what it lacks is computed, and the new
documents are composed behind it.
"""

from __future__ import annotations

import random
from array import array
from itertools import pairwise
from typing import Any

import pytest
import torch

from sglang_ext.context.compose.request import ComposedContext, DocumentOnDevice, report_of
from sglang_ext.context.selection.base import ModelShape
from sglang_ext.context.selection.strategies import partial_selection
from sglang_ext.tensors.buffers import PADDING_SLOT
from sglang_ext.wire.protocol import ContextPlan, SessionPart, Span, session_key
from tests.unit.context.composed_cases import SLOTS, composer_of
from tests.unit.context.small_model import LAYERS, VOCABULARY, runner_of

BEFORE, DOCUMENTS, QUESTION = 40, (9, 17), 5
END = BEFORE + sum(DOCUMENTS)
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "nothing": ("concat", {}),
    "all": ("concat", {"recompute": "all"}),
    "first": ("epic", {"first": 4}),
    "by attention": ("concat", {"recompute": "question", "share": 0.3}),
    "by deviation": ("cacheblend", {"share": 0.5}),
    "blended": ("concat", {"recompute": "all", "update": "fusion"}),
}


class Dialogue:
    """One prompt of two turns: all of it computed at drawn slots, for a turn to begin with the first ones."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        free = draw.sample([slot for slot in range(SLOTS) if slot != PADDING_SLOT], SLOTS - 1)
        self.ids = [draw.randrange(VOCABULARY) for _ in range(END + QUESTION)]
        self.runner = runner_of(SLOTS, seed)
        self.documents = [torch.tensor([free.pop() for _ in range(n)]) for n in DOCUMENTS]
        self.whole, self.row = (torch.tensor([free.pop() for _ in range(END + QUESTION)]) for _ in range(2))
        plan = ContextPlan("compose", "n", "concat", (Span(0, END),), {"recompute": "all"})
        self.composer = composer_of(self.runner)
        everything = self.context(plan)
        everything.located.sources = [DocumentOnDevice(self.whole[:END].clone(), None)]
        self.composer.fill([everything], [self.whole])

    def context(self, plan: ContextPlan) -> ComposedContext:
        partial = partial_selection(plan, ModelShape(LAYERS))
        context = ComposedContext(plan, array("q", self.ids), ("k",) * len(plan.spans), partial)
        context.decided = partial.settle()
        return context

    def turn(self, held: int, strategy: str, options: dict[str, Any]) -> ComposedContext:
        """The second turn, whose key holds the first ``held`` tokens of the dialogue."""
        bounds = (0, BEFORE, BEFORE + DOCUMENTS[0], END)
        spans = tuple(Span(a, b) for a, b in pairwise(bounds))
        session = SessionPart(session_key("n", "s"), 20)
        context = self.context(ContextPlan("compose", "n", strategy, spans, options, session=session))
        context.located.held = held
        self.row = torch.cat((self.whole[:held], self.row[held:]))
        context.located.sources = [
            DocumentOnDevice(self.whole[:held], None),
            *(DocumentOnDevice(slots, None) for slots in self.documents),
        ]
        return context

    def kv(self, slots: torch.Tensor) -> torch.Tensor:
        pool = self.runner.token_to_kv_pool
        return torch.stack([layer[slots] for layer in (*pool.k_buffer, *pool.v_buffer)])


@pytest.mark.parametrize("held", [BEFORE, BEFORE - 1, 25])
@pytest.mark.parametrize("step", ["whole", "beside others", "in chunks"])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_dialogue_is_as_if_nothing_had_been_evicted(name: str, step: str, held: int) -> None:
    dialogue = Dialogue(seed=held)
    wanted, kept = dialogue.kv(dialogue.whole).clone(), dialogue.kv(dialogue.whole[:held]).clone()
    context = dialogue.turn(held, *OPTIONS[name])
    row = dialogue.row[: END + 2] if step == "in chunks" else dialogue.row  # slots of the question by now
    dialogue.composer.fill([context], [row], whole=step == "whole")
    got = dialogue.kv(dialogue.row)
    torch.testing.assert_close(dialogue.kv(dialogue.whole[:held]), kept, rtol=0, atol=0)
    torch.testing.assert_close(got[:, :BEFORE], wanted[:, :BEFORE], rtol=1e-4, atol=1e-4)
    same = torch.isclose(got[:, BEFORE:END], wanted[:, BEFORE:END], rtol=1e-4, atol=1e-4)
    assert bool(same.all()) == (name == "all"), "documents are exact where all of them is computed again"
    report = report_of(context)
    assert (report.session_held, report.session_computed) == (held, BEFORE - held)
    assert report.document_tokens == sum(DOCUMENTS) == report.kept
    if name == "all":
        assert report.recomputed == sum(DOCUMENTS)


@pytest.mark.parametrize("name", [*OPTIONS, "random"])
@pytest.mark.parametrize("held", [BEFORE, 25])
def test_a_turn_without_new_documents_computes_what_is_not_held(held: int, name: str) -> None:
    dialogue = Dialogue(seed=7)
    wanted = dialogue.kv(dialogue.whole[:END]).clone()
    session = SessionPart(session_key("n", "s"), 20)
    strategy, options = OPTIONS.get(name, ("random", {}))
    plan = ContextPlan("compose", "n", strategy, (Span(0, END),), options, session=session)
    context = dialogue.context(plan)
    context.located.held, context.located.sources = held, [DocumentOnDevice(dialogue.whole[:held], None)]
    row = torch.cat((dialogue.whole[:held], dialogue.row[held:]))
    dialogue.composer.fill([context], [row])
    torch.testing.assert_close(dialogue.kv(row[:END]), wanted, rtol=1e-4, atol=1e-4)
    assert context.recompute_rows(LAYERS) == END - held


def test_what_is_held_is_not_written_again() -> None:
    """Others may read it at the same time, and what the first turn has recomputed stays as it was."""
    dialogue = Dialogue(seed=3)
    pool = dialogue.runner.token_to_kv_pool
    for layer in (*pool.k_buffer, *pool.v_buffer):
        layer[dialogue.whole[:BEFORE]] = 0.5  # what no pass would compute
    context = dialogue.turn(BEFORE, "concat", {"recompute": "all"})
    dialogue.composer.fill([context], [dialogue.row])
    assert bool((dialogue.kv(dialogue.row[:BEFORE]) == 0.5).all())
    assert context.recompute_rows(LAYERS) == context.outcome.recomputed == sum(DOCUMENTS)
