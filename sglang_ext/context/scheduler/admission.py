"""Admission of composed requests: lock their documents and reserve their slots, or let them wait."""

from __future__ import annotations

import json
import time
import weakref
from collections import Counter
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import torch

from sglang_ext.context.compose.host_context import context_on_host
from sglang_ext.context.compose.locate import Locator
from sglang_ext.context.compose.request import ComposedContext, DocumentOnDevice, tier_of
from sglang_ext.context.scheduler import sglang_req
from sglang_ext.context.scheduler.selection_stage import SelectionStage, absent, present
from sglang_ext.kv_offload.base import ContextOffload, SparseDecoding
from sglang_ext.kv_offload.documents.context_pages import ContextPages
from sglang_ext.kv_offload.documents.host_documents import HostDocuments
from sglang_ext.ranks.ranks import Ranks
from sglang_ext.sglang_internals import sglang_requests
from sglang_ext.stages import stages
from sglang_ext.versions import prefix_shown, restore_prefix, show_prefix
from sglang_ext.wire.protocol import MISSING_PREFIX

if TYPE_CHECKING:
    from sglang_ext.documents.radix import DocumentRadixCache
    from sglang_ext.documents.tier_store import TierStore

_POLL_S = 0.0005  # between two looks at a load, when the scheduler has nothing else to do
_EVICTED = (
    "ragserve: the request was retracted to make room, and its documents were evicted meanwhile: "
    "ask again, or give the cache more memory"
)


class Decision(Enum):
    """Outcome for a request that SGLang wants to admit."""

    READY = auto()  # documents locked, slots reserved
    ON_HOST = auto()  # documents locked, host pages reserved
    WAIT = auto()  # for its selection, or for a load from disk
    MISSING = auto()  # some documents are in no tier
    NO_ROOM = auto()  # the pool cannot give it its slots now
    FAILED = auto()  # a stage of it has failed, on some rank
    NEXT_STEP = auto()  # other requests have taken this step's token budget


_VOTES = (Decision.FAILED, Decision.WAIT, Decision.READY)  # the first of any rank decides


class Admission:
    """Decides on composed requests, all or nothing. Per rank; scheduler thread only."""

    def __init__(
        self,
        tree: DocumentRadixCache,
        tiers: TierStore,
        locator: Locator,
        stage: SelectionStage,
        ranks: Ranks,
        *,
        layers: int,
        attention: SparseDecoding | None = None,
    ) -> None:
        """``layers``: those of the model. ``attention``: sparse decoding's `DecodeRuntime`, None where it is
        off."""
        self._layers = layers
        self._attention = attention
        self._tree = tree
        self._allocator = tree.token_to_kv_pool_allocator
        self._tiers = tiers
        self._locator = locator
        self._stage = stage
        self._ranks = ranks
        self._paused: Callable[[], Any] = lambda: None  # the step that has had its pause

    def admit(self, adder: Any, req: Any, add: Callable[[], Any]) -> Any:
        """Run around `PrefillAdder.add_one_req`; ``add`` calls the original."""
        context: ComposedContext = req.ragserve
        if req.to_finish is not None:  # it has failed, and was retracted before it could be reported
            self._stage.drop(context)
            return self._end(req, add, req.to_finish.message, HTTPStatus(req.to_finish.status_code or 500))
        result = stages.run("admission", context.fail, self._admit, adder, req, context, add)
        if result is not None and context.failure is None:
            return result
        self._locator.unlock(context)
        message = f"ragserve: {context.failure}"
        return self._end(req, add, message, HTTPStatus.INTERNAL_SERVER_ERROR)

    def _admit(self, adder: Any, req: Any, context: ComposedContext, add: Callable[[], Any]) -> Any:
        """Return SGLang's result for the request; None if a stage of it has failed."""
        from sglang.srt.managers.schedule_policy import AddReqResult

        decision, slots = self._decide(adder, req, context)
        if slots is not None:
            with stages.together():
                return self._add(adder, req, context, slots, add)
        if decision is Decision.ON_HOST:
            with stages.together():
                result = self._add_on_host(adder, req, context, add)
            if context.place.on_host is not None:
                return result
            if result is not AddReqResult.NO_TOKEN:
                self._locator.unlock(context)
                return result
            decision = Decision.NO_ROOM
        locks_device = any(isinstance(source, DocumentOnDevice) for source in context.documents)
        self._locator.unlock(context)
        if decision is Decision.FAILED:
            return None
        if decision is Decision.WAIT:
            return self._later(adder)
        if decision is Decision.NEXT_STEP:
            return AddReqResult.OTHER
        if decision is Decision.MISSING:
            self._tiers.count(None, len(context.missing))
            if req.output_ids:  # SGLang took it back in the middle of its answer
                return self._end(req, add, _EVICTED, HTTPStatus.SERVICE_UNAVAILABLE)
            return self._end(req, add, MISSING_PREFIX + json.dumps(context.missing))
        if adder.can_run_list or not adder.running_batch.is_empty():
            return AddReqResult.NO_TOKEN
        if locks_device:  # its own documents are in its way: taken from host they hold no slots
            context.place.below_device = True
            return AddReqResult.CONTINUE
        if self._waits_for_host(req, context):
            return self._later(adder)
        # Nothing will ever free memory for it: an error is better than a queue that hangs.
        return self._end(
            req,
            add,
            f"ragserve: the context takes {context.slots} KV slots, more than the pool can give apart "
            "from the question and the answer: keep less, ask for fewer tokens, or raise max_total_tokens; "
            "offloaded decoding needs room for its resident blocks there, and for the context in "
            "kv_offload_bytes, or for its documents in half of kv_host_bytes and for its pages in "
            "kv_offload_tokens",
        )

    def _decide(self, adder: Any, req: Any, context: ComposedContext) -> tuple[Decision, torch.Tensor | None]:
        """Return the decision, the same on every rank, and the reserved slots, int64, if it is READY."""
        if context.failure is not None:
            return Decision.FAILED, None
        if context.decided is None:
            return (Decision.MISSING if context.missing else Decision.WAIT), None
        sglang_req.shrink(req, context, self._tree)
        if context.continues_session:
            self._locator.recount(context)
        if self._step_is_full(adder, context):
            return Decision.NEXT_STEP, None
        missing = stages.run("load", context.fail, self._locator.resolve, context)
        vote = Decision.WAIT if missing is None else Decision.READY
        there = present(missing or [], len(context.keys))
        found, end, *there = self._ranks.min_votes(
            [_VOTES.index(Decision.FAILED if context.failure else vote), context.there, *there]
        )
        if _VOTES[found] is Decision.FAILED:
            context.fail(stages.ELSEWHERE)
        if _VOTES[found] is not Decision.READY:
            return _VOTES[found], None
        context.lack(absent(there))
        if context.continues_session and not self._locator.has_turns(context, end) and not context.missing:
            context.lack([0])  # another rank's host has given up some of the dialogue
        if context.missing:
            return Decision.MISSING, None
        with stages.together():  # they have voted: one that fails alone would leave them with other requests
            return self._room(adder, req, context)

    def _room(self, adder: Any, req: Any, context: ComposedContext) -> tuple[Decision, torch.Tensor | None]:
        """Reserve host pages or slots, alike on every rank. Results as of `_decide`."""
        context.place.on_host, context.place.awaits_host = None, False
        if self._goes_to_host(req, context, full=False):
            return Decision.ON_HOST, None
        slots = self._reserve(adder, req, context.slots, context.located.held)
        if slots is None and self._goes_to_host(req, context, full=True):
            return Decision.ON_HOST, None
        return (Decision.NO_ROOM if slots is None else Decision.READY), slots

    def _goes_to_host(self, req: Any, context: ComposedContext, *, full: bool) -> bool:
        """True if host pages have been reserved for the context: one that keeps the same tokens in all layers
        and recomputes none, because a pass that recomputes reads all of it on the device."""
        offloading = self._offloading(context)
        find = partial(self._in_documents, context)
        return offloading is not None and offloading.reserve(req, context.slots, full=full, find=find)

    def _in_documents(
        self, context: ComposedContext, documents: HostDocuments, page_size: int
    ) -> ContextPages | None:
        """The context where its documents lie on the host, held there; None unless all ranks have it all, and
        nobody waits for room there. `ContextPlace.awaits_host` says whether that may change by itself."""
        found, passes = None, self._locator.lacks_room
        if not passes:
            found = stages.run("load", stages.nobody, context_on_host, context, documents, page_size)
            passes = found is None and documents.leaving
        if not self._ranks.all_agree(found is not None):
            context.place.awaits_host = not self._ranks.all_agree(not passes)
            if found is not None:
                found.release()
            return None
        return found

    def _waits_for_host(self, req: Any, context: ComposedContext) -> bool:
        """True if requests behind it in the queue will free the host pages that it lacks, or others have just
        let go of documents that are in the way of its own."""
        offloading = self._offloading(context)
        if offloading is None:
            return False
        return context.place.awaits_host or offloading.may_find_room(req, context.slots)

    def _offloading(self, context: ComposedContext) -> ContextOffload | None:
        """What composes contexts on the host; None if it cannot take this one."""
        offloading = None if self._attention is None else self._attention.requests
        if context.plan.session is not None or not context.selection.is_copied:
            return None
        return offloading

    def _add_on_host(self, adder: Any, req: Any, context: ComposedContext, add: Callable[[], Any]) -> Any:
        """Admit the request with resident blocks, its context being written to host pages;
        `ContextPlace.on_host` is None if SGLang declines."""
        offloading = self._offloading(context)
        if offloading is None:
            raise RuntimeError("a context that is to be offloaded has lost what offloads it")
        context.admit()
        req.already_computed, req._cache_breakdown_computed = context.slots, True
        hits = adder.log_hit_tokens
        result, context.place.on_host = offloading.compose(adder, req, add)
        if context.place.on_host is not None:
            self._admitted(adder, req, context, hits)
        return result

    def _add(
        self, adder: Any, req: Any, context: ComposedContext, slots: torch.Tensor, add: Callable[[], Any]
    ) -> Any:
        """Admit the request with its slots as a prefix; give everything back if SGLang declines."""
        before, hits, admitted = prefix_shown(req), adder.log_hit_tokens, False
        try:
            self._show(req, context, slots)
            rows = context.recompute_rows(self._layers)
            result = add()
            admitted = bool(adder.can_run_list) and adder.can_run_list[-1] is req
        finally:
            if not admitted:
                restore_prefix(req, before)
                self._release(context, slots)
        if not admitted:
            return result
        self._admitted(adder, req, context, hits)
        if rows:
            adder.rem_input_tokens -= rows
            if adder.rem_chunk_tokens is not None:
                adder.rem_chunk_tokens -= rows
            return adder.budget_state()
        return result

    def _show(self, req: Any, context: ComposedContext, slots: torch.Tensor) -> None:
        """Let SGLang find the slots as the request's prefix."""
        prefix, node = slots[: context.slots - context.located.held], None
        if context.continues_session and isinstance(context.located.sources[0], DocumentOnDevice):
            # SGLang locks the node for the request, and frees none of its slots at the end
            dialogue = context.located.sources[0]
            prefix, node = torch.cat((dialogue.slots, prefix)), dialogue.node
        show_prefix(req, prefix, node, context.located.held)
        # composed tokens are no prefix hits, neither in the sum nor by tier; those of a session are
        req.already_computed = context.slots - context.there
        req._cache_breakdown_computed = True
        context.admit()

    def _admitted(self, adder: Any, req: Any, context: ComposedContext, hits: int) -> None:
        adder.log_hit_tokens = hits
        self._locator.forget_loads(context)
        stages.run("accounting", stages.ending([req]), self._account, context)

    def _account(self, context: ComposedContext) -> None:
        for tier, documents in Counter(map(tier_of, context.documents)).items():
            self._tiers.count(tier, documents)
        keys: dict[str, list[str]] = {}
        for number, key in enumerate(context.keys):
            if number or not context.continues_session:  # a dialogue so far is no document
                keys.setdefault(context.plan.owner(number), []).append(key)
        for namespace, own in keys.items():
            self._tiers.retrieved(own, namespace)

    def _step_is_full(self, adder: Any, context: ComposedContext) -> bool:
        """True if the request has to wait for a step with more of its token budget left: SGLang would decline
        it, or it recomputes more than that. A step takes one request of any size.
        """
        admitted, most, left = len(adder.can_run_list), adder.prefill_max_requests, adder.rem_input_tokens
        if adder.rem_chunk_tokens is not None:
            if adder.rem_chunk_tokens < self._tree.page_size:
                return True
            left = min(left, adder.rem_chunk_tokens)
        if most is not None and admitted >= most:
            return True
        rows = context.recompute_rows(self._layers)
        return bool(rows and admitted) and rows + context.question_tokens > left

    def _end(
        self,
        req: Any,
        add: Callable[[], Any],
        message: str,
        status: HTTPStatus = HTTPStatus.BAD_REQUEST,
    ) -> Any:
        """End the request with an error; SGLang admits it once more to report that."""
        sglang_requests.end(req, message, status)
        req.init_next_round_input(self._tree)
        return add()

    def _later(self, adder: Any) -> Any:
        """Leave the request in the queue.

        With nothing else to do the scheduler would ask again at once, and threads that load would get
        Python's lock only after its switch interval, for each of their steps. So each step has one pause,
        however many requests wait.
        """
        from sglang.srt.managers.schedule_policy import AddReqResult

        if not adder.can_run_list and adder.running_batch.is_empty() and self._paused() is not adder:
            self._paused = weakref.ref(adder)
            time.sleep(_POLL_S)
        return AddReqResult.CONTINUE

    def _reserve(self, adder: Any, req: Any, count: int, held: int) -> torch.Tensor | None:
        """Slots int64 for ``count`` tokens without the first ``held``, in whole pages, evicting from the tree
        if that helps; None if they do not fit, or if SGLang would find no room for the rest of the prompt and
        the answer beside them.
        """
        from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

        page, made = self._tree.page_size, len(req.output_ids)
        wanted = -(-(count - held) // page) * page
        rest = len(req.origin_input_ids) + made - count
        answer = min(max(req.sampling_params.max_new_tokens - made, 0), CLIP_MAX_NEW_TOKENS)
        if wanted + rest + answer + page >= adder.rem_total_tokens:
            return None
        if self._allocator.available_size() < wanted:
            from sglang.srt.mem_cache.base_prefix_cache import EvictParams

            self._tree.evict(EvictParams(num_tokens=wanted - self._allocator.available_size()))
        slots: torch.Tensor | None = self._allocator.alloc(wanted)
        return slots

    def _release(self, context: ComposedContext, slots: torch.Tensor) -> None:
        self._allocator.free(slots)
        self._locator.unlock(context)
