"""Errors of a client, and whether a request that failed is sent again."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from pydantic import ValidationError

from ragserve import errors
from ragserve.client.calls import Call, unsendable

Outcome = httpx.Response | httpx.TransportError
_KINDS = [kind for name in errors.__all__ if (kind := getattr(errors, name)) is not errors.RagserveError]
_BY_CODE = {kind.default_code: kind for kind in _KINDS}
# A status alone says less than a code: 415 may also be a wrong Content-Type, 403 another program's.
_BY_STATUS = {kind.status: kind for kind in _KINDS if errors.RagserveError in kind.__bases__} | {
    415: errors.InvalidRequest
}
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 30.0


@contextmanager
def translated(url: str) -> Iterator[None]:
    """Turn httpx's errors, and those of text that cannot be sent or read, into `ragserve.errors`."""
    try:
        yield
    except httpx.TimeoutException as error:
        raise errors.Unavailable(
            f"{url} did not answer in time ({type(error).__name__}).",
            hint="Give the client a longer timeout_s, or see whether the server is overloaded.",
            code="timeout",
        ) from error
    except httpx.TransportError as error:
        raise errors.Unavailable(
            f"No answer from {url}: {str(error).rstrip('.')}.",
            hint="Is the server running there? ragserve serve",
        ) from error
    except httpx.InvalidURL as error:
        raise errors.InvalidRequest(
            f"{url!r} is not a URL: {error}", hint="Give something like http://127.0.0.1:30000."
        ) from error
    except UnicodeEncodeError as error:
        raise unsendable(error) from error
    except (ValidationError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise errors.Unavailable(
            f"{url} did not answer as a ragserve server does.", hint="Is that address a ragserve server?"
        ) from error


def pause_before_retry(call: Call[Any], outcome: Outcome, attempt: int, retries: int) -> float | None:
    """Seconds after which to send a request again; None if it is not to be sent again.

    Every request is sent again if it did not reach the server or was refused with 429. One that changes
    nothing is also sent again after 503 and a lost connection. Nothing is sent again after a timeout, or if
    the server asks for more patience than 30 s."""
    if attempt >= retries or not _is_worth_a_retry(call, outcome):
        return None
    own = _FIRST_PAUSE_S * 2**attempt * random.uniform(0.5, 1.0)
    wanted = _retry_after_s(outcome) if isinstance(outcome, httpx.Response) else 0.0
    return max(own, wanted) if wanted <= _LONGEST_PAUSE_S else None


def may_pass(error: errors.RagserveError) -> bool:
    """Return whether a server that fails so may answer later: it is being restarted, or a rate is used up."""
    cause = error.__cause__
    if isinstance(cause, httpx.TransportError):
        return not isinstance(cause, httpx.UnsupportedProtocol)
    return cause is None and isinstance(
        error, errors.TooManyRequests | errors.Unavailable | errors.EngineError
    )


def successful(outcome: Outcome) -> httpx.Response:
    """The response, if there is one that is no error. Raises the error otherwise."""
    if isinstance(outcome, httpx.TransportError):
        raise outcome
    if outcome.is_error:
        raise _error_of(outcome)
    return outcome


def error_of_body(body: Any, kind: type[errors.RagserveError]) -> errors.RagserveError:
    """The error that a body, as `RagserveError.body` makes it, stands for; of class ``kind`` if its code is
    not that of a class. Raises KeyError or TypeError for another body."""
    fields = body["error"]
    message, hint = str(fields["message"]), str(fields.get("hint") or "")
    error = _BY_CODE.get(str(fields.get("code")), kind)(
        message.removesuffix(hint).rstrip(),  # the server's message already ends with its hint
        hint=hint,
        code=fields.get("code"),
        param=fields.get("param"),
    )
    error.request_id = fields.get("request_id")
    return error


def _is_worth_a_retry(call: Call[Any], outcome: Outcome) -> bool:
    if isinstance(outcome, httpx.Response):
        return outcome.status_code == 429 or (outcome.status_code == 503 and call.repeatable)
    if isinstance(outcome, httpx.ConnectError | httpx.ConnectTimeout):
        return True
    return call.repeatable and not isinstance(outcome, httpx.TimeoutException)


def _error_of(response: httpx.Response) -> errors.RagserveError:
    status = response.status_code
    kind = _BY_STATUS.get(status, errors.RagserveError if status >= 500 else errors.InvalidRequest)
    try:
        error = error_of_body(response.json(), kind)
    except (ValueError, KeyError, TypeError):
        request = response.request
        error = kind(f"{request.method} {request.url} answered {status}: {response.text[:200]}")
    if isinstance(error, errors.TooManyRequests):
        error.retry_after_s = max(1, round(_retry_after_s(response)))
    return error


def _retry_after_s(response: httpx.Response) -> float:
    try:
        return float(response.headers.get("Retry-After", 0))
    except ValueError:  # a date
        return 0.0
