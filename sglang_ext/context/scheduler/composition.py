"""Composed contexts of one scheduler process, from a request's plan to its report."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from sglang_ext.analysis.analyser import Analyser
from sglang_ext.analysis.document_analysis import Cut
from sglang_ext.analysis.texts import Texts
from sglang_ext.context.compose.composer import Composer
from sglang_ext.context.compose.locate import Locator
from sglang_ext.context.compose.request import ComposedContext, is_composed, report_of
from sglang_ext.context.compose.stage_timer import StageTimer
from sglang_ext.context.scheduler import recall_probe, sglang_req
from sglang_ext.context.scheduler.admission import Admission
from sglang_ext.context.scheduler.document_analyses import DocumentAnalyses
from sglang_ext.context.scheduler.document_pass import TOGETHER, DocumentPass
from sglang_ext.context.scheduler.document_scorer import DocumentScorer
from sglang_ext.context.scheduler.metrics import context_metrics
from sglang_ext.context.scheduler.model_check import check_composition
from sglang_ext.context.scheduler.query_pass import QueryPass
from sglang_ext.context.scheduler.release_queue import ReleaseQueue
from sglang_ext.context.scheduler.selection_stage import SelectionStage
from sglang_ext.context.scheduler.session_attention import SessionAttention
from sglang_ext.context.scheduler.sglang_req import DocumentRequest
from sglang_ext.context.selection.base import keeps_all
from sglang_ext.context.selection.choose import Selector
from sglang_ext.context.selection.profile import Profile
from sglang_ext.context.selection.strategies import ModelShape, partial_selection
from sglang_ext.diagnostics import distribution
from sglang_ext.documents.session_pages import SessionPages
from sglang_ext.kv_offload.base import SparseDecoding
from sglang_ext.ranks.ranks import Ranks
from sglang_ext.sglang_internals import sglang_requests
from sglang_ext.sglang_internals.model import NotComposable, check_layers, forward_stream
from sglang_ext.stages import stages
from sglang_ext.stages.cancelled_pass import Cancelled, watched
from sglang_ext.tensors.rope import rotation_of
from sglang_ext.versions import extend_end, row_of
from sglang_ext.wire.protocol import PLAN_FIELD, ContextPlan, PlanError, composed_session_key

if TYPE_CHECKING:
    from sglang_ext.documents.radix import DocumentRadixCache
    from sglang_ext.documents.tier_store import TierStore

ANALYSIS_BYTES = 2**30  # default memory for decoded analyses


@dataclass(frozen=True, slots=True)
class AnalysisConfig:
    """The settings of documents' analysis.

    ``at_ingestion``: their whole analysis is computed when they are prefilled, if their plans ask for
    it. ``complete``: requests that read it wait until it is computed; else they do without.
    ``memory_bytes``: budget of decoded analyses. ``profile``: the model's defaults of `samkv`. ``prefix``:
    token ids that documents are prefilled behind; none to prefill them alone.
    """

    at_ingestion: bool = True
    complete: bool = True
    memory_bytes: int = ANALYSIS_BYTES
    cut: Cut = field(default_factory=Cut)
    profile: Profile = field(default_factory=Profile)
    prefix: Sequence[int] = ()


def check_pool(pool: Any) -> None:
    """Raise NotComposable for quantised KV (`sglang_ext.attention.pools.quantized_pool`)."""
    if (bits := getattr(pool, "bits", 16)) != 16:
        raise NotComposable(
            f"documents are composed in plain KV, and this server's has {bits} bits: use strategy 'prefix' "
            "or 'full', or --kv-bits 16"
        )


class Composition:
    """Admits composed requests, fills their slots and analyses documents. Per rank; scheduler thread only."""

    def __init__(
        self,
        *,
        model_runner: Any,
        tree: DocumentRadixCache,
        tiers: TierStore,
        is_removed: Callable[[str], bool],
        ranks: Ranks,
        block: int,
        config: AnalysisConfig,
        texts: Callable[[], Texts],
        sessions: SessionPages | None = None,
        attention: SparseDecoding | None = None,
    ) -> None:
        """Raises NotComposable for a model or pool whose KV cannot be composed.

        Args:
            is_removed: tells of a document key whether it was removed and only waits for its last reader.
            block: tokens of a host page.
            texts: loads the tokenizer; called once, before the first analysis.
            sessions: what the host has of sessions.
            attention: sparse decoding's `DecodeRuntime`, None where it is off.
        """
        pool = model_runner.token_to_kv_pool
        check_pool(pool)
        check_layers(model_runner.model)
        rotation = self.rotation = rotation_of(model_runner.model)
        self.composer = Composer(model_runner, rotation, tiers, ranks)
        check_composition(model_runner, self.composer.gather, tree.token_to_kv_pool_allocator)
        self.releases = ReleaseQueue()
        self._alone = ranks.alone
        self._counts = ranks.rank == 0  # the others serve the same requests
        self._tree = tree
        self._tiers = tiers
        self._device = torch.device(model_runner.device)
        self._context_length = model_runner.model_config.context_len
        # How far positions of each row of the request table are ahead of its slots; 0 for plain requests.
        # Written whenever a row is taken.
        self._offsets = torch.zeros(
            tree.req_to_token_pool.req_to_token.shape[0], dtype=torch.int64, device=self._device
        )
        self._timer: StageTimer | None = None  # of the batch whose forward pass is running
        self._shape = ModelShape(pool.layer_num, pool.dtype.itemsize, config.cut, config.profile)
        self._locator = Locator(tree, tiers, is_removed, block, sessions)
        analyser = Analyser(
            model_runner,
            texts,
            config.cut,
            config.profile.heads,
            rotation=rotation,
            prefix=config.prefix,
        )
        selector = Selector(rotation, analyser, ranks)
        self.analyses = DocumentAnalyses(
            analyser,
            tiers,
            ranks,
            device=self._device,
            memory_bytes=config.memory_bytes,
            complete=config.complete,
        )
        self.stage = SelectionStage(
            model_runner,
            locator=self._locator,
            tiers=tiers,
            analyser=analyser,
            query_pass=QueryPass(model_runner, self.composer, tree.token_to_kv_pool_allocator),
            selector=selector,
            ranks=ranks,
            analyses=self.analyses,
            stable=config.profile.stable,
        )
        self.admission = Admission(
            tree, tiers, self._locator, self.stage, ranks, layers=pool.layer_num, attention=attention
        )
        self._documents = DocumentPass(
            model_runner,
            tree.req_to_token_pool.req_to_token,
            self.analyses.analyse_all,
            self.analyses.prefill if config.prefix else None,
            possible=self.composer.fused_question.possible,
        )
        self._scorer = DocumentScorer(model_runner, rotation, self.analyses, ranks)
        self._turns = SessionAttention(
            model_runner, tree, rotation=rotation, analyser=analyser, selector=selector, ranks=ranks
        )
        self._engine = recall_probe.ProbeEngine(
            model_runner, rotation, analyser, selector, self.analyses.analyse, self._shape
        )

    def attach(self, req: Any, plan: ContextPlan, keys: tuple[str, ...]) -> None:
        """Make a new request a composed one; ``keys`` are those of the plan's spans. Raises PlanError."""
        partial = partial_selection(plan, self._shape)
        if plan.session is not None and not keeps_all(partial):
            raise PlanError(
                "a session keeps its documents whole, because later questions are about other parts of them: "
                "use a strategy that keeps all tokens where they are, such as concat or prefix"
            )
        ids = array("q", req.origin_input_ids)
        context = ComposedContext(plan, ids, keys, partial, complete=distribution.asks(req))
        if partial.needs_analysis:
            self.stage.add(context)
        else:
            context.settle(partial.settle())
        sglang_requests.limit_answer(req, self._context_length)
        if plan.session is None:  # the tree knows a session's KV by its tokens
            sglang_req.compact(req, context)
        session = plan.session
        req.extra_key = f"composed:{req.rid}" if session is None else composed_session_key(session.key)
        req.ragserve = context

    def show_less(self, req: Any) -> None:
        """Let SGLang take a new request whose context does not fit the pool, but may be offloaded: until
        admission decides it sees the question alone."""
        context, most = req.ragserve, self._tree.token_to_kv_pool_allocator.size
        state = getattr(req, "ragserve_decode", None)
        if state is None or not (state.options.offloaded and _lags(req)) or context.plan.session is not None:
            return
        tokens = len(req.origin_input_ids) + req.sampling_params.max_new_tokens + 2 * self._tree.page_size
        if tokens > most and context.decided is not None and context.decided.is_copied:
            sglang_req.compact(req, context, 0)

    def before_forward(self, batch: Any) -> bool:
        """Before an extend batch: note each row's position offset and fill the slots of its new composed
        requests. Runs on the stream of the forward pass. Returns True if the server has cancelled all of
        its requests meanwhile, so that nothing is left to extend.
        """
        stages.run_alike("offsets", stages.ending(batch.reqs), self._note_offsets, batch)
        if self._documents.takes(batch):
            self._computed(batch.reqs, self._documents.run)
            self._documents.replaced(batch)
            return False
        new = [r for r in batch.reqs if is_composed(r) and not r.ragserve.filled]
        if not new:
            return False
        failures: list[str] = []
        composed = stages.run("composition", failures.append, self._compose, batch, new)
        if composed is False:
            failures.append("it was cancelled while its context was computed")
        if failures:
            self.composer.fused_question.drop()
            stages.ending(new)(failures[0])
        contexts = [r.ragserve for r in new]
        for context in contexts:
            context.fill()

        def unlock_now(message: str) -> None:
            stages.ending(new)(message)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # nothing reads or writes any more
            for context in contexts:
                self._locator.unlock(context)

        stages.run("unlock", unlock_now, self._unlock, contexts, self.composer.gather.loading)
        return composed is False

    def _note_offsets(self, batch: Any) -> None:
        offsets = [r.ragserve.delta if is_composed(r) else 0 for r in batch.reqs]
        self._offsets[batch.req_pool_indices] = torch.tensor(offsets, dtype=torch.int64).to(
            self._device, non_blocking=True
        )

    def _compose(self, batch: Any, new: Sequence[Any]) -> bool:
        """Fill the slots; False if all requests were cancelled before that was done."""
        table = self._tree.req_to_token_pool.req_to_token
        rows = [table[row_of(r), : extend_end(r)].to(torch.int64) for r in new]
        contexts = [r.ragserve for r in new]
        # no other extended request and no decoding row beside them
        whole = len(new) == len(batch.reqs) and batch.forward_mode.name == "EXTEND"
        # nor one whose pages its question chooses, in the forward pass
        whole = whole and not any(_lags(r) for r in new)
        try:
            with watched(batch.reqs if self._alone else ()):
                self._timer = self.composer.fill(contexts, rows, whole=whole)
        except Cancelled:
            return False
        return True

    def output_of(self, forward_batch: Any) -> Any:
        """Return, once, the model's output that `before_forward` has computed already; None if the model has
        to run.
        """
        output = self._documents.output()
        return self.composer.fused_question.output(forward_batch) if output is None else output

    def end_forward(self) -> None:
        """The forward pass has been launched, or has failed."""
        self.composer.fused_question.drop()
        self._documents.drop()

    def after_forward(self, batch: Any) -> None:
        """After the extend batch's forward pass (launched, on CUDA): compute its documents behind the prefix,
        unless that is done, and analyse those that are complete.
        """

        def finish(message: str) -> None:
            stages.ending(filter(is_composed, batch.reqs))(message)
            self.composer.gather.finish()  # or loads would write to slots that are free again

        stages.run("extended", finish, self._extended)
        self._computed(self._documents.follow(batch), self._documents.run)
        for req in batch.reqs:
            document = getattr(req, "ragserve", None)
            if not isinstance(document, DocumentRequest) or getattr(req, "ragserve_private", False):
                continue  # an ordinary request, or a document that was removed meanwhile
            complete = extend_end(req) >= len(document.ids)
            if (
                document.analyse
                and complete
                and len(document.ids) <= TOGETHER  # or all other requests would wait for long
                and (document.analysis is None or not document.analysis.is_whole)
            ):
                # its KV is complete: what needs its analysis computes it then
                stages.run("new analysis", stages.nobody, self._analyse, document)

    @staticmethod
    def _computed(reqs: Sequence[Any], work: Callable[[Sequence[Any]], None]) -> None:
        """Compute documents together; where that fails one by one, so that only those end whose own does."""

        def each(message: str) -> None:
            for req in reqs:
                stages.run("document", stages.ending([req]), work, [req])

        if reqs:
            stages.run("document", each if len(reqs) > 1 else stages.ending(reqs), work, reqs)

    def _extended(self) -> None:
        timer, self._timer = self._timer, None
        self.composer.gather.finish()  # attention has waited in every layer; what did not ask the pool must
        if timer is not None:
            timer.mark("extend")

    def _analyse(self, document: DocumentRequest) -> None:
        document.analysis = self.analyses.analyse(document.key, document.ids)

    def before_result(self, batch: Any) -> None:
        """Send the reports of an extend batch with its tokens, which SGLang is about to wait for anyway."""
        for req in batch.reqs:
            if is_composed(req) and req.ragserve.outcome.timer is not None:
                stages.run_alike("report", stages.ending([req]), self._report, req)

    def _report(self, req: Any) -> None:
        report = report_of(req.ragserve)
        req.ragserve.end_report()
        req.customized_info = {**(req.customized_info or {}), PLAN_FIELD: [report.to_json()]}
        if self._counts:
            context_metrics().observe(report)

    def before_schedule(self, scheduler: Any) -> None:
        """Before a scheduling step: let go of host pages that the device has read, for which a queued request
        may wait while others only decode, forget the requests that SGLang has taken off its queues, and bring
        on those that wait for their selection, also while the batch has no room for them."""
        self.releases.poll()
        if self.stage.waits:
            self.stage.drop_gone([*scheduler.waiting_queue, *scheduler.grammar_manager.grammar_queue])
            self.stage.advance()

    def shift_positions(self, forward_batch: Any) -> None:
        """After `ForwardBatch.init_new`: positions follow the full length of composed contexts."""
        if forward_batch.positions is None or not len(forward_batch.positions):
            return
        offset = self._offsets[forward_batch.req_pool_indices]
        if forward_batch.forward_mode.is_decode():
            forward_batch.positions = forward_batch.positions + offset
        elif forward_batch.extend_seq_lens is not None:
            counts = forward_batch.extend_seq_lens.to(torch.int64)
            shift = torch.repeat_interleave(offset, counts, output_size=forward_batch.extend_num_tokens)
            forward_batch.positions = forward_batch.positions + shift.to(forward_batch.positions.dtype)

    def probe(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Measure what each way of selecting keeps of a probe, see `recall_probe`. Raises PlanError."""
        with stages.together(), forward_stream(self._engine.model_runner):
            return recall_probe.answer(self._engine, body)

    def score(self, body: Mapping[str, Any], fingerprint: str) -> dict[str, Any]:
        """Score documents for a question by their analyses, see `document_scorer`. Raises PlanError."""
        with stages.together(), forward_stream(self._engine.model_runner):
            return self._scorer.answer(body, fingerprint)

    def attend(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """What a question attends to in the turns of a session, see `session_attention`. Raises PlanError."""
        with stages.together(), forward_stream(self._engine.model_runner):
            return self._turns.answer(body)

    def _unlock(self, contexts: Sequence[ComposedContext], loading: torch.cuda.Stream | None = None) -> None:
        """Unlock device documents now, because later writes to their slots are behind us on the stream, and
        host pages once the copies have run, on ``loading`` if that is not the current stream.

        Device locks decide what SGLang can evict and admit, so they must end at the same step on every rank.
        """
        if self._device.type != "cuda":
            for context in contexts:
                self._locator.unlock(context)
            return
        host_keys: list[str] = []
        for context in contexts:
            host_keys += self._locator.unlock_device(context)
        if host_keys:
            event = torch.cuda.Event()
            event.record() if loading is None else event.record(loading)
            self.releases.add(event, lambda: self._unpin(host_keys))

    def _unpin(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._tiers.unpin(key)


def _lags(req: Any) -> bool:
    """True for a request whose choices of pages have a lag."""
    state = getattr(req, "ragserve_decode", None)
    return state is not None and state.options.lag_steps > 0
