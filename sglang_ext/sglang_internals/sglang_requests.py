"""Fields of SGLang's `Req` that ragserve sets for requests of any kind."""

from __future__ import annotations

from array import array
from http import HTTPStatus
from typing import Any

from sglang_ext.versions import extend_end

_KINDS = {
    HTTPStatus.BAD_REQUEST: "BadRequestError",
    HTTPStatus.SERVICE_UNAVAILABLE: "Unavailable",
    HTTPStatus.INTERNAL_SERVER_ERROR: "InternalServerError",
}


def limit_answer(req: Any, context_length: int) -> None:
    """Let a request of which SGLang is about to see less generate no further than the context: SGLang would
    count from what it sees.
    """
    room = context_length - len(req.origin_input_ids) - 1
    params = req.sampling_params
    if params.max_new_tokens is None or params.max_new_tokens > room:
        params.max_new_tokens = max(0, room)


def slots_to_come(req: Any, page_size: int) -> int:
    """Return the slots, whole pages, that the chunks to come take of a request that is prefilled in chunks;
    none for None."""
    if req is None:
        return 0
    tokens = len(req.full_untruncated_fill_ids) - extend_end(req)
    return (-(-tokens // page_size) + 1) * page_size  # its last page may have room for none of them


def end(req: Any, message: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> None:
    """Finish the request with an error, as SGLang does for bad requests but without its log line: a miss is
    no error.
    """
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    req.ragserve = None
    req.extra_key = f"ended:{req.rid}"
    req.origin_input_ids = req.origin_input_ids_unpadded = array("q", [0])
    req.full_untruncated_fill_ids = array("q")
    req.grammar, req.return_logprob, req.logprob_start_len = None, False, -1
    req.to_finish = FINISH_ABORT(message, status, _KINDS.get(status, "InternalServerError"))


def tell(req: Any, field: str, text: str) -> None:
    """Send a report with the request's last token: SGLang sends one value per token."""
    count = len(req.output_ids_through_stop)
    if count:
        req.customized_info = (req.customized_info or {}) | {field: [None] * (count - 1) + [text]}
