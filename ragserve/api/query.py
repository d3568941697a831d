"""`POST /rag/query`: answer a question from a namespace, as JSON or as server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request, Response
from fastapi.sse import format_sse_event

from ragserve.answering.answer_reader import MessageDelta
from ragserve.answering.answerer import Event, FinalAnswer
from ragserve.answering.prompt import Message
from ragserve.answering.query import Query
from ragserve.answering.results import Answer, Citation, RetrievedPassage, SearchResults
from ragserve.answering.sessions.dialogues import NEW
from ragserve.api import examples
from ragserve.api.access import Caller
from ragserve.api.asked_namespaces import AskedNamespaces, asked_namespaces, check_alone
from ragserve.api.json_route import JsonRoute
from ragserve.api.openai_schemas import ChatRequest
from ragserve.api.openapi import documented
from ragserve.api.schemas import HistoryMessage, QueryRequest
from ragserve.api.search_fields import SearchFields
from ragserve.api.services import RequestId, Svc
from ragserve.api.sse import EventStream, opened, until_disconnect
from ragserve.api.views import EVENTS
from ragserve.config import Settings
from ragserve.engine.base import GenerateRequest, Sampling
from ragserve.errors import EngineError
from ragserve.profiles.retriever_name import UsualSearch
from ragserve.setting_groups.per_namespace import NamespaceSettings

router = APIRouter(tags=["query"], route_class=JsonRoute)


@router.post(
    "/rag/query",
    summary="Answer a question from the documents of a namespace",
    response_model=Answer,
    responses=documented(
        examples.ANSWER,
        (400, 404, 409, 413, 415, 429, 502, 503),
        description="The answer, or with `stream` its events",
        sse=(examples.QUERY_SSE, EVENTS),
    ),
)
async def query(
    request: Request,
    body: Annotated[QueryRequest, Body(openapi_examples=examples.QUERY_REQUESTS)],
    svc: Svc,
    caller: Caller,
    request_id: RequestId,
) -> Response:
    """Retrieve the passages nearest to the question, put them into the prompt in that order and generate.

    With `stream`, the events are `search_results`, `message`*, `citation`*, `final_answer` (the whole JSON
    answer) and `done`; the messages joined are the answer. A bad request is an HTTP error, with or without
    `stream`. A later failure is an `error` event with the same body, and no `done` follows. Closing the
    connection aborts the generation. A question with the header `Cache-Control: no-store` is not kept in the
    server's query log.

    Markers `[n]` (one to three digits) that point to no passage are removed before anything is sent."""
    where = await asked_namespaces(body.namespace, body.namespaces, svc, caller)
    check_alone(where.name, body.documents)
    caller.check_tokens()
    svc.check_question(body.query, len(body.history))
    own = await svc.own_settings(where.name, given_settings(body, body.system))
    settings = own.over(svc.settings)
    sampling = Sampling(
        max_new_tokens=body.max_new_tokens or svc.settings.max_new_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        stop=tuple(body.stop),
        seed=body.seed,
    )
    asked = to_query(
        body,
        settings,
        request_id,
        where,
        sampling,
        body.decode.model_dump(exclude_unset=True),
        search=caller.search_options(body, settings),
        owner=caller.who.owner,
        spend=caller.spend,
        question=body.query,
        history=to_history(body.history),
        system=own.system_text(body.system, body.session),
        private=is_private(request),
    )
    events = svc.answerer.events(asked)
    if body.stream:
        return await stream_events(request, events, request_id)
    final = await until_disconnect(request, last_event(events))
    return Response(final.answer.model_dump_json(), media_type="application/json")


def to_query(
    body: QueryRequest | ChatRequest,
    settings: Settings,
    request_id: str,
    where: AskedNamespaces,
    sampling: Sampling,
    decode: Mapping[str, Any],
    **fields: Any,
) -> Query:
    """Build a query from ``fields`` and the fields that both APIs share, with the server's defaults."""
    strategy = settings.default_strategy.resolve(body.strategy, body.strategy_options)
    return Query(
        request=GenerateRequest(
            request_id,
            [],
            where.name,
            strategy.name,
            sampling,
            options=strategy.options,
            decode=decode,
            prefill=body.prefill.model_dump(exclude_unset=True),
        ),
        by_pattern=where.by_pattern,
        overflow=body.documents_overflow,
        session=body.session,
        session_budget=body.session_budget,
        names_strategy=body.strategy is not None or bool(body.strategy_options),
        usual=UsualSearch.of(settings),
        documents=None
        if body.documents is None
        else [
            RetrievedPassage(index=index, start=0, end=len(d.text), **d.model_dump())
            for index, d in enumerate(body.documents, 1)
        ],
        **fields,
    )


def given_settings(body: SearchFields, system: str | None = None) -> set[str]:
    """The settings of namespaces that a request gives itself, or its session has since its first turn."""
    given = {name for name in NamespaceSettings.model_fields if getattr(body, name, None) is not None}
    given |= set() if system is None else {"system"}
    later = getattr(body, "session", None) not in (None, NEW)
    return given | {"system", "strategy"} if later else given


def is_private(request: Request) -> bool:
    """Whether a request asks by ``Cache-Control: no-store`` that its question is not kept."""
    given = request.headers.get("cache-control", "")
    return "no-store" in [each.strip().lower() for each in given.split(",")]


def to_history(messages: Sequence[HistoryMessage]) -> tuple[Message, ...]:
    """Earlier turns, as the prompt and the search take them."""
    return tuple(Message(message.role, message.content) for message in messages)


async def last_event(events: AsyncGenerator[Event, None]) -> FinalAnswer:
    """Read a query's events to the end and return the last."""
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
    """Stream events as server-sent events, named as in `EVENTS`."""
    first, pump = await opened(request, events)
    return EventStream(
        request_id,
        first,
        pump,
        encode=_encode,
        encode_error=lambda error: _sse("error", compact_json(error.body(request_id))),
        end=_sse("done", compact_json({"request_id": request_id})),
    )


def _encode(event: Event) -> Iterator[bytes]:
    match event:
        case SearchResults():
            yield _sse("search_results", event.model_dump_json())
        case MessageDelta():
            yield _sse("message", compact_json({"text": event.text}))
        case Citation():
            yield _sse("citation", event.model_dump_json())
        case FinalAnswer():
            yield _sse("final_answer", event.answer.model_dump_json())


def compact_json(value: object) -> str:
    """JSON without spaces or escapes."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _sse(event: str, data: str) -> bytes:
    return format_sse_event(event=event, data_str=data)
