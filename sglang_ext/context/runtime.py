"""The scheduler's side of composed contexts: from a plan on a request to filled slots. One object per scheduler process.

Every method runs on the scheduler's thread; :meth:`before_forward` on the stream of the forward pass. SGLang is reached through the hooks
in `sglang_ext.hooks` only.
"""

from __future__ import annotations

import json
import logging
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import numpy as np
import torch

from sglang_ext.context.clock import StageClock
from sglang_ext.context.composer import ComposedContext, Composer, DeviceSource, HostSource, report_of, tier_of
from sglang_ext.context.metrics import context_metrics
from sglang_ext.context.resident import DeviceDocuments
from sglang_ext.context.rope import UnsupportedRope, rotation_of
from sglang_ext.context.strategies import select
from sglang_ext.protocol import MISSING_PREFIX, PLAN_FIELD, ContextPlan, PlanError, Span, document_key

log = logging.getLogger(__name__)
_LOST = (
    "ragserve: the request was taken back to make room, and its documents were evicted meanwhile: ask again, or give the cache more memory"
)
_MAX_RELOADS = 8  # requests that take each other's host pages in turns would load for ever; a miss ends that


@dataclass(frozen=True, slots=True)
class DocumentRequest:
    """State of a request whose KV is a document's."""

    key: str
    namespace: str
    ids: array[int]


class ContextRuntime:
    """Admission, composition and release of composed requests; the document tiers of one rank."""

    def __init__(self, *, model_runner: Any, tree: Any, tiers: Any, fingerprint: str, block: int, tp_group: Any = None) -> None:
        self.tree = tree
        self.tiers = tiers
        self.fingerprint = fingerprint
        self._runner = model_runner
        self._allocator = tree.token_to_kv_pool_allocator
        self._page = tree.page_size
        self._block = block
        self._tp_group = tp_group
        self._device = torch.device(model_runner.device)
        self._layers = model_runner.token_to_kv_pool.layer_num
        # Positions of row r of the request table are this far ahead of its slots: 0 for plain requests, written each time a row is taken.
        self._delta = torch.zeros(tree.req_to_token_pool.req_to_token.shape[0], dtype=torch.int64, device=self._device)
        self._held: list[tuple[Any, list[ComposedContext]]] = []  # (event, contexts) whose host pages a running copy still reads
        self._clock: StageClock | None = None  # of the batch whose forward pass is being run
        self.documents = DeviceDocuments(model_runner, tree, tiers)
        self._composer: Composer | None = None
        self.unsupported: str | None = None
        try:
            self._composer = Composer(model_runner, rotation_of(model_runner.model), tiers, block)
        except UnsupportedRope as error:
            self.unsupported = str(error)
            log.warning("composed contexts are off: %s", error)
        tree.is_composed = is_composed
        tree.on_document = self._keep_document
        tree.on_finished = self.documents.request_ended

    # a request arrives

    def on_request(self, req: Any) -> None:
        """Read the plan of a new request. A bad plan ends the request with its reason; it never raises: that would end the scheduler."""
        params = req.sampling_params.custom_params
        text = params.get(PLAN_FIELD) if isinstance(params, dict) else None
        if text is None:
            self.documents.exact_request(req)
            return
        try:
            plan = ContextPlan.from_json(str(text), len(req.origin_input_ids))
            if plan.operation == "document":
                ids = array("q", req.origin_input_ids)
                key = document_key(plan.namespace, self.fingerprint, ids)
                req.ragserve, req.extra_key = DocumentRequest(key, plan.namespace, ids), key
                self.documents.document_request(req, plan.namespace)
                return
            if self.unsupported:
                raise PlanError(self.unsupported)
            self._attach(req, plan)
        except PlanError as error:
            self._end(req, f"ragserve: {error}")
        except Exception as error:  # whatever is in a client's plan
            log.exception("a context plan failed")
            self._end(req, f"ragserve: the plan cannot be carried out: {error!r}")

    def _attach(self, req: Any, plan: ContextPlan) -> None:
        ids = array("q", req.origin_input_ids)
        keys = tuple(document_key(plan.namespace, self.fingerprint, ids[s.start : s.end]) for s in plan.spans)
        context = ComposedContext(plan, ids, keys, select(plan, self._layers))
        # From here on SGLang sees a prompt of S placeholders and the question: all its bookkeeping runs in that compact space.
        compact = array("q", [0]) * context.slots + ids[plan.question_start :]
        req.origin_input_ids = req.origin_input_ids_unpadded = compact
        req.extra_key = f"composed:{req.rid}"
        req.ragserve = context

    def _end(self, req: Any, message: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> None:
        """Finish the request with an error, by SGLang's own way for bad requests, without its log line (a miss is no error)."""
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        req.ragserve = None
        req.extra_key = f"ended:{req.rid}"
        req.origin_input_ids = req.origin_input_ids_unpadded = array("q", [0])
        req.full_untruncated_fill_ids = array("q")
        req.grammar, req.return_logprob, req.logprob_start_len = None, False, -1
        req.to_finish = FINISH_ABORT(message, status, "BadRequestError" if status == HTTPStatus.BAD_REQUEST else "Unavailable")

    def refuse(self, req: Any, reason: str) -> None:
        """End a new request that asks for something that cannot be served."""
        self._end(req, f"ragserve: {reason}")

    # admission

    def admit(self, adder: Any, req: Any, add: Any) -> Any:
        """Around `PrefillAdder.add_one_req`: reserve slots and lock documents, or leave the request waiting, all or nothing."""
        from sglang.srt.managers.schedule_policy import AddReqResult

        context: ComposedContext = req.ragserve
        missing = self._resolve(context)
        if not self._all_agree(missing is not None):
            self._unlock(context)
            return AddReqResult.CONTINUE  # a load from disk is under way: others go first
        missing = self._missing_anywhere(context, missing or [])
        if missing:
            self._unlock(context)
            for _ in missing:
                self.tiers.count(None)
            if req.output_ids:  # taken back by the scheduler in the middle of its answer
                self._end(req, _LOST, HTTPStatus.SERVICE_UNAVAILABLE)
            else:
                self._end(req, MISSING_PREFIX + json.dumps(missing))
            req.init_next_round_input(self.tree)
            return add()
        slots = self._reserve(adder, context.slots)
        if slots is None:
            locks_device = any(isinstance(source, DeviceSource) for source in context.sources)
            self._unlock(context)
            if adder.can_run_list or not adder.running_batch.is_empty():
                return AddReqResult.NO_TOKEN
            if locks_device:
                context.below_device = True  # its documents there are in its own way: from host they take no slots
                return AddReqResult.CONTINUE
            # Nothing will ever free memory for it: better an error than a queue that hangs.
            self._end(
                req,
                f"ragserve: the context takes {context.slots} KV slots, more than the pool can give: keep less, or raise max_total_tokens",
            )
            req.init_next_round_input(self.tree)
            return add()
        req.prefix_indices = slots[: context.slots]
        req.already_computed = context.slots  # composed tokens are no prefix hits, neither in the sum nor by tier
        req._cache_breakdown_computed = True
        context.filled = False
        hits = adder.log_hit_tokens
        try:
            result = add()
        except BaseException:
            self._release(context, slots)
            raise
        if not adder.can_run_list or adder.can_run_list[-1] is not req:
            req.prefix_indices = torch.empty((0,), dtype=torch.int64, device=self._device)
            self._release(context, slots)
            return result
        adder.log_hit_tokens = hits
        for source in context.sources:
            self.tiers.count(tier_of(source))
        context.tickets, context.reloads = {}, 0
        return result

    def _reserve(self, adder: Any, count: int) -> torch.Tensor | None:
        """Slots int64 for ``count`` tokens in whole pages, evicting from the tree where that helps; None where they do not fit."""
        wanted = -(-count // self._page) * self._page
        if wanted >= adder.rem_total_tokens:
            return None
        if self._allocator.available_size() < wanted:
            from sglang.srt.mem_cache.base_prefix_cache import EvictParams

            self.tree.evict(EvictParams(num_tokens=wanted - self._allocator.available_size()))
        slots: torch.Tensor | None = self._allocator.alloc(wanted)
        return slots

    def _release(self, context: ComposedContext, slots: torch.Tensor) -> None:
        self._allocator.free(slots)
        self._unlock(context)

    def _resolve(self, context: ComposedContext) -> list[int] | None:
        """Find and lock every document. Numbers of the spans that are nowhere; None while one is being loaded from disk."""
        self._unlock(context)
        missing: list[int] = []
        loading = False
        for i, (span, key) in enumerate(zip(context.plan.spans, context.keys, strict=True)):
            found = self._find(context, i, span, key)
            if found == "loading":
                loading = True
            elif found is None:
                missing.append(i)
            else:
                context.sources.append(found)
        if loading:  # some may turn out to be missing: all that are get told at once
            context.waiting_since = context.waiting_since or time.perf_counter()
            return None
        if missing:
            return missing
        if context.waiting_since is not None:
            context.load_ms = (time.perf_counter() - context.waiting_since) * 1e3
            context.waiting_since = None
        return []

    def _find(self, context: ComposedContext, number: int, span: Span, key: str) -> Any:
        if self.documents.is_removed(key):
            return None
        ids = context.ids[span.start : span.end]
        source = None if context.below_device else self._on_device(key, ids)
        if source is not None:
            return source
        resident = self.tiers.lookup(key, ids, context.plan.namespace, count=False)  # counted once it is admitted
        if resident is None:
            return None
        blocks = context.blocks(number, self._block)
        absent = blocks[~resident.blocks_on_host.numpy()[blocks]].tolist()
        if absent:
            ticket = context.tickets.get(key)
            if ticket is None:
                context.tickets[key] = self.tiers.load(key, absent)
                return "loading"
            if not ticket.done():
                return "loading"
            if not ticket.ok or context.reloads >= _MAX_RELOADS:
                return None
            context.reloads += 1
            context.tickets[key] = self.tiers.load(key, absent)  # loaded, and evicted again before we came to it: once more
            return "loading"
        from_disk = key in context.tickets
        self.tiers.pin(key)
        pages = np.full(-(-len(ids) // self._block), -1, dtype=np.int64)
        pages[blocks] = self.tiers.pages(key, blocks.tolist()).numpy()
        return HostSource(key, pages, from_disk)

    def _on_device(self, key: str, ids: array[int]) -> DeviceSource | None:
        """The document in the tree, locked; None unless all of it is there (with pages, its last partial page never is)."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        match = self.tree.match_prefix(MatchPrefixParams(key=RadixKey(ids, extra_key=key)))
        if len(match.device_indices) != len(ids):
            return None
        self.tree.inc_lock_ref(match.last_device_node)
        return DeviceSource(match.device_indices, match.last_device_node)

    def _unlock(self, context: ComposedContext) -> None:
        for source in context.sources:
            if isinstance(source, DeviceSource):
                self.tree.dec_lock_ref(source.node)
            else:
                self.tiers.unpin(source.key)
        context.sources = []

    def _all_agree(self, flag: bool) -> bool:
        """Whether every rank says so: what one rank's host memory lacks, no rank composes from."""
        if self._tp_group is None or self._tp_group.world_size == 1:
            return flag
        vote = torch.tensor([int(flag)])
        torch.distributed.all_reduce(vote, op=torch.distributed.ReduceOp.MIN, group=self._tp_group.cpu_group)
        return bool(vote.item())

    def _missing_anywhere(self, context: ComposedContext, missing: Sequence[int]) -> list[int]:
        """Numbers of the spans that any rank lacks."""
        if self._tp_group is None or self._tp_group.world_size == 1:
            return list(missing)
        lacks = torch.zeros(len(context.keys), dtype=torch.int64)
        lacks[list(missing)] = 1
        torch.distributed.all_reduce(lacks, op=torch.distributed.ReduceOp.MAX, group=self._tp_group.cpu_group)
        return [int(i) for i in lacks.nonzero().flatten()]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank; all must call it."""
        if self._tp_group is None or self._tp_group.world_size == 1:
            return [value]
        values: list[Any] = [None] * self._tp_group.world_size
        torch.distributed.all_gather_object(values, value, group=self._tp_group.cpu_group)
        return values

    # the forward pass

    def before_forward(self, batch: Any) -> None:
        """Before an extend batch: note every row's position offset and fill the slots of composed requests that are new in it."""
        self._poll_held()
        rows = batch.req_pool_indices
        offsets = [r.ragserve.delta if is_composed(r) else 0 for r in batch.reqs]
        self._delta[rows] = torch.tensor(offsets, dtype=torch.int64).to(self._device, non_blocking=True)
        new = [r for r in batch.reqs if is_composed(r) and not r.ragserve.filled]
        if not new or self._composer is None:
            return
        table = self.tree.req_to_token_pool.req_to_token
        slots = [table[r.req_pool_idx, : r.ragserve.slots].to(torch.int64) for r in new]
        contexts = [r.ragserve for r in new]
        self._clock = self._composer.fill(contexts, slots)
        self._hold(contexts)

    def after_forward(self) -> None:
        """The extend batch's forward pass has run, or, on CUDA, has been launched."""
        if self._clock is not None:
            self._clock.mark("extend")
            self._clock = None

    def before_result(self, batch: Any) -> None:
        """SGLang is about to wait for an extend batch's tokens: what was composed for it has run by then, and goes out with them."""
        for r in batch.reqs:
            if is_composed(r) and r.ragserve.clock is not None:
                report = report_of(r.ragserve)
                r.ragserve.clock = None
                r.customized_info = {**(r.customized_info or {}), PLAN_FIELD: [report.to_json()]}
                context_metrics().observe(report)

    def _hold(self, contexts: list[ComposedContext]) -> None:
        """Unlock device documents (later writes to their slots are behind us on the stream); host pages when the copies have run.

        Device locks decide what SGLang can evict and admit, so they must end at the same step on every rank.
        """
        if self._device.type != "cuda":
            for context in contexts:
                self._unlock(context)
            return
        for context in contexts:
            below: list[DeviceSource | HostSource] = [source for source in context.sources if isinstance(source, HostSource)]
            context.sources = [source for source in context.sources if isinstance(source, DeviceSource)]
            self._unlock(context)
            context.sources = below
        event = torch.cuda.Event()
        event.record()
        self._held.append((event, contexts))

    def _poll_held(self) -> None:
        while self._held and self._held[0][0].query():
            for context in self._held.pop(0)[1]:
                self._unlock(context)

    def shift_positions(self, forward_batch: Any) -> None:
        """After `ForwardBatch.init_new`: positions follow the full length of composed contexts."""
        if forward_batch.positions is None or not len(forward_batch.positions):
            return
        delta = self._delta[forward_batch.req_pool_indices]
        if forward_batch.forward_mode.is_decode():
            forward_batch.positions = forward_batch.positions + delta
        elif forward_batch.extend_seq_lens is not None:
            counts = forward_batch.extend_seq_lens.to(torch.int64)
            shift = torch.repeat_interleave(delta, counts, output_size=forward_batch.extend_num_tokens)
            forward_batch.positions = forward_batch.positions + shift.to(forward_batch.positions.dtype)

    # documents

    def _keep_document(self, req: Any, slots: torch.Tensor) -> None:
        """A document request ended: copy its KV to the other tiers before the tree takes the slots."""
        document = getattr(req, "ragserve", None)
        if not isinstance(document, DocumentRequest) or len(slots) < len(document.ids):
            return
        from sglang_ext.documents.types import DocumentMeta

        slots = slots[: len(document.ids)].to(torch.int64)
        pool = self._runner.token_to_kv_pool
        k = torch.stack([pool.get_key_buffer(layer)[slots] for layer in range(self._layers)])
        v = torch.stack([pool.get_value_buffer(layer)[slots] for layer in range(self._layers)])
        self.documents.cached(document.key)
        self.tiers.put(DocumentMeta(document.key, document.namespace, document.ids, len(document.ids), self.fingerprint), k, v)

    def sweep(self) -> None:
        """Let go of what ended requests held."""
        self._poll_held()
        self.documents.sweep()

    def check_integrity(self) -> None:
        """Raise where slots or pages are lost or counted twice. The device's sum is SGLang's own idle check; ours are the tiers below."""
        self.sweep()
        self.documents.check()
        self.tiers.check_integrity()


def is_composed(req: Any) -> bool:
    """Whether the request's prefix is a composed context."""
    return isinstance(getattr(req, "ragserve", None), ComposedContext)
