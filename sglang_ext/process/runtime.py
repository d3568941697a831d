"""The document cache of one scheduler process, as SGLang's tree, the hooks and the control operations reach
it.

Every method runs on the scheduler's thread.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import torch

from sglang_ext.analysis.texts import Texts
from sglang_ext.context.compose.request import is_composed
from sglang_ext.context.scheduler import sglang_req
from sglang_ext.context.scheduler.composition import AnalysisConfig, Composition
from sglang_ext.context.scheduler.sglang_req import DocumentRequest
from sglang_ext.context.scheduler.slot_usage import SlotUsage
from sglang_ext.documents.device import DeviceDocuments
from sglang_ext.documents.session_pages import SessionPages
from sglang_ext.ranks.rank_failures import FailureVote
from sglang_ext.ranks.ranks import Ranks
from sglang_ext.sglang_internals import sglang_requests
from sglang_ext.sglang_internals.model import NotComposable
from sglang_ext.stages import stages
from sglang_ext.versions import tp_group
from sglang_ext.wire.protocol import (
    PLAN_FIELD,
    ContextPlan,
    PlanError,
    SystemText,
    document_key,
    pieces_of,
)

if TYPE_CHECKING:
    from sglang_ext.attention.decode_runtime import DecodeRuntime
    from sglang_ext.documents.radix import DocumentRadixCache
    from sglang_ext.documents.tier_store import TierStore

log = logging.getLogger(__name__)


class ContextRuntime:
    """Reads the plans of requests and keeps documents' KV; the tree's observer. Per rank.

    ``composition`` is None, and ``unsupported`` says why, for a model whose KV cannot be composed: then every
    plan is refused, so no composed and no document request exists.
    """

    def __init__(
        self,
        *,
        model_runner: Any,
        tree: DocumentRadixCache,
        tiers: TierStore,
        fingerprint: str,
        block: int,
        analysis: AnalysisConfig,
        texts: Callable[[], Texts],
        attention: DecodeRuntime | None = None,
        sessions_on_host: bool = False,
        unsupported: str | None = None,
    ) -> None:
        """``block``: tokens of a host page. ``texts`` loads the tokenizer, when it is first needed.
        ``attention``: sparse decoding's `DecodeRuntime`, None where it is off. ``sessions_on_host``: keep
        what is evicted of composed sessions there. ``unsupported``: why nothing can be composed, where that
        is known already; else the model is tried.
        """
        self.tree = tree
        self.tiers = tiers
        self.fingerprint = fingerprint
        self.profile = analysis.profile
        self.prefix = analysis.prefix
        # without documents the ranks have nothing to agree on, and may not even run in step
        self.ranks = Ranks.voting(tp_group(model_runner) if unsupported is None else None)
        stages.vote_by(FailureVote(model_runner).alike)
        self.slots = SlotUsage(tree)
        self.documents = DeviceDocuments(model_runner, tree, tiers)
        self._sessions: SessionPages | None = None
        if sessions_on_host:
            self._sessions = SessionPages(model_runner.token_to_kv_pool, tiers, fingerprint)
        self.composition: Composition | None = None
        self.unsupported = unsupported
        self.model_runner = model_runner
        self._pool = model_runner.token_to_kv_pool
        # tokens of a prompt that SGLang takes in any case; its limit lies a few tokens higher
        self._longest = min(model_runner.model_config.context_len, model_runner.max_total_num_tokens) - 16
        self._attention = attention
        self._at_ingestion = analysis.at_ingestion
        if unsupported is not None:
            return
        try:
            self.composition = Composition(
                model_runner=model_runner,
                tree=tree,
                tiers=tiers,
                is_removed=self.documents.is_removed,
                ranks=self.ranks,
                block=block,
                config=analysis,
                texts=texts,
                sessions=self._sessions,
                attention=attention,
            )
            self.documents.on_removed = self.composition.analyses.forget
        except NotComposable as error:
            self.unsupported = str(error)
        except Exception as error:  # a model that is built otherwise may fail anywhere
            log.exception("composed contexts failed with this model")
            self.unsupported = (
                f"composed contexts failed with this model when the engine started ({error!r}): use strategy "
                "'prefix' or 'full', and see the log"
            )
        reasons = [reason for reason in self.ranks.gather(self.unsupported) if reason is not None]
        if reasons:
            self.unsupported, self.composition = reasons[0], None
            log.warning("composed contexts are off: %s", reasons[0])
        if self.composition is not None:
            self.documents.sessions = self._sessions

    # requests arrive

    def on_request(self, req: Any) -> None:
        """Read the plan of a new request. Never raises, which would end the scheduler: a bad plan ends the
        request with the reason.
        """
        if (reason := sglang_req.outside_vocabulary(req)) is not None:
            self.refuse(req, reason)
            return
        params = req.sampling_params.custom_params
        text = params.get(PLAN_FIELD) if isinstance(params, dict) else None
        if text is None:
            self.documents.exact_request(req)
            return
        try:
            plan = ContextPlan.from_json(str(text), len(req.origin_input_ids))
            if self.composition is None:
                raise PlanError(str(self.unsupported))
            ids = array("q", req.origin_input_ids)
            if plan.operation == "document":
                text = SystemText(ids) if plan.first else ids
                key = document_key(plan.namespace, self.fingerprint, text)
                analyse = plan.analyse and self._at_ingestion and not plan.first
                req.ragserve = DocumentRequest(
                    key, plan.namespace, ids, analyse, plan.lasting, first=plan.first
                )
                req.extra_key = key
                sglang_req.prefill_whole_pages(req, self.tree.page_size, self._longest)
                self.documents.document_request(req, plan.namespace)
                return
            pieces = pieces_of(ids, plan.spans)
            keys = tuple(
                document_key(plan.owner(number), self.fingerprint, piece)
                for number, piece in enumerate(pieces)
            )
            self.composition.attach(req, plan, keys)
            if plan.session is not None:
                self.documents.caching_request(req)
        except PlanError as error:
            self.refuse(req, str(error))
        except Exception as error:  # a client's plan may hold anything
            log.exception("a context plan failed")
            self.refuse(req, f"the plan cannot be carried out: {error!r}")

    def refuse(self, req: Any, reason: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> None:
        """End a new request that asks for something that cannot be served."""
        sglang_requests.end(req, f"ragserve: {reason}", status)

    # the tree's observer

    def is_composed(self, req: Any) -> bool:
        """True if the request's prefix is a composed context."""
        return is_composed(req)

    def in_session(self, req: Any) -> bool:
        """True for a composed request of a session."""
        return is_composed(req) and req.ragserve.plan.session is not None

    def exact_tokens(self, req: Any, tokens: int) -> int:
        """How many of a request's first ``tokens`` have KV that no sparse decode step has touched. All of a
        composed session count: its key is one of approximate KV, and its next turn relies on all of it."""
        if self._attention is None or is_composed(req):
            return tokens
        return int(self._attention.exact_tokens(req, tokens))

    def before_release(self, req: Any, tokens: int) -> None:
        """A request has ended and still has its row and slots."""
        if self.in_session(req) and sglang_req.is_aborted(req):
            req.ragserve_private = True
        if self._attention is not None:
            failed = stages.ending([req])
            stages.run("release", failed, self._attention.on_finished, req, tokens)
            stages.run("release", failed, self._attention.give_back, req)

    def on_document(self, req: Any, slots: torch.Tensor) -> None:
        """Copy an ended document request's KV to the other tiers before the tree takes its slots."""
        document = getattr(req, "ragserve", None)
        if isinstance(document, DocumentRequest) and len(slots) >= len(document.ids):
            stages.run("save", stages.ending([req]), self._save, document, slots)

    def _save(self, document: DocumentRequest, slots: torch.Tensor) -> None:
        from sglang_ext.documents.pages.types import DocumentMeta

        slots = slots[: len(document.ids)].to(torch.int64)
        layers = range(self._pool.layer_num)
        k = [self._pool.get_key_buffer(layer) for layer in layers]
        v = [self._pool.get_value_buffer(layer) for layer in layers]
        self.documents.cached(document.key)
        meta = DocumentMeta(
            document.key, document.namespace, document.ids, len(document.ids), self.fingerprint
        )
        analysis = b"" if document.analysis is None else document.analysis.encode()
        self.tiers.put(meta, k, v, analysis, slots=slots, to_disk=document.lasting)

    def on_finished(self) -> None:
        """A request has ended and its slots are free or in the tree."""
        stages.run("ended", stages.nobody, self.documents.request_ended)

    def on_cached(self, req: Any, node: Any) -> None:
        """The KV of a request's whole pages is in the tree; it ends in this node."""
        if self._attention is not None and getattr(req, "ragserve_prefill", None) is not None:
            stages.run("lines", stages.nobody, self._attention.on_cached, req, node)

    def before_eviction(self, node: Any) -> None:
        """A node is being evicted; its slots still hold its KV."""
        if self.composition is not None and self._sessions is not None:
            stages.run("save", stages.nobody, self._sessions.save, node)

    def on_evicted(self, node: Any) -> None:
        """A node has left the tree."""
        if self._attention is not None:
            stages.run("lines", stages.nobody, self._attention.on_evicted, node)

    # order

    def sweep(self) -> None:
        """Release what ended requests still hold, after waiting for the device."""
        if self.composition is not None:
            self.composition.releases.wait()
        self.documents.sweep()

    def check_integrity(self) -> None:
        """Raise where slots or pages are lost or counted twice. SGLang's own idle check sums up the device;
        this one covers the documents on it and the tiers below.
        """
        self.sweep()
        self.documents.check()
        self.tiers.check_integrity()
