"""Slots of the pool that running requests hold, as the scheduler is asked for them."""

from __future__ import annotations

from types import SimpleNamespace

from sglang_ext.context.scheduler.slot_usage import SlotUsage
from sglang_ext.process.control import answer
from sglang_ext.ranks.ranks import Ranks


class Tree:
    """A pool of 100 slots of which some are free, and some of the others cached for nobody who runs."""

    def __init__(self) -> None:
        self.free, self.cached = 100, 0
        self.token_to_kv_pool_allocator = SimpleNamespace(size=100, available_size=lambda: self.free)

    def evictable_size(self) -> int:
        return self.cached


def test_the_most_since_somebody_asked() -> None:
    tree = Tree()
    slots = SlotUsage(tree)
    runtime = SimpleNamespace(slots=slots, ranks=Ranks())

    def asked() -> tuple[int, int, int]:
        found = answer(runtime, {"op": "slots"})["response"][0]
        return found["now"], found["most"], found["total"]

    assert asked() == (0, 0, 100)
    for tree.free, tree.cached in (
        (60, 0),
        (20, 30),
        (70, 30),
    ):  # 40, then 50 held; then all that is taken is cached
        slots.count()
    assert asked() == (0, 50, 100)
    assert asked() == (0, 0, 100)
    tree.free, tree.cached = 10, 60
    assert asked() == (30, 30, 100), "also what no forward pass has seen yet"
