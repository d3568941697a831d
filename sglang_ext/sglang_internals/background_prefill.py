"""Background prefills run in short chunks, so that user requests can be batched with the next chunk.

SGLang continues the one request that it prefills in chunks before any other and with all of a step's tokens.
Here a chunk of a marked request leaves the rest of them to others. Two requests in chunks at a time would end
the scheduler, so one that does not fit waits, as it would in SGLang, and the marked request then goes on in
SGLang's own chunks. The slots of the chunks to come are kept free.

A composed request is computed in one piece, which aborts between layers when it is cancelled
(`stages/cancelled_pass.py`). Documents are computed in one piece and are not marked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sglang_ext.sglang_internals.sglang_requests import slots_to_come
from sglang_ext.versions import prefix_tokens, reserve_tokens
from sglang_ext.wire.protocol import BACKGROUND_FIELD

NEXT_CHUNK = "sglang.srt.managers.schedule_policy.PrefillAdder.add_chunked_req"


class OwnChunk(int):
    """Tokens of a chunk, as the server itself marks a request. A client's number is of another type."""


def check_mark(params: dict[str, Any]) -> None:
    """Check the mark in sampling parameters. Raises ValueError for one that the server has not set."""
    custom = params.get("custom_params")
    if not isinstance(custom, dict) or BACKGROUND_FIELD not in custom:
        return
    if not isinstance(custom[BACKGROUND_FIELD], OwnChunk):
        raise ValueError(f"{BACKGROUND_FIELD} is the server's own; omit it")
    params["custom_params"] = custom | {BACKGROUND_FIELD: int(custom[BACKGROUND_FIELD])}


def on_request(req: Any) -> None:
    """Note the chunks of a new request that is marked or, where it is composed, that it may be cancelled."""
    params = req.sampling_params.custom_params
    if isinstance(params, dict):
        chunk = params.get(BACKGROUND_FIELD, 0)
        chunk = chunk if type(chunk) is int and chunk > 0 else 0
        if getattr(req, "ragserve", None) is None:
            req.ragserve_chunk = chunk
        else:
            req.ragserve_background = chunk > 0


def admit(adder: Any, req: Any, align: int | None, add: Callable[[], Any]) -> Any:
    """Run around `PrefillAdder.add_one_req`; ``add`` calls the original. ``align``: SGLang cuts prompts at
    multiples of it, if not None."""
    marked = getattr(adder, "ragserve_marked", None)  # whose chunk the step has already
    if marked is not None:
        tokens = len(req.full_untruncated_fill_ids) - prefix_tokens(req)
        if adder.ceil_paged_tokens(tokens) > adder.rem_chunk_tokens:
            from sglang.srt.managers.schedule_policy import AddReqResult

            marked.ragserve_chunk = 0
            return AddReqResult.OTHER
        return add()
    if align is not None:
        req.ragserve_chunk = 0
    with _limited(adder, req):
        return add()


def around_next_chunk(original: Callable[..., Any], adder: Any, req: Any) -> Any:
    """Run around `PrefillAdder.add_chunked_req`, which returns the request if more chunks are to come."""
    with _limited(adder, req) as limited:
        left = original(adder, req)
    if limited and left is not None:
        adder.ragserve_marked = req
        answer = req.sampling_params.max_new_tokens or 0
        reserve_tokens(adder, slots_to_come(req, adder.page_size) + answer)
    return left


@contextmanager
def _limited(adder: Any, req: Any) -> Iterator[bool]:
    """Show SGLang no more tokens of the step than a chunk of the request has; yields True if that is less."""
    chunk = getattr(req, "ragserve_chunk", 0)
    if not chunk:
        yield False
        return
    room, chunk = adder.rem_chunk_tokens, max(chunk // adder.page_size, 1) * adder.page_size
    if room is None or room <= chunk:
        yield False
        return
    adder.rem_chunk_tokens = chunk
    try:
        yield True
    finally:
        adder.rem_chunk_tokens += room - chunk
