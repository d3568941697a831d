"""`POST /rag/retrieve`: search like `/rag/query`, without an answer."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Body, Request, Response

from ragserve.api import examples
from ragserve.api.access import Caller
from ragserve.api.asked_namespaces import asked_namespaces
from ragserve.api.json_route import JsonRoute
from ragserve.api.openapi import documented
from ragserve.api.query import given_settings, to_history
from ragserve.api.schemas import RetrieveRequest
from ragserve.api.services import RequestId, Svc
from ragserve.api.sse import until_disconnect
from ragserve.api.views import RetrieveAnswer, RetrieveTimings

router = APIRouter(tags=["query"], route_class=JsonRoute)


@router.post(
    "/rag/retrieve",
    summary="Find passages, without an answer",
    response_model=RetrieveAnswer,
    responses=documented(
        examples.RETRIEVED, (400, 404, 409, 413, 415, 429, 503), description="Passages, best first"
    ),
)
async def retrieve(
    request: Request,
    body: Annotated[RetrieveRequest, Body(openapi_examples=examples.RETRIEVE_REQUESTS)],
    svc: Svc,
    caller: Caller,
    request_id: RequestId,
) -> Response:
    """Find the passages that `/rag/query` would give to the model, in the same order."""
    start = time.perf_counter()
    where = await asked_namespaces(body.namespace, body.namespaces, svc, caller)
    svc.check_question(body.query, len(body.history))
    with svc.limiter.slot():
        own = await svc.own_settings(where.name, given_settings(body) | {"system", "strategy"})
        settings = own.over(svc.settings)
        options = caller.search_options(body, settings)
        if body.history and options.follow_ups == "rewrite":  # the model writes
            caller.check_tokens()
        search = svc.search.search(
            body.query,
            options,
            namespace=where.name,
            request_id=request_id,
            history=to_history(body.history),
            spend=caller.spend,
        )
        found = await until_disconnect(request, search)
    answer = RetrieveAnswer(
        results=found.passages,
        namespace=where.name,
        retrieval=found.searched_by(options),
        searched_for=found.searched_for,
        reranking=found.reranking,
        evidence=found.evidence,
        index_version=found.version,
        index_versions=None if found.versions is None else dict(found.versions),
        notes=found.notes,
        timings=RetrieveTimings(**found.timings.model_dump(), total_ms=(time.perf_counter() - start) * 1e3),
        request_id=request_id,
    )
    return Response(answer.model_dump_json(), media_type="application/json")
