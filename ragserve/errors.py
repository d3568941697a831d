"""The tree of errors. Each says what happened and what to do.

    RagserveError (500)
    ├── InvalidRequest (400)         malformed request, or a value out of range
    │   ├── PromptTooLong (400)      question (and history) leave no room in the model's context
    │   └── DocumentsTooLong (400)   documents do not fit into it
    ├── Unauthorized (401)           missing or wrong API key
    ├── Forbidden (403)              a web page of another origin, or a right that the API key lacks
    ├── NotFound (404)               namespace, document, job or session
    ├── RequestTimeout (408)         a body that stopped coming
    ├── Conflict (409)               e.g. another embedding model, a session's document removed
    ├── TooLarge (413)               a body or file over its limit
    ├── UnsupportedDocument (415)    no parser, encrypted, corrupt or empty
    ├── TooManyRequests (429)        the engine's queue is full, or a limit of the API key
    ├── EngineError (502)            the engine answered with an error
    ├── Unavailable (503)            not ready yet, shutting down, or the engine is gone
    │   └── ModelUnavailable (503)   a remote embedder or reranker gives no answer of use
    └── StorageFull (507)            the disk is full

The HTTP body of an error, and the data of an SSE ``error`` event, is ``{"error": {...}}`` from
`RagserveError.body`: the shape of OpenAI's errors with a hint and the request id added.
"""

from __future__ import annotations

import errno
from typing import Any, ClassVar

__all__ = [
    "Conflict",
    "DocumentsTooLong",
    "EngineError",
    "Forbidden",
    "InvalidRequest",
    "ModelUnavailable",
    "NotFound",
    "PromptTooLong",
    "RagserveError",
    "RequestTimeout",
    "StorageFull",
    "TooLarge",
    "TooManyRequests",
    "Unauthorized",
    "Unavailable",
    "UnsupportedDocument",
]


class RagserveError(Exception):
    """Base of all errors that users see. ``code`` is stable, for machines; ``hint`` says what to do.
    ``request_id``: in clients, of the request that failed, as the server's log names it."""

    status: ClassVar[int] = 500
    default_code: ClassVar[str] = "internal_error"

    def __init_subclass__(cls, *, status: int | None = None, code: str | None = None) -> None:
        super().__init_subclass__()
        cls.status = status or cls.status
        cls.default_code = code or cls.default_code

    def __init__(
        self, message: str, *, hint: str = "", code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.code = code or self.default_code
        self.param = param
        self.request_id: str | None = None

    def __str__(self) -> str:
        if not (self.message and self.hint):
            return self.message or self.hint
        end = "" if self.message.endswith((".", "!", "?", ":")) else "."  # of another library's error
        return f"{self.message}{end} {self.hint}"

    def body(self, request_id: str | None = None) -> dict[str, Any]:
        """The JSON body of the HTTP error and of the SSE ``error`` event."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": str(self),
                "type": kind,
                "code": self.code,
                "param": self.param,
                "hint": self.hint or None,
                "request_id": request_id,
            }
        }


class InvalidRequest(RagserveError, status=400, code="invalid_request"): ...


class PromptTooLong(InvalidRequest, code="prompt_too_long"): ...


class DocumentsTooLong(InvalidRequest, code="documents_too_long"): ...


class Unauthorized(RagserveError, status=401, code="invalid_api_key"): ...


class Forbidden(RagserveError, status=403, code="forbidden"): ...


class NotFound(RagserveError, status=404, code="not_found"): ...


class RequestTimeout(RagserveError, status=408, code="request_timeout"): ...


class Conflict(RagserveError, status=409, code="conflict"): ...


class TooLarge(RagserveError, status=413, code="too_large"): ...


class UnsupportedDocument(RagserveError, status=415, code="unsupported_document"): ...


class TooManyRequests(RagserveError, status=429, code="too_many_requests"):
    """``retry_after_s``: seconds after which to try again."""

    def __init__(self, message: str, *, retry_after_s: int = 1, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.retry_after_s = retry_after_s


class EngineError(RagserveError, status=502, code="engine_error"): ...


class Unavailable(RagserveError, status=503, code="unavailable"): ...


class ModelUnavailable(Unavailable, code="model_unavailable"):
    """A job that meets it is given back with its work so far, to be taken up again."""


class StorageFull(RagserveError, status=507, code="storage_full"): ...


_PERMIT = "Make it readable and writable for this user, or use another --data-dir."
_MORE_FILES = "Repeat it; if it happens again, raise the limit of open files (ulimit -n)."
_ADVICE = {
    errno.EROFS: "Make it writable, or use another --data-dir.",
    errno.EACCES: _PERMIT,
    errno.EPERM: _PERMIT,
    errno.EMFILE: _MORE_FILES,
    errno.ENFILE: _MORE_FILES,
}


def explained(error: OSError) -> RagserveError | None:
    """Make the user's error of an error of the file system; None for one that users cannot end."""
    what = f"{error.filename or 'A file'}: {error.strerror}."
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFull(what, hint="Free some space, or use another --data-dir.")
    advice = _ADVICE.get(error.errno or 0)
    return None if advice is None else Unavailable(what, hint=advice)
