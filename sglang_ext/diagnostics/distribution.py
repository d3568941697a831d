"""Sends the whole distributions of a request's first tokens, and lets a request answer with given tokens.
Strategies are compared by both: over one and the same answer, token by token.

The given tokens are forced where SGLang samples, so they are never part of the prompt: what a strategy
selects, keeps and recomputes is what it would be for an answer of its own. SGLang's own `top_logprobs_num`
sends Python lists for every generated token; over a whole vocabulary that costs more than the answer.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from sglang_ext.sglang_internals.seeded_sampling import next_position
from sglang_ext.wire.protocol import DISTRIBUTION_FIELD, FORCED_FIELD, MAX_TRACED, PlanError


@dataclass(slots=True)
class TokenTrace:
    """Distributions of the first ``count`` tokens are sent, and the first tokens are ``forced``.
    ``position``: number of the answer's token that was sampled last."""

    count: int
    forced: list[int]
    position: int = -1


def asks(req: Any) -> bool:
    """True for a new request that asks for distributions or given tokens, rightly or not."""
    params = req.sampling_params.custom_params
    return isinstance(params, dict) and bool({DISTRIBUTION_FIELD, FORCED_FIELD} & params.keys())


def on_request(req: Any) -> str | None:
    """Read what a new request asks for; return why it is refused, None if it is not."""
    if not asks(req):
        return None
    params = req.sampling_params.custom_params
    try:
        req.ragserve_trace = _trace(params, req.vocab_size or 2**31)
    except PlanError as error:
        return str(error)
    except (ValueError, RecursionError) as error:
        return f"{FORCED_FIELD} is not JSON: {error}"
    return None


def _trace(params: dict[str, Any], vocab_size: int) -> TokenTrace:
    count = params.get(DISTRIBUTION_FIELD, 0)
    if not isinstance(count, int) or not 0 <= count <= MAX_TRACED:
        raise PlanError(f"{DISTRIBUTION_FIELD} is the number of tokens, at most {MAX_TRACED}")
    forced = json.loads(str(params.get(FORCED_FIELD, "[]")))
    if not isinstance(forced, list) or len(forced) > MAX_TRACED:
        raise PlanError(f"{FORCED_FIELD} is a JSON list of at most {MAX_TRACED} token ids")
    if any(type(token) is not int or not 0 <= token < vocab_size for token in forced):
        raise PlanError(f"{FORCED_FIELD} has a token id that is not between 0 and {vocab_size - 1}")
    return TokenTrace(int(count), forced)


def is_traced(req: Any) -> bool:
    """True for a request that wants distributions or has forced tokens."""
    return getattr(req, "ragserve_trace", None) is not None


def traced(reqs: Any) -> Iterator[tuple[int, Any, TokenTrace]]:
    """Rows of a batch that want something: (row, request, what it wants)."""
    for row, req in enumerate(reqs):
        if is_traced(req):
            yield row, req, req.ragserve_trace


def before_sampling(forward_batch: Any, logits: torch.Tensor | None) -> None:
    """Put distributions into the ``meta_info`` of the rows that want them, and leave rows with forced tokens
    nothing else to sample. ``logits`` [rows, vocabulary], changed in place.

    A distribution is base64 of little-endian float32 log-probabilities [vocabulary]. For measurements: it
    waits for the forward pass, which costs overlap.
    """
    if logits is None:
        return
    for row, req, trace in traced(forward_batch.ragserve_reqs):
        trace.position = next_position(req, forward_batch, trace.position)
        if trace.position < trace.count:
            _send(req, trace.position, logits[row])
        if trace.position < len(trace.forced):
            logits[row] = torch.finfo(logits.dtype).min
            logits[row, trace.forced[trace.position]] = 0.0


def _send(req: Any, position: int, logits: torch.Tensor) -> None:
    """Append a token's distribution. The chunks of a prompt, and a request that was retracted, come to the
    same token again: the last one counts."""
    logprobs = logits.float().log_softmax(-1).cpu().numpy().astype("<f4")
    found = (req.customized_info or {}).get(DISTRIBUTION_FIELD, [])[:position]
    text = base64.b64encode(logprobs.tobytes()).decode()
    req.customized_info = {**(req.customized_info or {}), DISTRIBUTION_FIELD: [*found, text]}
