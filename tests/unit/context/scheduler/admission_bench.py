"""SGLang's queue and pool around one composed request, for tests of its admission."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from sglang_ext.context.compose.request import ComposedContext, DocumentOnDevice
from sglang_ext.context.scheduler.admission import Admission
from sglang_ext.context.selection.strategies import ModelShape, partial_selection
from sglang_ext.ranks.ranks import Ranks
from sglang_ext.wire.protocol import ContextPlan, Span
from tests.unit import request_shapes

TOTAL = 12  # tokens of the context: system text and one document
QUESTION, ANSWER, PAGE = 3, 10, 4
HELD = 4  # tokens of a session's dialogue so far, all of the first span


class Offloading:
    """Takes contexts in host pages: those that ask for it, all or (``auto``) if the device is full."""

    def __init__(self) -> None:
        self.wanted: bool | str = False
        self.asked: list[int] = []
        self.held = False  # by others that are in no batch
        self.outcome: Any = None  # instead of SGLang's answer, and nothing is admitted
        self.documents: Any = None  # that hold contexts which are read there
        self.found: Any = None

    def reserve(self, req: Any, tokens: int, *, full: bool, find: Any) -> bool:
        self.asked.append(tokens)
        if self.documents is not None:
            self.found = find(self.documents, PAGE)
        return self.wanted is True or (self.wanted == "auto" and full)

    def may_find_room(self, req: Any, tokens: int) -> bool:
        return self.held

    def compose(self, adder: Any, req: Any, add: Any) -> tuple[Any, Any]:
        return (add(), "target") if self.outcome is None else (self.outcome, None)


class Documents:
    """On the host, all but those that are ``missing``."""

    pages = SimpleNamespace(shape=SimpleNamespace(block=16, bits=16))

    def __init__(self, *missing: str) -> None:
        self.missing, self.held = missing, 0
        self.leaving = False  # some that nobody reads any more are still kept

    def hold(self, wanted: Any) -> Any:
        if {each.key for each in wanted} & set(self.missing):
            return None
        self.held += len(wanted)
        return [np.arange(1)] * len(wanted)

    def let_go(self, keys: Any) -> None:
        self.held -= len(keys)


class Adder(SimpleNamespace):
    """SGLang's budget of a step, made anew for each."""


class Divided(Ranks):
    """Another rank lacks what this one has."""

    def all_agree(self, flag: bool) -> bool:
        return False


class Engine:
    """SGLang's queue, tree and allocator around one request, with ``free`` slots."""

    def __init__(
        self, free: int = 100, missing: list[int] | None = None, *, running: bool = False, **options: Any
    ) -> None:
        self.free, self.missing, self.counted = free, missing or [], []
        self.has_dialogue = True  # what the ranks have in common of it is enough
        self.lacks_room = False  # another context waits for it on the host
        self.loading, self.evictable, self.evicted = False, 0, 0
        self.retrieved: list[Any] = []
        session, ranks = options.pop("session", None), options.pop("ranks", Ranks())
        plan = ContextPlan(
            "compose",
            "n",
            options.pop("strategy", "concat"),
            (Span(0, 4), Span(4, TOTAL)),
            options,
            session=session,
        )
        partial = partial_selection(plan, ModelShape(2))
        self.context = ComposedContext(plan, array("q", range(TOTAL + QUESTION)), ("a", "b"), partial)
        self.context.decided = partial.settle()
        self.req: Any = request_shapes.request(
            ragserve=self.context,
            rid="r",
            origin_input_ids=array("q", [0] * (TOTAL + QUESTION)),
            output_ids=[],
            sampling_params=SimpleNamespace(max_new_tokens=ANSWER),
            to_finish=None,
            init_next_round_input=lambda tree: None,
        )
        batch = SimpleNamespace(is_empty=lambda: not running)
        self.adder: Any = Adder(
            can_run_list=[],
            running_batch=batch,
            rem_total_tokens=1000,
            log_hit_tokens=0,
            rem_input_tokens=100,
            rem_chunk_tokens=50,
            prefill_max_requests=None,
            budget_state=lambda: SimpleNamespace(name=f"{self.adder.rem_chunk_tokens} left"),
        )
        allocator = SimpleNamespace(alloc=self.alloc, free=self.give_back, available_size=lambda: self.free)
        tree: Any = SimpleNamespace(token_to_kv_pool_allocator=allocator, page_size=PAGE, evict=self.evict)
        tiers: Any = SimpleNamespace(
            count=lambda tier, n: self.counted.append((tier, n)),
            retrieved=lambda keys, namespace: self.retrieved.append(keys),
        )
        self.offloading = Offloading()
        attention = SimpleNamespace(requests=self.offloading)
        self.admission = Admission(
            tree,
            tiers,
            self,  # type: ignore[arg-type]
            None,  # type: ignore[arg-type]
            ranks,
            layers=2,
            attention=attention,
        )

    def alloc(self, count: int) -> torch.Tensor | None:
        if count > self.free:
            return None
        self.free -= count
        return torch.arange(count)

    def evict(self, params: Any) -> None:
        count = min(params.num_tokens, self.evictable)
        self.evicted += count
        self.free += count

    def give_back(self, slots: torch.Tensor) -> None:
        self.free += len(slots)

    def resolve(self, context: ComposedContext) -> list[int] | None:
        context.located.sources = [DocumentOnDevice(torch.arange(4), "node")] * (2 - len(self.missing))
        context.located.held = HELD if context.continues_session else 0
        return None if self.loading else self.missing

    def recount(self, context: ComposedContext) -> None:
        context.located.held, context.located.turns = HELD, []

    def forget_loads(self, context: ComposedContext) -> None:
        context.located.tickets.clear()

    def has_turns(self, context: ComposedContext, end: int) -> bool:
        return self.has_dialogue

    def unlock(self, context: ComposedContext) -> None:
        context.located.sources = []

    def admit(self, *, accepted: bool = True) -> str:
        def add() -> Any:
            if accepted:
                self.adder.can_run_list.append(self.req)
            return SimpleNamespace(name="added")

        return str(self.admission.admit(self.adder, self.req, add).name)
