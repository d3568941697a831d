"""A context composed on host pages in pieces is the one that its slots would hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.context.compose.composer import filling_of
from sglang_ext.context.compose.gather import Gather
from sglang_ext.context.compose.host_fill import gather_to_host
from tests.unit.context.composed_cases import NO_PAGES, ROTATION, SLOTS, Case
from tests.unit.context.small_model import DIM, KV_HEADS, LAYERS

PAGE = 16


class Target:
    """Takes whole pages, in pieces of ``piece`` tokens, whose buffers are another piece's afterwards."""

    def __init__(self, tokens: int, piece: int) -> None:
        self.tokens, self.piece = tokens, piece
        self.k, self.v = ([torch.zeros(tokens, KV_HEADS, DIM) for _ in range(LAYERS)] for _ in range(2))
        self.largest = 0
        self.is_there = False

    def write(self, first: int, k: Any, v: Any) -> None:
        self.largest = max(self.largest, len(k[0]))
        for mine, given in zip((*self.k, *self.v), (*k, *v), strict=True):
            mine[first : first + len(given)] = given


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("piece", [PAGE, 2 * PAGE, 64 * PAGE])
def test_pieces_are_the_whole(seed: int, piece: int) -> None:
    torch.manual_seed(seed)
    k, v = ([torch.randn(SLOTS, KV_HEADS, DIM) for _ in range(LAYERS)] for _ in range(2))
    pool = SimpleNamespace(
        k_buffer=k,
        v_buffer=v,
        layer_num=LAYERS,
        get_key_buffer=k.__getitem__,
        get_value_buffer=v.__getitem__,
    )
    gather = Gather(pool, ROTATION, NO_PAGES)
    case = Case([{}], seed)
    context, row = case.contexts[0], case.rows[0][: case.contexts[0].slots]
    filling = filling_of(context, row)
    before = [each.clone() for each in (*k, *v)]
    gather([filling])
    whole = [each[row] for each in (*k, *v)]
    for mine, was in zip((*k, *v), before, strict=True):
        mine.copy_(was)
    end = len(row) // PAGE * PAGE
    target = Target(end, piece)
    gather_to_host(gather, pool, filling, target)
    for mine, kept, was, wanted in zip((*k, *v), (*target.k, *target.v), before, whole, strict=True):
        assert torch.equal(kept, wanted[:end])
        assert torch.equal(mine[row[end:]], wanted[end:]), "what fills no page has slots"
        assert torch.equal(mine[row[:end]], was[row[:end]]), "and the rest needs none"
    assert target.largest == min(piece, end)
