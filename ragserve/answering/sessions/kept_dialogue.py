"""What the server keeps of a session."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from ragserve.answering.prompt import Message
from ragserve.answering.results import RetrievedPassage
from ragserve.answering.sessions.past_turns import PastTurn, ids_of
from ragserve.strategy_spec import StrategySpec
from sglang_ext.wire.protocol import session_key


@dataclass(eq=False)
class Dialogue:
    """A session. ``owner``: id of the API key that began it, not its secret. ``budget``: most tokens of the
    turns before the last; 0 for all. ``exact``: its first turns whose KV is exact, computed anew in one
    piece; ``keys``: those that KV of it may lie under. ``namespace``: the one that it is about, or the joint
    name of several. ``namespaces_made_at``: when each was made, Unix seconds; without one that was not there
    when the session began."""

    id: str
    owner: str
    namespace: str
    budget: int = 0
    created_at: float = field(default_factory=time.time)
    used_at: float = field(default_factory=time.time)
    past: list[PastTurn] = field(default_factory=list)
    prompts: list[tuple[PastTurn, ...]] = field(default_factory=list)  # see `turn_attention.AskedPrompts`
    messages: list[Message] = field(default_factory=list)
    turns: int = 0
    system: str | None = None
    named: StrategySpec | None = None  # as the first request asked for it
    spec: StrategySpec | None = None  # that answers, where `auto` has chosen one
    exact: int = 0
    keys: set[str] = field(default_factory=set)
    outdated: str | None = None  # why it cannot go on; its texts are gone then
    namespaces_made_at: dict[str, float] = field(default_factory=dict)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def key(self) -> str:
        """SGLang's extra key of its KV. Nobody but the server knows it: it holds the id."""
        return self.key_with(self.exact)

    def key_with(self, exact: int) -> str:
        """The key with so many exact turns. Each has its own, so that none finds what was composed before."""
        return session_key(self.namespace, f"{self.id}-{exact}" if exact else self.id)

    @property
    def ids(self) -> list[int]:
        """Token ids of all turns."""
        return ids_of(self.past)

    @property
    def passages(self) -> list[RetrievedPassage]:
        """Passages that the turns brought."""
        return [passage for turn in self.past for passage in turn.passages]

    def end(self, reason: str) -> None:
        """Forget all texts; the next request is told the reason."""
        self.outdated = reason
        self.past, self.prompts, self.messages = [], [], []
