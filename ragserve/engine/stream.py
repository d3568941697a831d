"""Translate requests to SGLang's fields, and its outputs (the same over HTTP and in process) to chunks."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from ragserve.engine.base import EngineTimings, EngineUsage, GenerateChunk, GenerateRequest, Sampling
from ragserve.errors import EngineError, InvalidRequest, RagserveError, TooManyRequests, Unavailable
from sglang_ext.sglang_internals.stop_strings import held_back
from sglang_ext.wire.protocol import (
    DECODE_FIELD,
    DISTRIBUTION_FIELD,
    EXACT_STRATEGIES,
    FORCED_FIELD,
    FULL_KEY,
    MISSING_PREFIX,
    PLAN_FIELD,
    PREFILL_FIELD,
    ContextPlan,
    ContextReport,
    DecodeReport,
    PrefillReport,
    Span,
    prefix_key,
)


class DocumentsMissing(Exception):
    """Documents of a composed request are in no tier. ``spans`` holds their indices in the plan."""

    def __init__(self, spans: list[int]) -> None:
        super().__init__(f"{len(spans)} documents are not cached")
        self.spans = spans


def new_rid(name: str) -> str:
    """Make an id unique: SGLang refuses that of a running request, and clients may repeat theirs."""
    return f"{name}-{uuid.uuid4().hex[:8]}"


def timed_out(seconds: float) -> EngineError:
    """The error for an answer that took longer than ``engine_timeout_s``."""
    return EngineError(
        f"No answer within {seconds:g} s.", hint="Raise --engine-timeout-s or lower max_new_tokens."
    )


def payload(request: GenerateRequest, rid: str) -> dict[str, Any]:
    """Build the fields of SGLang's ``GenerateReqInput``.

    ``extra_key`` separates prefix caches: per namespace, so that no tenant's cached tokens answer another's
    query, per session, whose caches no other request may use, and per request for strategy ``full``, so that
    everything is prefilled."""
    s = request.sampling
    sampling: dict[str, Any] = {
        "max_new_tokens": s.max_new_tokens,
        "temperature": s.temperature,
        "top_p": s.top_p,
        "top_k": s.top_k,
        "frequency_penalty": s.frequency_penalty,
        "presence_penalty": s.presence_penalty,
    }
    if s.stop:
        sampling["stop"] = list(s.stop)
    if s.ignore_eos:
        sampling["ignore_eos"] = True
    if s.seed is not None:
        sampling["sampling_seed"] = s.seed
    if s.special_tokens:
        sampling["skip_special_tokens"] = False
    sampling |= s.constraint
    custom: dict[str, Any] = {}
    if request.distributions:
        custom[DISTRIBUTION_FIELD] = request.distributions
    if request.forced:
        custom[FORCED_FIELD] = json.dumps(list(request.forced))
    fields: dict[str, Any] = {
        "rid": rid,
        "input_ids": request.input_ids,
        "sampling_params": sampling,
        "stream": True,
    }
    if request.decode:
        custom[DECODE_FIELD] = json.dumps(dict(request.decode))
    if request.prefill:
        custom[PREFILL_FIELD] = json.dumps(dict(request.prefill))
    if request.strategy not in EXACT_STRATEGIES:
        plan = ContextPlan(
            "compose",
            request.namespace,
            request.strategy,
            request.spans,
            request.options,
            request.scores,
            request.session,
            request.computed,
            request.owners,
        )
        custom[PLAN_FIELD] = plan.to_json()
    elif request.strategy == "full":
        fields["extra_key"] = f"{FULL_KEY}{rid}"
    else:
        session = request.session
        fields["extra_key"] = prefix_key(request.namespace) if session is None else session.key
    if custom:
        sampling["custom_params"] = custom
    return fields


def document_payload(
    request: GenerateRequest, span: Span, rid: str, *, analyse: bool, lasting: bool = True
) -> dict[str, Any]:
    """Build the request that prefills one document of a composed request alone, for the cache.

    ``analyse`` also computes its analysis, ``lasting`` writes it to disk."""
    ids, namespace = request.input_ids[span.start : span.end], request.owner(span)
    document = GenerateRequest(
        request.rid, ids, namespace, "prefix", Sampling(max_new_tokens=1), decode=request.decode
    )
    fields = payload(document, rid)
    first = request.system and span.start == 0
    options = {"analyse": analyse, "lasting": lasting} | ({"first": True} if first else {})
    plan = ContextPlan("document", namespace, options=options)
    fields["sampling_params"]["custom_params"] = {PLAN_FIELD: plan.to_json()}
    return fields


class StreamReader:
    """Turns one request's cumulative outputs into deltas and times its first token.

    What may begin a stop string is held back until more is known: an engine without our hooks sends it, and
    does not take it back when the stop string is complete."""

    def __init__(self, prompt_tokens: int, stops: Sequence[str] = ()) -> None:
        self._prompt_tokens = prompt_tokens
        self._stops = stops
        self._text = ""
        self._sent = 0
        self._start = time.perf_counter()
        self._first: float | None = None

    def read(self, out: dict[str, Any]) -> GenerateChunk:
        """Translate one output. Raises DocumentsMissing or the RagserveError of an error output."""
        if "error" in out:
            raise _error(out["error"])
        meta = out["meta_info"]
        reason = meta.get("finish_reason")
        if isinstance(reason, dict) and reason.get("type") == "abort" and reason.get("status_code"):
            message = str(reason.get("message", "aborted"))
            if message.startswith(MISSING_PREFIX):
                raise DocumentsMissing(json.loads(message.removeprefix(MISSING_PREFIX)))
            raise _error({"message": message, "code": reason["status_code"]})
        if self._first is None:
            self._first = time.perf_counter()
        delta = self._delta(out.get("text") or "", reason)
        # Not meta_info's prompt tokens: a composed prompt is shorter in the engine (placeholders for the kept
        # context, and the question).
        usage = EngineUsage(
            self._prompt_tokens, meta.get("cached_tokens", 0), meta.get("completion_tokens", 0)
        )
        finish = reason.get("type") if isinstance(reason, dict) else None
        reports = meta.get(PLAN_FIELD)
        context = ContextReport.from_json(reports[0]) if reports and reports[0] else None
        reports = meta.get(DECODE_FIELD)
        decode = DecodeReport.from_json(reports[-1]) if reports and reports[-1] else None
        reports = meta.get(PREFILL_FIELD)
        prefill = PrefillReport.from_json(reports[-1]) if reports and reports[-1] else None
        distributions = tuple(each for each in meta.get(DISTRIBUTION_FIELD) or () if each is not None)
        ids = tuple(out.get("output_ids") or ()) if finish else ()
        return GenerateChunk(
            delta,
            usage,
            self._timings(meta),
            finish,
            context,
            decode,
            distributions=distributions,
            output_ids=ids,
            prefill=prefill,
        )

    def _delta(self, text: str, reason: Any) -> str:
        """Return the part of a cumulative text that is new and certain. ``reason``: why it has ended, if it
        has."""
        before, self._text = self._text, text
        end = len(text)
        if reason is None:
            end -= held_back(text, self._stops)
        elif isinstance(reason, dict) and reason.get("matched") in self._stops and end <= len(before):
            end -= held_back(text, (reason["matched"],))  # cut where its beginning had been sent
        delta, self._sent = text[self._sent : end], max(self._sent, end)
        return delta

    def _timings(self, meta: dict[str, Any]) -> EngineTimings:
        """Split the TTFT into queue and prefill: the forward pass and the way back.

        SGLang also reports ``queue_time`` 0.0 if it does not know; it does if it reports the start of the
        forward pass."""
        if "forward_entry_time" not in meta or self._first is None:
            return EngineTimings()
        queue = meta["queue_time"]
        return EngineTimings(queue * 1e3, max(0.0, (self._first - self._start - queue) * 1e3))


def note_failure(out: dict[str, Any], failed: dict[str, RagserveError]) -> None:
    """Note the error of an output of several requests, if it is one, by its request's id. Raises one that is
    of all."""
    try:
        StreamReader(0).read(out)
    except RagserveError as error:
        if "meta_info" not in out:
            raise
        failed[out["meta_info"]["id"]] = error


def _error(error: Any) -> RagserveError:
    message = str(error.get("message", error)) if isinstance(error, dict) else str(error)
    code = error.get("code") if isinstance(error, dict) else None
    if code == HTTPStatus.BAD_REQUEST:
        return InvalidRequest(f"The engine refused the request: {message}")
    if code in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS):
        if "queue" in message.lower():
            return TooManyRequests("The engine's queue is full.", hint="Retry in a moment.")
        return Unavailable(f"The engine is not available: {message}", hint="Retry; see the server's log.")
    return EngineError(f"The engine failed: {message}", hint="See the server's log.")
