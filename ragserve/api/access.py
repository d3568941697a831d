"""What the API key of a request allows: the need of every route, and the check of a request's namespace.

A key without admin needs a right for a route, and the same right for the namespace that the request names.
Routes that are not listed need admin, so a new one is closed until somebody has thought about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import Depends, Request

from ragserve.api import playground, sso
from ragserve.api.search_fields import SearchFields
from ragserve.config import Settings
from ragserve.errors import Forbidden, InvalidRequest
from ragserve.ingest.jobs.submitter import Submitter
from ragserve.retrieval.search_options import SearchOptions
from ragserve.tenants.key_file import Right
from ragserve.tenants.principal import Principal
from ragserve.tenants.rate_limits import RateLimits
from ragserve_index.registry import namespace_not_found
from ragserve_index.types import NamespaceInfo

Need = Literal["none", "key", "read", "ingest", "delete", "metrics", "inspect", "operate"]
"""``none``: not even a key. ``key``: any key. ``read``, ``ingest``, ``delete``: that right in some namespace;
the route checks in which. ``metrics``: that right. ``inspect``, ``operate``: admin, to look at the server or
to change it."""

OPEN = frozenset({"/", "/health", "/docs"}) | playground.PATHS | sso.PATHS
NEEDS: dict[str, Need] = {
    "GET /": "none",
    "HEAD /": "none",
    "GET /docs": "none",
    **{f"GET {path}": "none" for path in playground.PATHS},
    **dict.fromkeys(sso.ROUTES, "none"),
    "GET /info": "key",
    "GET /ready": "key",
    "GET /metrics": "metrics",
    "POST /rag/query": "read",
    "POST /rag/retrieve": "read",
    "POST /rag/ingest": "ingest",
    "POST /rag/ingest/preview": "ingest",
    "GET /rag/jobs": "key",
    "GET /rag/jobs/{job_id}": "key",
    "DELETE /rag/jobs/{job_id}": "ingest",
    "GET /rag/documents": "read",
    "GET /rag/documents/{doc_id}": "read",
    "GET /rag/documents/{doc_id}/chunks": "read",
    "GET /rag/documents/{doc_id}/chunks/{ordinal}": "read",
    "PATCH /rag/documents/{doc_id}/chunks/{ordinal}": "ingest",
    "GET /rag/documents/{doc_id}/lost-corrections": "ingest",
    "DELETE /rag/documents/{doc_id}/lost-corrections": "ingest",
    "PUT /rag/documents/{doc_id}/labels": "ingest",
    "DELETE /rag/documents/{doc_id}": "delete",
    "GET /rag/namespaces": "key",
    "GET /rag/namespaces/{name}": "key",
    "DELETE /rag/namespaces/{name}": "delete",
    "GET /rag/namespaces/{name}/settings": "key",
    "PUT /rag/namespaces/{name}/settings": "ingest",
    "POST /rag/feedback": "read",
    "GET /rag/feedback": "ingest",
    "GET /rag/unanswered": "ingest",
    "GET /rag/sessions": "read",
    "DELETE /rag/sessions/{session_id}": "read",
    "GET /rag/cache": "inspect",
    "POST /rag/cache/verify": "operate",
    "POST /rag/cache/warm": "ingest",
    "POST /rag/cache/evict": "operate",
    "DELETE /rag/cache": "operate",
    "GET /v1/models": "key",
    "GET /v1/models/{model_id:path}": "key",
    "POST /v1/chat/completions": "read",
    "POST /v1/completions": "read",
    "POST /v1/responses": "read",
    "POST /v1/embeddings": "read",
    "POST /v1/classify": "read",
    "POST /v1/score": "read",
    "POST /v1/rerank": "read",
    "POST /v2/rerank": "read",
    "POST /rerank": "read",
    "POST /v1/messages": "read",
    "POST /v1/messages/count_tokens": "key",
    "POST /invocations": "read",
    "POST /api/chat": "read",
    "POST /api/generate": "read",
}
_AUDITED = frozenset({"ingest", "delete", "operate"})


class Access:
    """Whom a request comes from, its address, and what it asked for, which the audit log records."""

    def __init__(self, who: Principal, address: str, rates: RateLimits) -> None:
        self.who = who
        self.address = address
        self._rates = rates
        self.namespace: str | None = None
        self.details: dict[str, Any] = {}
        self._need: Need = "none"

    @property
    def audited(self) -> bool:
        """True if the request asked to ingest, to delete or to change the server."""
        return self._need in _AUDITED

    def allow(self, need: Need) -> None:
        """Raises Forbidden unless the key may use routes of this need."""
        self._need = need
        if need in ("inspect", "operate"):
            self._check("admin")
        elif need == "read" or need == "ingest" or need == "delete" or need == "metrics":
            self._check(need)

    def require(self, right: Right, namespace: str) -> None:
        """Check a right in a namespace. One of others is answered like one that does not exist.

        Raises NotFound and Forbidden."""
        self.namespace = namespace
        if not self.who.covers(namespace):
            if right == "ingest":  # would create it
                raise Forbidden(
                    f"This API key may not ingest into namespace {namespace!r}.",
                    hint="Use one of the key's namespaces, or ask for a key of this one.",
                    code="namespace_not_allowed",
                    param="namespace",
                )
            raise namespace_not_found(namespace)
        if not self.who.may(right, namespace):
            raise _missing(right)

    def require_visible(self, namespace: str) -> None:
        """Raises NotFound for a namespace of others, whatever the key may do in its own."""
        if not self.who.covers(namespace):
            raise namespace_not_found(namespace)

    def visible(self, namespaces: Iterable[NamespaceInfo]) -> list[NamespaceInfo]:
        """Those of the key's namespaces."""
        return [each for each in namespaces if self.who.covers(each.name)]

    def search_options(self, body: SearchFields, settings: Settings) -> SearchOptions:
        """How to search for a request. Raises InvalidRequest for more passages than the key allows."""
        options, most = body.search_options(settings, self.who.viewer), self.who.limits.max_k
        if most is None:
            return options
        if body.k is not None and body.k > most:
            raise InvalidRequest(f"k is {body.k}; this API key may ask for {most}.", param="k")
        return replace(options, k=min(options.k, most))

    @property
    def submitter(self) -> Submitter:
        """Who submits its jobs."""
        return Submitter(self.who.owner, self.who.viewer)

    def check_tokens(self) -> None:
        """Raises TooManyRequests for a key that has used up its tokens."""
        self._rates.check_tokens(self.who)

    def spend(self, tokens: int) -> None:
        """Count tokens of a prompt or an answer."""
        self._rates.spend_tokens(self.who, tokens)

    def _check(self, right: Right) -> None:
        if not self.who.has(right):
            raise _missing(right)


def _missing(right: Right) -> Forbidden:
    return Forbidden(
        f"This API key does not have the right {right!r}.",
        hint="Ask the server's operator for a key that has it (ragserve keys create).",
        code="missing_right",
    )


async def access(request: Request) -> Access:
    """Dependency: the access that `ragserve.api.authentication` has given the request."""
    found: Access = request.state.access
    return found


async def check_route(request: Request) -> None:
    """Dependency of all our routes. Raises Forbidden unless the key meets the route's need."""
    route = request.scope["route"].path
    (await access(request)).allow(NEEDS.get(f"{request.method} {route}", "operate"))


Caller = Annotated[Access, Depends(access)]
