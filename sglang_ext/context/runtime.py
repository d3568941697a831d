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
from typing import Any

import numpy as np
import torch

from sglang_ext.context.clock import StageClock
from sglang_ext.context.composer import ComposedContext, Composer, DeviceSource, HostSource, report_of
from sglang_ext.context.metrics import context_metrics
from sglang_ext.context.rope import UnsupportedRope, rotation_of
from sglang_ext.context.strategies import select
from sglang_ext.protocol import MISSING_PREFIX, PLAN_FIELD, ContextPlan, PlanError, Span, document_key

log = logging.getLogger(__name__)
_SWEEP_AT = 10_000  # documents remembered as on the device before those that the tree has evicted are forgotten


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
        self._namespaces: dict[str, str] = {}  # of documents on the device
        self._doomed: set[str] = set()  # removed while a running request held them: gone for everyone else, freed when it ends
        self._composer: Composer | None = None
        self.unsupported: str | None = None
        try:
            self._composer = Composer(model_runner, rotation_of(model_runner.model), tiers, block)
        except UnsupportedRope as error:
            self.unsupported = str(error)
            log.warning("composed contexts are off: %s", error)
        tree.is_composed = is_composed
        tree.on_document = self._keep_document

    # a request arrives

    def on_request(self, req: Any) -> None:
        """Read the plan of a new request. A bad plan ends the request with its reason; it never raises: that would end the scheduler."""
        params = req.sampling_params.custom_params
        text = params.get(PLAN_FIELD) if isinstance(params, dict) else None
        if text is None:
            return
        try:
            plan = ContextPlan.from_json(str(text), len(req.origin_input_ids))
            if plan.operation == "document":
                ids = array("q", req.origin_input_ids)
                key = document_key(plan.namespace, self.fingerprint, ids)
                req.ragserve, req.extra_key = DocumentRequest(key, plan.namespace, ids), key
                return
            if self.unsupported:
                raise PlanError(self.unsupported)
            self._attach(req, plan)
        except PlanError as error:
            self._end(req, f"ragserve: {error}")

    def _attach(self, req: Any, plan: ContextPlan) -> None:
        ids = array("q", req.origin_input_ids)
        keys = tuple(document_key(plan.namespace, self.fingerprint, ids[s.start : s.end]) for s in plan.spans)
        context = ComposedContext(plan, ids, keys, select(plan, self._layers))
        # From here on SGLang sees a prompt of S placeholders and the question: all its bookkeeping runs in that compact space.
        compact = array("q", [0]) * context.slots + ids[plan.question_start :]
        req.origin_input_ids = req.origin_input_ids_unpadded = compact
        req.extra_key = f"composed:{req.rid}"
        req.ragserve = context

    def _end(self, req: Any, message: str) -> None:
        """Finish the request with an error, by SGLang's own way for bad requests, without its log line (a miss is no error)."""
        from http import HTTPStatus

        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        req.ragserve = None
        req.extra_key = f"ended:{req.rid}"
        req.origin_input_ids = req.origin_input_ids_unpadded = array("q", [0])
        req.full_untruncated_fill_ids = array("q")
        req.grammar, req.return_logprob, req.logprob_start_len = None, False, -1
        req.to_finish = FINISH_ABORT(message, HTTPStatus.BAD_REQUEST, "BadRequestError")

    # admission

    def admit(self, adder: Any, req: Any, add: Any) -> Any:
        """Around `PrefillAdder.add_one_req`: reserve slots and lock documents, or leave the request waiting, all or nothing."""
        from sglang.srt.managers.schedule_policy import AddReqResult

        context: ComposedContext = req.ragserve
        missing = self._resolve(context)
        ready = missing is not None and not missing
        if not self._all_agree(missing is not None):
            self._unlock(context)
            return AddReqResult.CONTINUE  # a load from disk is under way: others go first
        if not self._all_agree(ready):
            self._unlock(context)
            self._end(req, MISSING_PREFIX + json.dumps(missing))
            req.init_next_round_input(self.tree)
            return add()
        slots = self._reserve(adder, context.slots)
        if slots is None:
            self._unlock(context)
            if adder.can_run_list or not adder.running_batch.is_empty():
                return AddReqResult.NO_TOKEN
            # Nothing will ever free memory for it: better an error than a queue that hangs.
            self._end(
                req,
                f"ragserve: the context takes {context.slots} KV slots, more than the pool can give: keep less, or raise max_total_tokens",
            )
            req.init_next_round_input(self.tree)
            return add()
        req.prefix_indices = slots[: context.slots]
        req.already_computed = context.slots  # composed tokens are no prefix hits
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
        if missing:
            return missing
        if loading:
            context.waiting_since = context.waiting_since or time.perf_counter()
            return None
        if context.waiting_since is not None:
            context.load_ms = (time.perf_counter() - context.waiting_since) * 1e3
            context.waiting_since = None
        return []

    def _find(self, context: ComposedContext, number: int, span: Span, key: str) -> Any:
        if key in self._doomed:
            return None
        ids = context.ids[span.start : span.end]
        source = self._on_device(key, ids)
        if source is not None:
            return source
        resident = self.tiers.lookup(key, ids, context.plan.namespace, count=context.waiting_since is None)
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
            if not ticket.ok:
                return None
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
        """Unlock device documents (later writes to their slots are behind us on the stream); host pages when the copies have run."""
        if self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            self._held.append((event, contexts))
        else:
            for context in contexts:
                self._unlock(context)

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
        self._doomed.discard(document.key)
        self._namespaces[document.key] = document.namespace
        if len(self._namespaces) > _SWEEP_AT:
            self.sweep()
        self.tiers.put(DocumentMeta(document.key, document.namespace, document.ids, len(document.ids), self.fingerprint), k, v)

    def remove(self, keys: Sequence[str], namespace: str) -> int:
        """Evict documents from every tier, and the namespace's exact prefixes, which may hold them; how many documents were in a tier.

        What a running request still reads is freed when that ends.
        """
        prefixes = f"namespace:{namespace}"
        if not self.tree.remove_key(prefixes):
            self._doomed.add(prefixes)
        on_device = self.tree.tokens_by_key()
        removed = 0
        for key in keys:
            if not self.tree.remove_key(key):
                self._doomed.add(key)
            removed += bool(self.tiers.remove(key)) or key in on_device
        return removed

    def remove_namespace(self, namespace: str) -> int:
        """Evict all documents of a namespace."""
        on_device = [key for key, owner in self._namespaces.items() if owner == namespace]
        below = self.tiers.remove_namespace(namespace)
        return max(below, self.remove(on_device, namespace))

    def clear(self) -> None:
        """Evict all documents from every tier."""
        self.evict(("device",))
        self.tiers.clear()

    def evict(self, tiers: Sequence[str]) -> None:
        """Drop documents from the device (all that no request reads) or from host memory; the tiers below keep them."""
        if "device" in tiers:
            for key in self.document_tokens():
                self.tree.remove_key(key)
        if "host" in tiers:
            self.tiers.flush(30)
            self.tiers.drop_host()

    def sweep(self) -> None:
        """Free removed documents whose last reader has gone, and forget whose those were that the tree has evicted."""
        self._doomed -= {key for key in self._doomed if self.tree.remove_key(key)}
        on_device = self.tree.tokens_by_key()
        self._namespaces = {key: owner for key, owner in self._namespaces.items() if key in on_device}

    def document_tokens(self) -> dict[str, int]:
        """Tokens on the device by document key (other extra keys, of namespaces and requests, hold a colon)."""
        return {key: n for key, n in self.tree.tokens_by_key().items() if ":" not in key}

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot over all layers."""
        return int(sum(self._runner.token_to_kv_pool.get_kv_size_bytes())) // max(1, self._allocator.size)

    @property
    def pool_bytes(self) -> int:
        """Bytes of the KV pool."""
        return int(sum(self._runner.token_to_kv_pool.get_kv_size_bytes()))

    def check_integrity(self) -> None:
        """Raise where slots or pages are lost or counted twice. The device's sum is SGLang's own idle check; ours are the tiers below."""
        self._poll_held()
        self.sweep()
        self.tiers.check_integrity()


def is_composed(req: Any) -> bool:
    """Whether the request's prefix is a composed context."""
    return isinstance(getattr(req, "ragserve", None), ComposedContext)
