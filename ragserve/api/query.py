"""`POST /rag/query`: a question answered from a namespace, as JSON or as server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from typing import Annotated

from fastapi import APIRouter, Body, Request, Response
from fastapi.sse import format_sse_event
from pydantic import BaseModel

from ragserve.answering.answerer import Event, FinalAnswer, InlineDocument, MessageDelta, Query
from ragserve.answering.prompt import Message
from ragserve.answering.results import Answer, Citation, SearchResults
from ragserve.api import examples
from ragserve.api.body import JsonRoute
from ragserve.api.openapi import documented
from ragserve.api.schemas import DoneEvent, ErrorBody, MessageEvent, QueryRequest
from ragserve.api.services import RequestId, Services, Svc
from ragserve.api.sse import EventStream, opened, until_disconnect
from ragserve.engine.base import Sampling
from ragserve.errors import EngineError, RagserveError

EVENTS: dict[str, type[BaseModel]] = {
    "search_results": SearchResults,
    "message": MessageEvent,
    "citation": Citation,
    "final_answer": Answer,
    "done": DoneEvent,
    "error": ErrorBody,
}
router = APIRouter(tags=["query"], route_class=JsonRoute)


@router.post(
    "/rag/query",
    summary="Answer a question from the documents of a namespace",
    response_model=Answer,
    responses=documented(
        examples.ANSWER,
        400,
        404,
        409,
        413,
        415,
        429,
        502,
        503,
        description="The answer, or with `stream` its events",
        sse=(examples.QUERY_SSE, EVENTS),
    ),
)
async def query(
    request: Request,
    body: Annotated[QueryRequest, Body(openapi_examples=examples.QUERY_REQUESTS)],
    svc: Svc,
    request_id: RequestId,
) -> Response:
    """Retrieves the passages nearest to the question, puts them into the prompt in that order and lets the
    model answer.

    With `stream`, the events are `search_results`, `message`*, `citation`*, `final_answer` (the whole JSON
    answer) and `done`. The messages joined are the answer. What is wrong with the request is an HTTP error as
    without `stream`; what goes wrong later is an `error` event with the same body, and no `done` follows.
    Closing the connection aborts the generation.

    Markers `[n]` (one to three digits) in the answer that point to no passage are removed before anything is
    sent."""
    asked = to_query(body, svc, request_id)
    events = svc.answerer.events(asked)
    if body.stream:
        return await stream_events(request, events, request_id)
    final = await until_disconnect(request, last_event(events))
    return Response(final.answer.model_dump_json(), media_type="application/json")


def to_query(body: QueryRequest, svc: Services, request_id: str) -> Query:
    """The request with the server's defaults filled in. Raises InvalidRequest over the limits of the
    settings.
    """
    svc.check_question(body.query, len(body.history))
    settings = svc.settings
    strategy = settings.default_strategy.resolve(body.strategy, body.strategy_options)
    return Query(
        question=body.query,
        namespace=body.namespace,
        k=body.k or settings.top_k,
        strategy=strategy.name,
        strategy_options=strategy.options,
        decode=body.decode.model_dump(exclude_unset=True),
        sampling=Sampling(
            max_new_tokens=body.max_new_tokens or settings.max_new_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            stop=tuple(body.stop),
            seed=body.seed,
        ),
        request_id=request_id,
        filter=body.filter,
        system=body.system,
        history=tuple(Message(message.role, message.content) for message in body.history),
        documents=None
        if body.documents is None
        else tuple(InlineDocument(d.text, d.title, d.source) for d in body.documents),
    )


async def last_event(events: AsyncGenerator[Event, None]) -> FinalAnswer:
    """Read a query's events to the end."""
    final = None
    async for event in events:
        if isinstance(event, FinalAnswer):
            final = event
    if final is None:
        raise EngineError("The query ended without an answer.")
    return final


async def stream_events(
    request: Request, events: AsyncGenerator[Event, None], request_id: str
) -> EventStream[Event]:
    """Events as server-sent events under the names that the route documents."""
    first, pump = await opened(request, events)
    return EventStream(
        request_id,
        first,
        pump,
        encode=_encode,
        encode_error=lambda error: _error(error, request_id),
        end=_sse("done", _json({"request_id": request_id})),
    )


def _encode(event: Event) -> Iterator[bytes]:
    match event:
        case SearchResults():
            yield _sse("search_results", event.model_dump_json())
        case MessageDelta():
            yield _sse("message", _json({"text": event.text}))
        case Citation():
            yield _sse("citation", event.model_dump_json())
        case FinalAnswer():
            yield _sse("final_answer", event.answer.model_dump_json())


def _error(error: RagserveError, request_id: str) -> bytes:
    return _sse("error", _json(error.body(request_id)))


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _sse(event: str, data: str) -> bytes:
    return format_sse_event(event=event, data_str=data)
