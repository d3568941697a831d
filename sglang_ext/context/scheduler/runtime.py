"""The scheduler's side of composed contexts: from a plan on a request to filled slots. One object per
scheduler process.

Every method runs on the scheduler's thread; :meth:`before_forward` on the stream of the forward pass. SGLang
is reached through the hooks in `sglang_ext.hooks` only."""

from __future__ import annotations

import json
import logging
import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import torch

from sglang_ext.analysis.analyser import Analyser
from sglang_ext.analysis.document_analysis import Analysis, Cut
from sglang_ext.analysis.texts import Texts
from sglang_ext.context.compose.composer import Composer
from sglang_ext.context.compose.locate import Locator
from sglang_ext.context.compose.request import (
    ComposedContext,
    DocumentOnDevice,
    DocumentOnHost,
    report_of,
    tier_of,
)
from sglang_ext.context.rope import Rotation, rotation_of
from sglang_ext.context.scheduler.metrics import context_metrics
from sglang_ext.context.scheduler.query_pass import QueryPass
from sglang_ext.context.scheduler.release_queue import ReleaseQueue
from sglang_ext.context.scheduler.selection_stage import SelectionStage
from sglang_ext.context.scheduler.slot_usage import SlotUsage
from sglang_ext.context.scheduler.stage_timer import StageTimer
from sglang_ext.context.selection.base import ModelShape
from sglang_ext.context.selection.profile import Profile
from sglang_ext.context.selection.strategies import partial_selection
from sglang_ext.documents.device import DeviceDocuments
from sglang_ext.model import UnsupportedRope
from sglang_ext.protocol import MISSING_PREFIX, PLAN_FIELD, ContextPlan, PlanError, document_key

log = logging.getLogger(__name__)
ANALYSIS_BYTES = 2**30  # unless the configuration says otherwise
_POLL_S = 0.0005  # between two looks at a load, where nothing else is to be done
_LOST = (
    "ragserve: the request was taken back to make room, and its documents were evicted meanwhile: "
    "ask again, or give the cache more memory"
)


@dataclass(frozen=True, slots=True)
class AnalysisConfig:
    """``at_ingestion``: analyse documents when they are prefilled, unless their plans say otherwise; else at
    the first use that needs it. ``memory_bytes``: of analyses kept decoded. ``profile``: the model's."""

    at_ingestion: bool = True
    memory_bytes: int = ANALYSIS_BYTES
    cut: Cut = field(default_factory=Cut)
    profile: Profile = field(default_factory=Profile)


@dataclass(slots=True)
class DocumentRequest:
    """State of a request whose KV is a document's."""

    key: str
    namespace: str
    ids: array[int]
    analyse: bool
    analysis: Analysis | None = None


class UnsupportedPool(ValueError):
    """Documents' KV cannot be read from the pool or written to it as it is."""


def check_pool(pool: Any) -> None:
    """Raise UnsupportedPool for one of quantised KV (`sglang_ext.attention.quantized_pool`)."""
    if (bits := getattr(pool, "bits", 16)) != 16:
        raise UnsupportedPool(
            f"documents are composed in plain KV, and this server's has {bits} bits: use strategy 'prefix' or 'full', or --kv-bits 16"
        )


class ContextRuntime:
    """Admission, composition and release of composed requests; the document tiers of one rank."""

    def __init__(
        self,
        *,
        model_runner: Any,
        tree: Any,
        tiers: Any,
        fingerprint: str,
        block: int,
        analysis: AnalysisConfig,
        texts: Callable[[], Texts],
        tp_group: Any = None,
    ) -> None:
        self.tree = tree
        self.tiers = tiers
        self.fingerprint = fingerprint
        self._runner = model_runner
        self._allocator = tree.token_to_kv_pool_allocator
        self._page = tree.page_size
        self._tp_group = tp_group
        self._analysis = analysis
        self._device = torch.device(model_runner.device)
        self._layers = model_runner.token_to_kv_pool.layer_num
        self._shape = ModelShape(
            self._layers, model_runner.token_to_kv_pool.dtype.itemsize, analysis.cut, analysis.profile
        )
        # Positions of row r of the request table are this far ahead of its slots: 0 for plain requests,
        # written each time a row is taken.
        self._delta = torch.zeros(
            tree.req_to_token_pool.req_to_token.shape[0], dtype=torch.int64, device=self._device
        )
        self._held = ReleaseQueue()  # host pages that a running copy still reads
        self._clock: StageTimer | None = None  # of the batch whose forward pass is being run
        self.slots = SlotUsage(tree)
        self.documents = DeviceDocuments(model_runner, tree, tiers)
        self._locator = Locator(tree, tiers, self.documents.is_removed, block, tp_group)
        self._composer: Composer | None = None
        self._stager: SelectionStage | None = None
        self._rotation: Rotation | None = None
        self.unsupported: str | None = None
        try:
            check_pool(model_runner.token_to_kv_pool)
            self._rotation = rotation = rotation_of(model_runner.model)
            self._composer = Composer(model_runner, rotation, tiers, block)
            analyser = Analyser(model_runner, texts, analysis.cut, analysis.profile.heads)
            query = QueryPass(model_runner, self._composer, self._allocator)
            self._stager = SelectionStage(
                model_runner,
                rotation,
                self._locator,
                tiers,
                analyser,
                query,
                analysis.memory_bytes,
                analysis.profile.stable,
            )
            self.documents.on_removed = self._stager.forget
        except (UnsupportedPool, UnsupportedRope) as error:
            self.unsupported = str(error)
            log.warning("composed contexts are off: %s", error)
        tree.is_composed = is_composed
        tree.on_document = self._keep_document
        tree.on_finished = self.documents.request_ended

    @property
    def recompute_graphs(self) -> int:
        """CUDA graphs of the recompute pass; 0 where it is launched layer by layer."""
        return 0 if self._composer is None else self._composer.recompute_graphs

    # a request arrives

    def on_request(self, req: Any) -> None:
        """Read the plan of a new request. A bad plan ends the request with its reason; it never raises: that
        would end the scheduler.
        """
        params = req.sampling_params.custom_params
        text = params.get(PLAN_FIELD) if isinstance(params, dict) else None
        if text is None:
            self.documents.exact_request(req)
            return
        try:
            plan = ContextPlan.from_json(str(text), len(req.origin_input_ids))
            if self.unsupported:
                raise PlanError(self.unsupported)
            if plan.operation == "document":
                ids = array("q", req.origin_input_ids)
                key = document_key(plan.namespace, self.fingerprint, ids)
                analyse = plan.analyse and self._analysis.at_ingestion
                req.ragserve, req.extra_key = DocumentRequest(key, plan.namespace, ids, analyse), key
                self.documents.document_request(req, plan.namespace)
                return
            self._attach(req, plan)
        except PlanError as error:
            self._end(req, f"ragserve: {error}")
        except Exception as error:  # whatever is in a client's plan
            log.exception("a context plan failed")
            self._end(req, f"ragserve: the plan cannot be carried out: {error!r}")

    def _attach(self, req: Any, plan: ContextPlan) -> None:
        ids = array("q", req.origin_input_ids)
        keys = tuple(document_key(plan.namespace, self.fingerprint, ids[s.start : s.end]) for s in plan.spans)
        context = ComposedContext(plan, ids, keys, partial_selection(plan, self._shape))
        if context.draft.needs_analysis and self._stager is not None:
            self._stager.add(context)
        else:
            context.decided = context.draft.settle()
        self._compact(req, context)
        req.extra_key = f"composed:{req.rid}"
        req.ragserve = context

    def _compact(self, req: Any, context: ComposedContext) -> None:
        """Show SGLang a prompt of S placeholders and the question: all its bookkeeping runs in that compact
        space.
        """
        compact = array("q", [0]) * context.slots + context.ids[context.plan.question_start :]
        req.origin_input_ids = req.origin_input_ids_unpadded = compact

    def _settled(self, req: Any, context: ComposedContext) -> None:
        """The selection is there: S is no more the most it may be."""
        surplus = len(req.origin_input_ids) - context.slots - context.question_tokens
        if surplus:
            self._compact(req, context)
            if req.logprob_start_len > 0:
                req.logprob_start_len -= surplus
            req.full_untruncated_fill_ids = array("q")
            req.init_next_round_input(self.tree)

    def _end(self, req: Any, message: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> None:
        """Finish the request with an error, by SGLang's own way for bad requests, without its log line (a
        miss is no error).
        """
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        req.ragserve = None
        req.extra_key = f"ended:{req.rid}"
        req.origin_input_ids = req.origin_input_ids_unpadded = array("q", [0])
        req.full_untruncated_fill_ids = array("q")
        req.grammar, req.return_logprob, req.logprob_start_len = None, False, -1
        req.to_finish = FINISH_ABORT(
            message, status, "BadRequestError" if status == HTTPStatus.BAD_REQUEST else "Unavailable"
        )

    def refuse(self, req: Any, reason: str) -> None:
        """End a new request that asks for something that cannot be served."""
        self._end(req, f"ragserve: {reason}")

    # admission

    def admit(self, adder: Any, req: Any, add: Any) -> Any:
        """Around `PrefillAdder.add_one_req`: reserve slots and lock documents, or leave the request waiting,
        all or nothing.
        """
        from sglang.srt.managers.schedule_policy import AddReqResult

        context: ComposedContext = req.ragserve
        if context.decided is None and self._stager is not None:
            self._stager.advance(adder)
            if context.decided is None and not context.missing:
                return self._later(adder)
        missing: list[int] | None = context.missing
        if context.decided is not None:
            self._settled(req, context)
            missing = self._locator.resolve(context)
            if not self._locator.all_agree(missing is not None):
                self._locator.unlock(context)
                return self._later(adder)  # a load from disk is under way: others go first
            missing = self._locator.missing_anywhere(context, missing or [])
        if missing:
            self._locator.unlock(context)
            self.tiers.count(None, len(missing))
            if req.output_ids:  # taken back by the scheduler in the middle of its answer
                self._end(req, _LOST, HTTPStatus.SERVICE_UNAVAILABLE)
            else:
                self._end(req, MISSING_PREFIX + json.dumps(missing))
            req.init_next_round_input(self.tree)
            return add()
        slots = self._reserve(adder, context.slots)
        if slots is None:
            locks_device = any(isinstance(source, DocumentOnDevice) for source in context.sources)
            self._locator.unlock(context)
            if adder.can_run_list or not adder.running_batch.is_empty():
                return AddReqResult.NO_TOKEN
            if locks_device:
                context.below_device = (
                    True  # its documents there are in its own way: from host they take no slots
                )
                return AddReqResult.CONTINUE
            # Nothing will ever free memory for it: better an error than a queue that hangs.
            self._end(
                req,
                f"ragserve: the context takes {context.slots} KV slots, more than the pool can give: keep less, or raise max_total_tokens",
            )
            req.init_next_round_input(self.tree)
            return add()
        req.prefix_indices = slots[: context.slots]
        req.already_computed = (
            context.slots
        )  # composed tokens are no prefix hits, neither in the sum nor by tier
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
        for tier, documents in Counter(map(tier_of, context.sources)).items():
            self.tiers.count(tier, documents)
        context.tickets, context.reloads = {}, 0
        return result

    def _later(self, adder: Any) -> Any:
        """The request stays in the queue. With nothing else to do the scheduler would ask again at once, and
        again: the threads that load would get Python's lock only when its switch interval is over, for each
        of their steps."""
        from sglang.srt.managers.schedule_policy import AddReqResult

        if not adder.can_run_list and adder.running_batch.is_empty():
            time.sleep(_POLL_S)
        return AddReqResult.CONTINUE

    def _reserve(self, adder: Any, count: int) -> torch.Tensor | None:
        """Slots int64 for ``count`` tokens in whole pages, evicting from the tree where that helps; None
        where they do not fit.
        """
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
        self._locator.unlock(context)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank; all must call it."""
        if self._tp_group is None or self._tp_group.world_size == 1:
            return [value]
        values: list[Any] = [None] * self._tp_group.world_size
        torch.distributed.all_gather_object(values, value, group=self._tp_group.cpu_group)
        return values

    # the forward pass

    def before_forward(self, batch: Any) -> None:
        """Before an extend batch: note every row's position offset and fill the slots of composed requests
        that are new in it.
        """
        self._held.poll()
        rows = batch.req_pool_indices
        offsets = [r.ragserve.delta if is_composed(r) else 0 for r in batch.reqs]
        self._delta[rows] = torch.tensor(offsets, dtype=torch.int64).to(self._device, non_blocking=True)
        new = [r for r in batch.reqs if is_composed(r) and not r.ragserve.filled]
        if not new or self._composer is None:
            return
        table = self.tree.req_to_token_pool.req_to_token
        slots = [table[r.req_pool_idx, : r.extend_range.end].to(torch.int64) for r in new]
        contexts = [r.ragserve for r in new]
        whole = (
            len(new) == len(batch.reqs) and batch.forward_mode.name == "EXTEND"
        )  # and no decoding row beside them
        self._clock = self._composer.fill(contexts, slots, whole=whole)
        self._hold(contexts, self._composer.gather.loading)

    def output_of(self, forward_batch: Any) -> Any:
        """The model's output where `before_forward` has computed it already, given once; None where the model
        has to run.
        """
        return None if self._composer is None else self._composer.one_pass.output(forward_batch)

    def end_forward(self) -> None:
        """The forward pass has been launched, or has failed."""
        if self._composer is not None:
            self._composer.one_pass.drop()

    def after_forward(self, batch: Any) -> None:
        """The extend batch's forward pass has run, or, on CUDA, has been launched: analyse the documents that
        are complete in it.
        """
        if self._composer is not None:
            # attention in every layer has waited; whatever did not ask the pool has to
            self._composer.gather.finish()
        if self._clock is not None:
            self._clock.mark("extend")
            self._clock = None
        if self._stager is None:
            return
        for req in batch.reqs:
            document = getattr(req, "ragserve", None)
            if not isinstance(document, DocumentRequest) or getattr(req, "ragserve_private", False):
                continue  # an ordinary request, or a document that was removed meanwhile
            if document.analyse and req.extend_range.end >= len(document.ids):
                document.analysis = self._stager.analyse(document.key, document.ids)

    def before_result(self, batch: Any) -> None:
        """SGLang is about to wait for an extend batch's tokens: what was composed for it has run by then, and
        goes out with them.
        """
        for r in batch.reqs:
            if is_composed(r) and r.ragserve.clock is not None:
                report = report_of(r.ragserve)
                r.ragserve.clock = None
                r.customized_info = {**(r.customized_info or {}), PLAN_FIELD: [report.to_json()]}
                context_metrics().observe(report)

    def _hold(self, contexts: list[ComposedContext], loading: torch.cuda.Stream | None = None) -> None:
        """Unlock device documents (later writes to their slots are behind us on the stream); host pages when
        the copies have run, which ``loading`` is the stream of, if it is not the current one.

        Device locks decide what SGLang can evict and admit, so they must end at the same step on every rank.
        """
        if self._device.type != "cuda":
            for context in contexts:
                self._locator.unlock(context)
            return
        below = []
        for context in contexts:
            below += [source for source in context.sources if isinstance(source, DocumentOnHost)]
            context.sources = [source for source in context.sources if isinstance(source, DocumentOnDevice)]
            self._locator.unlock(context)
        if below:
            event = torch.cuda.Event()
            event.record() if loading is None else event.record(loading)
            self._held.add(event, lambda: self._unpin(below))

    def _unpin(self, sources: Sequence[DocumentOnHost]) -> None:
        for source in sources:
            self.tiers.unpin(source.key)

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
        meta = DocumentMeta(
            document.key, document.namespace, document.ids, len(document.ids), self.fingerprint
        )
        self.tiers.put(meta, k, v, b"" if document.analysis is None else document.analysis.encode())

    def tried(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """What the ways of selecting keep of a probe, see `sglang_ext.context.scheduler.recall_probe`. Raises
        PlanError for a model without composition."""
        from sglang_ext.context.scheduler import recall_probe as trial

        if self._stager is None or self._rotation is None:
            raise PlanError(self.unsupported or "this model's contexts cannot be composed")
        with self._stager.forward_stream():
            return trial.answer(self._runner, self._rotation, self._stager, self._shape, body)

    @property
    def profile(self) -> Profile:
        """The model's, of strategy samkv."""
        return self._analysis.profile

    @property
    def analyses(self) -> dict[str, int]:
        """Figures of the documents' analyses; empty for a model whose contexts cannot be composed."""
        return {} if self._stager is None else self._stager.stat()

    def sweep(self) -> None:
        """Let go of what ended requests held, also of what only the device has yet to come to."""
        self._held.wait()
        self.documents.sweep()

    def check_integrity(self) -> None:
        """Raise where slots or pages are lost or counted twice. The device's sum is SGLang's own idle check;
        ours are the tiers below.
        """
        self.sweep()
        self.documents.check()
        self.tiers.check_integrity()


def is_composed(req: Any) -> bool:
    """Whether the request's prefix is a composed context."""
    return isinstance(getattr(req, "ragserve", None), ComposedContext)
