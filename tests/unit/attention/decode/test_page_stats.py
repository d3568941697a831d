"""Page statistics through random lives of requests: prefill in chunks, decode, shared prefixes, pages freed
and used again.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_ext.attention.decode.page_stats import PageStatistics
from tests.conftest import EXHAUSTIVE

PAGE, PAGES, ROWS = 16, 24, 5


class Pool(RuleBasedStateMachine):
    """As SGLang does it: pages from a free list, a request's tokens in order in its pages, KV written before
    statistics are told.
    """

    def __init__(self) -> None:
        super().__init__()
        self.random = torch.Generator().manual_seed(0)
        slots = (PAGES + 1) * PAGE
        self.k = [torch.full((slots, 2, 64), torch.nan) for _ in range(2)]
        pool = SimpleNamespace(k_buffer=self.k, v_buffer=[torch.zeros_like(k) for k in self.k])
        self.table = torch.zeros(ROWS, PAGES * PAGE, dtype=torch.int32)
        self.statistics = PageStatistics(pool, self.table, PAGE, 4)
        self.free = list(range(1, PAGES + 1))
        self.live: dict[int, int] = {}  # row: tokens whose KV is written
        self.decoding: set[int] = set()
        self.cached: list[list[int]] = []  # full pages of a prefix that stays after its request
        self.borrowed: dict[int, list[int]] = {}

    def write(self, row: int, start: int, end: int) -> bool:
        """KV of tokens start to end, with fresh pages where they begin one; False where none is left."""
        wanted = -(-end // PAGE) - -(-start // PAGE)
        if wanted > len(self.free):
            return False
        for position in range(start, end):
            if position % PAGE == 0:
                page = self.free.pop(0)
                self.table[row, position : position + PAGE] = page * PAGE + torch.arange(
                    PAGE, dtype=torch.int32
                )
            for k in self.k:
                k[int(self.table[row, position])] = torch.randn(2, 64, generator=self.random)
        self.live[row] = end
        return True

    @precondition(lambda self: len(self.live) < ROWS)
    @rule(tokens=st.integers(1, 90), chunk=st.sampled_from([16, 32, 48, 1000]), share=st.booleans())
    def prefill(self, tokens: int, chunk: int, share: bool) -> None:
        row = next(r for r in range(ROWS) if r not in self.live)
        start = 0
        if share and self.cached:
            pages = self.cached[0]
            for i, page in enumerate(pages):
                self.table[row, i * PAGE : (i + 1) * PAGE] = page * PAGE + torch.arange(
                    PAGE, dtype=torch.int32
                )
            start = len(pages) * PAGE
            self.borrowed[row] = pages
        self.live[row] = start
        for at in range(start, start + tokens, chunk):
            if not self.write(row, at, min(at + chunk, start + tokens)):
                self.finish_row(row, keep=False)
                return
            self.statistics.after_extend([(row, at, self.live[row])])
        self.decoding.add(row)

    @precondition(lambda self: bool(self.decoding))
    @rule(steps=st.integers(1, 20), known=st.booleans())
    def decode(self, steps: int, known: bool) -> None:
        for _ in range(steps):
            rows = sorted(self.decoding)
            lens = torch.tensor([self.live[row] + 1 for row in rows])
            self.statistics.before_decode(torch.tensor(rows), lens, lens if known else None)
            for row in rows:
                if not self.write(row, self.live[row], self.live[row] + 1):
                    self.finish_row(row, keep=False)
            self.check()
            if not self.decoding:
                return

    @precondition(lambda self: bool(self.decoding))
    @rule(keep=st.booleans(), data=st.data())
    def finish(self, keep: bool, data: st.DataObject) -> None:
        self.finish_row(data.draw(st.sampled_from(sorted(self.decoding))), keep)

    def finish_row(self, row: int, keep: bool) -> None:
        tokens = self.live.pop(row)
        self.decoding.discard(row)
        self.statistics.after_request(row, tokens)
        pages = [int(self.table[row, i]) // PAGE for i in range(0, tokens, PAGE)]
        borrowed = self.borrowed.pop(row, [])
        own = pages[len(borrowed) :]
        if keep and not borrowed:
            full = pages[: tokens // PAGE]
            if full:
                self.cached.append(full)
            own = pages[len(full) :]
        self.free.extend(own)

    @precondition(lambda self: bool(self.cached) and not self.borrowed)
    @rule()
    def evict(self) -> None:
        self.free.extend(self.cached.pop(0))

    @invariant()
    def check(self) -> None:
        """Every full page but a request's newest token's, and every cached one, has the statistics of its
        keys.
        """
        pages = {page for prefix in self.cached for page in prefix}
        for row, tokens in self.live.items():
            full = tokens // PAGE if row not in self.decoding else max(0, tokens - 1) // PAGE
            pages |= {int(self.table[row, i * PAGE]) // PAGE for i in range(full)}
        assert self.statistics.differing(torch.tensor(sorted(pages), dtype=torch.int32)) == []


TestPool = Pool.TestCase
TestPool.settings = settings(stateful_step_count=50 if EXHAUSTIVE else 25)


def test_a_stale_page_is_found() -> None:
    k = [torch.randn(64, 1, 64) for _ in range(2)]
    pool = SimpleNamespace(k_buffer=k, v_buffer=[torch.zeros_like(x) for x in k])
    table = torch.arange(64, dtype=torch.int32)[None]
    statistics = PageStatistics(pool, table, PAGE, 4)
    statistics.after_extend([(0, 0, 64)])
    assert statistics.differing(torch.arange(4)) == []
    k[1][37] += 10
    assert statistics.differing(torch.arange(4)) == [2]
    assert statistics.differing(torch.arange(4)) == [2], "looking does not repair"


def test_a_logical_page_must_divide_the_page() -> None:
    pool = SimpleNamespace(k_buffer=[torch.zeros(64, 1, 64)], v_buffer=[torch.zeros(64, 1, 64)])
    with pytest.raises(ValueError, match="logical page has 12"):
        PageStatistics(pool, torch.zeros(1, 64, dtype=torch.int32), PAGE, 12)


@pytest.mark.gpu
def test_the_last_page_of_a_request_waits_for_the_step_that_fills_it() -> None:
    """As with the overlap scheduler: the request ends on one stream while the step that writes its last token
    runs on another.
    """
    k = [torch.randn(64, 1, 64, device="cuda") for _ in range(2)]
    pool = SimpleNamespace(k_buffer=k, v_buffer=[torch.zeros_like(x) for x in k])
    statistics = PageStatistics(pool, torch.arange(64, dtype=torch.int32, device="cuda")[None], PAGE, 4)
    statistics.after_extend([(0, 0, 64)])
    forwards = torch.cuda.Stream()
    forwards.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(forwards):
        torch.cuda._sleep(200_000_000)  # a tenth of a second
        for layer in k:
            layer[31] += 10
        statistics.follow()
    statistics.after_request(0, 32)
    statistics.settle()
    assert statistics.differing(torch.arange(4, device="cuda")) == []
