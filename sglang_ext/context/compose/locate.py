"""Finds a composed request's documents on the device and on host, loads them from below, and locks them while
they are read.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from sglang_ext.context.compose.request import ComposedContext, DocumentOnDevice, DocumentOnHost
from sglang_ext.documents.session_pages import SessionPages
from sglang_ext.versions import matched_slots
from sglang_ext.wire.protocol import SessionPart, Span, composed_session_key

if TYPE_CHECKING:
    from sglang_ext.documents.radix import DocumentRadixCache
    from sglang_ext.documents.tier_store import TierStore

_LACKS_ROOM_S = 1.0  # a context that waits for a load asks again far sooner
_MAX_LOADS = 9  # of one block: requests that evict each other's host pages end as misses, not in a loop


class Locator:
    """Finds, locks and unlocks the sources of contexts. Per rank; scheduler thread only."""

    def __init__(
        self,
        tree: DocumentRadixCache,
        tiers: TierStore,
        is_removed: Callable[[str], bool],
        block: int,
        sessions: SessionPages | None = None,
    ) -> None:
        """``is_removed`` tells of a document key whether it was removed and only waits for its last reader.
        ``block``: tokens of a host page. ``sessions``: what the host has of sessions.
        """
        self._sessions = sessions
        self._tree = tree
        self._tiers = tiers
        self._is_removed = is_removed
        self._block = block
        self._short: tuple[ComposedContext, float] | None = None  # whose load last found no room, and when

    @property
    def lacks_room(self) -> bool:
        """True while a context waits for room on the host: others must not keep documents there for long."""
        return self._short is not None and time.monotonic() - self._short[1] < _LACKS_ROOM_S

    def resolve(self, context: ComposedContext) -> list[int] | None:
        """Find and lock every document. Returns the numbers of the spans that are in no tier; None while one
        is being loaded from disk.
        """
        self.unlock(context)
        missing: list[int] = []
        loading = False
        for i, (span, key) in enumerate(zip(context.plan.spans, context.keys, strict=True)):
            found: Any
            if i == 0 and context.continues_session and context.plan.session is not None:
                found = self._dialogue(context, context.plan.session)
            else:
                found = self._find(context, i, span, key)
            if found == "loading":
                loading = True
            elif found is None:
                missing.append(i)
            else:
                context.located.sources.append(found)
        if loading:  # others may turn out to be missing: all misses are reported at once
            context.located.waiting_since = context.located.waiting_since or time.perf_counter()
            return None
        if self._short is not None and self._short[0] is context:
            self._short = None  # it has found some, or gives up; others that wait will say so
        if not missing and context.located.waiting_since is not None:
            context.located.load_ms += (time.perf_counter() - context.located.waiting_since) * 1e3
            context.located.waiting_since = None
        return missing

    def _find(self, context: ComposedContext, number: int, span: Span, key: str) -> Any:
        """The locked source of one document; "loading" while it comes from disk; None if no tier has it."""
        if self._is_removed(key):
            return None
        device = self._on_device(context, span, key)
        if device is not None:
            parts, node = device
            found = DocumentOnDevice(parts[0] if len(parts) == 1 else torch.cat(parts), node)
            self._tree.inc_lock_ref(node)
            return found
        ids = context.ids_32[span.start : span.end]
        pages, looking = self._tiers.host_pages_or_look(key, ids, context.plan.owner(number))
        if pages is None:
            return "loading" if looking else None
        blocks = context.blocks(number, self._block)
        absent = blocks[pages[blocks] < 0].tolist()
        if not absent:
            self._tiers.pin(key)
            loaded = context.located.tickets.get(key)
            return DocumentOnHost(key, pages, "host" if loaded is None else loaded.tier)
        ticket = context.located.tickets.get(key)
        if ticket is not None:
            if not ticket.done():
                return None if ticket.late else "loading"
            if not ticket.ok:
                if ticket.reason != "no_room" or not self._fits_on_host(context):
                    return None
                self._short = context, time.monotonic()
        if ticket is None or ticket.ok:
            # A block is absent again if it was evicted before the request came to it.
            context.located.loads.update((key, block) for block in absent)
            if any(context.located.loads[key, block] > _MAX_LOADS for block in absent):
                return None
        context.located.tickets[key] = self._tiers.load(key, absent)
        return "loading"

    def recount(self, context: ComposedContext) -> None:
        """Note the tokens of the dialogue so far that the session's key has now, without locking them."""
        context.located.held, context.located.turns = 0, []
        if context.plan.session is not None:
            ids = context.ids[: context.new_start]
            key = composed_session_key(context.plan.session.key)
            context.located.held = int(self._tree.peek(ids, key))

    def _dialogue(self, context: ComposedContext, session: SessionPart) -> DocumentOnDevice | None:
        """The locked KV of the dialogue so far, as much as the session's key has on the device, and what the
        host has behind it as the context's turns; None where both are less than the plan needs. A page that
        is not full is missing from the tree.
        """
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        context.located.held, context.located.turns = 0, []
        key = composed_session_key(session.key)
        if self._is_removed(key):
            return None
        ids = RadixKey(context.ids[: context.new_start], extra_key=key)
        match = self._tree.match_prefix(MatchPrefixParams(key=ids))
        slots = matched_slots(self._tree, match)
        context.located.held = len(slots)
        if self._sessions is not None:
            ids = context.ids[: context.new_start]
            context.located.turns = self._sessions.find(key, ids, context.located.held)
            context.located.pinned_turns = [turn.name for turn in context.located.turns]
        if not self.has_turns(context, context.there):
            context.located.held = 0
            return None
        self._tree.inc_lock_ref(match.last_device_node)
        return DocumentOnDevice(slots, match.last_device_node)

    def has_turns(self, context: ComposedContext, end: int) -> bool:
        """Take of the turns on the host what lies before token ``end``, and tell whether the plan needs no
        more of the dialogue so far than is there then."""
        while context.located.turns and context.located.turns[-1].start >= end:
            turn = context.located.turns.pop()
            self._tiers.unpin(turn.name)
            context.located.pinned_turns.remove(turn.name)
        if context.located.turns:
            context.located.turns[-1] = replace(context.located.turns[-1], end=min(context.there, end))
        session = context.plan.session
        return session is None or context.there > session.held - self._tree.page_size

    def _on_device(self, context: ComposedContext, span: Span, key: str) -> Any:
        if context.place.below_device:
            return None
        return self._tree.document(context.ids[span.start : span.end], key)

    def _fits_on_host(self, context: ComposedContext) -> bool:
        """Tell whether the host tier can hold all blocks that the request needs from it. If so, other
        requests hold the pages that it lacks now, and give them back as soon as they are filled."""
        wanted = sum(
            len(context.blocks(number, self._block))
            for number, (span, key) in enumerate(zip(context.plan.spans, context.keys, strict=True))
            if not (context.continues_session and number == 0)
            if self._on_device(context, span, key) is None
        )
        if wanted <= self._tiers.host_limit:
            return True
        self._tiers.fault(
            "no_room",
            f"a request needs {wanted} pages of documents on the host at once, which holds "
            f"{self._tiers.host_limit}: raise kv_host_bytes, or keep less of each document",
        )
        return False

    def forget_loads(self, context: ComposedContext) -> None:
        """Forget the loads from disk of a request that has found everything."""
        context.located.tickets.clear()
        context.located.loads.clear()

    def unlock_device(self, context: ComposedContext) -> list[str]:
        """Unlock and forget the sources on the device, and forget the others. Return the keys of the host
        pages that stay pinned."""
        located = context.located
        pinned = [each.key for each in located.sources if not isinstance(each, DocumentOnDevice)]
        pinned += located.pinned_turns
        located.sources = [each for each in located.sources if isinstance(each, DocumentOnDevice)]
        located.pinned_turns = []
        self.unlock(context)
        return pinned

    def unlock(self, context: ComposedContext) -> None:
        """Unlock and forget the sources, and unpin the turns on the host."""
        while context.located.pinned_turns:
            self._tiers.unpin(context.located.pinned_turns.pop())
        while context.located.sources:
            source = context.located.sources.pop()
            if isinstance(source, DocumentOnDevice):
                self._tree.dec_lock_ref(source.node)
            else:
                self._tiers.unpin(source.key)
