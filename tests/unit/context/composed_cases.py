"""Composed requests over a small model, with documents and slots drawn from a seed."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from sglang_ext.context.compose import fused_question
from sglang_ext.context.compose.composer import Composer
from sglang_ext.context.compose.request import ComposedContext, DocumentOnDevice
from sglang_ext.context.selection.base import ModelShape
from sglang_ext.context.selection.strategies import partial_selection
from sglang_ext.documents.pages.stored_pages import StoredPages
from sglang_ext.documents.pages.types import KvShape
from sglang_ext.ranks.ranks import Ranks
from sglang_ext.tensors.buffers import PADDING_SLOT
from sglang_ext.tensors.rope import Rotation
from sglang_ext.wire.protocol import ContextPlan, Span
from tests.unit.context.small_model import DIM, KV_HEADS, LAYERS, VOCABULARY

SLOTS, SYSTEM = 600, 3
NO_PAGES = StoredPages(
    torch.empty(0, 2, LAYERS, KV_HEADS, 16, DIM), KvShape(LAYERS, KV_HEADS, DIM, torch.float32)
)
ROTATION = Rotation(torch.linspace(1, 0.1, DIM // 2), DIM, neox=True)


def composer_of(runner: Any, graphs: Any = None, ranks: Ranks | None = None) -> Composer:
    composer = Composer(runner, ROTATION, SimpleNamespace(pages=NO_PAGES), ranks)
    composer.graphs, composer.fused_question = graphs, fused_question.FusedQuestion(runner, graphs)
    return composer


def filled_in(options: dict[str, Any], end: int, draw: random.Random) -> dict[str, Any]:
    """Options with the results of their functions."""
    return {
        name: value(end, draw)
        if callable(value)
        else filled_in(value, end, draw)
        if isinstance(value, dict)
        else value
        for name, value in options.items()
    }


class Case:
    """Contexts over documents at drawn slots, and the slots of their own, the question's behind."""

    def __init__(self, options: Sequence[dict[str, Any]], seed: int, strategy: str = "concat") -> None:
        draw = random.Random(seed)
        free = draw.sample([slot for slot in range(SLOTS) if slot != PADDING_SLOT], SLOTS - 1)
        self.contexts, self.rows = [], []
        for each in options:
            ends = [SYSTEM, SYSTEM + draw.randint(1, 23), SYSTEM + 23 + draw.randint(1, 31)]
            spans = tuple(Span(a, b) for a, b in zip([0, *ends], ends, strict=False))
            question = draw.choice((1, 5, 17))
            ids = [draw.randrange(VOCABULARY) for _ in range(ends[-1] + question)]
            plan = ContextPlan("compose", "n", strategy, spans, filled_in(each, ends[-1], draw))
            context = ComposedContext(
                plan, array("q", ids), tuple(map(str, spans)), partial_selection(plan, ModelShape(LAYERS))
            )
            context.decided = context.partial.settle()
            context.located.sources = [
                DocumentOnDevice(torch.tensor([free.pop() for _ in range(s.end - s.start)]), None)
                for s in spans
            ]
            self.contexts.append(context)
            self.rows.append(torch.tensor([free.pop() for _ in range(context.slots + question)]))


def some(end: int, draw: random.Random) -> list[int]:
    return draw.sample(range(end), draw.randint(1, 11))


def holes(end: int, draw: random.Random) -> list[int]:
    return sorted(draw.sample(range(end), end // 2))


def assert_same_pools(one: Any, other: Any) -> None:
    for a, b in zip((*one.k_buffer, *one.v_buffer), (*other.k_buffer, *other.v_buffer), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
