"""Client of the REST API, also for frontend programs and `ragserve eval`. Re-raises the server's errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx

from ragserve import errors
from ragserve.answering.results import Answer, RetrievedPassage

_KINDS = [kind for name in errors.__all__ if (kind := getattr(errors, name)) is not errors.RagserveError]
_BY_CODE = {kind.default_code: kind for kind in _KINDS}
# A status alone says less than a code: 415 may also be a wrong Content-Type, 403 another program's.
_BY_STATUS = {kind.status: kind for kind in _KINDS if errors.RagserveError in kind.__bases__} | {
    415: errors.InvalidRequest
}


class Client:
    """Connection to one server. Thread-safe; close it, or use it in a ``with`` block."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            self._http = httpx.Client(
                base_url=self.url, headers=headers, timeout=httpx.Timeout(timeout_s, connect=10.0)
            )
        except httpx.InvalidURL as error:
            raise errors.InvalidRequest(
                f"{url!r} is not a URL: {error}", hint="Give something like http://127.0.0.1:30000."
            ) from error

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def call(self, method: str, path: str, **options: Any) -> Any:
        """Send one request and return its JSON; None for an empty answer.

        Raises the server's ``RagserveError``, or ``Unavailable``."""
        try:
            response = self._http.request(method, path, **options)
        except httpx.TransportError as error:
            raise errors.Unavailable(
                f"No answer from {self.url}: {error}", hint="Is the server running there? ragserve serve"
            ) from error
        except httpx.InvalidURL as error:
            raise errors.InvalidRequest(
                f"{self.url!r} is not a URL: {error}", hint="Give something like http://127.0.0.1:30000."
            ) from error
        if response.is_error:
            raise error_of(response)
        if not response.content:
            return None
        try:
            return response.json()
        except ValueError as error:
            raise errors.Unavailable(
                f"{self.url}{path} did not answer with JSON.", hint="Is that address a ragserve server?"
            ) from error

    def info(self) -> dict[str, Any]:
        """``GET /info``: versions, model, defaults and limits."""
        return dict(self.call("GET", "/info"))

    def query(self, question: str, **fields: Any) -> Answer:
        """``POST /rag/query`` without streaming. Fields as in the API; None is left out."""
        return Answer.model_validate(self.call("POST", "/rag/query", json=_given(query=question, **fields)))

    def retrieve(self, question: str, **fields: Any) -> list[RetrievedPassage]:
        """``POST /rag/retrieve``: passages, best first."""
        found = self.call("POST", "/rag/retrieve", json=_given(query=question, **fields))
        return [RetrievedPassage.model_validate(row) for row in found["results"]]

    def ingest(self, namespace: str, texts: Sequence[Mapping[str, Any]]) -> str:
        """``POST /rag/ingest`` of ``{name, text, title, metadata}`` each. Returns the job's id."""
        job = self.call(
            "POST", "/rag/ingest", json={"namespace": namespace, "texts": [dict(text) for text in texts]}
        )
        return str(job["job_id"])

    def wait(
        self,
        job_id: str,
        *,
        timeout_s: float = 3600.0,
        on_progress: Callable[[dict[str, Any]], None] | None = None,
    ) -> dict[str, Any]:
        """Wait for a job and return it. Raises ``Unavailable`` if it fails, is cancelled or exceeds
        ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while True:
            job = dict(self.call("GET", f"/rag/jobs/{job_id}"))
            if on_progress is not None:
                on_progress(job)
            if job["state"] == "done":
                return job
            if job["state"] in {"failed", "cancelled"}:
                raise errors.Unavailable(
                    f"Ingestion job {job_id} {job['state']}: {job.get('error') or 'no reason given'}"
                )
            if time.monotonic() > deadline:
                raise errors.Unavailable(
                    f"Ingestion job {job_id} is still {job['state']} after {timeout_s:.0f} s."
                )
            time.sleep(0.2)

    def drop_namespace(self, name: str) -> None:
        """``DELETE /rag/namespaces/{name}``."""
        self.call("DELETE", f"/rag/namespaces/{name}")


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def error_of(response: httpx.Response) -> errors.RagserveError:
    """The error that an error response stands for."""
    status = response.status_code
    kind = _BY_STATUS.get(status, errors.RagserveError if status >= 500 else errors.InvalidRequest)
    try:
        body = response.json()["error"]
        message, hint = str(body["message"]), str(body.get("hint") or "")
        kind = _BY_CODE.get(str(body.get("code")), kind)
    except (ValueError, KeyError, TypeError):
        request = response.request
        return kind(f"{request.method} {request.url} answered {response.status_code}: {response.text[:200]}")
    # The server's message already ends with its hint.
    return kind(
        message.removesuffix(hint).rstrip(), hint=hint, code=body.get("code"), param=body.get("param")
    )
