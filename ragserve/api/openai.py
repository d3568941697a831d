"""`/v1/chat/completions` and `/v1/models`: each namespace is a model; other models are SGLang's."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response
from pydantic import TypeAdapter, ValidationError
from starlette.responses import JSONResponse

from ragserve.answering.answer_reader import MessageDelta
from ragserve.answering.answerer import Event, FinalAnswer
from ragserve.answering.query import Query
from ragserve.answering.results import Answer, SearchResults
from ragserve.answering.sessions.dialogues import NEW
from ragserve.api import examples
from ragserve.api.access import Access, Caller
from ragserve.api.asked_namespaces import AskedNamespaces, check_alone, check_number, readable
from ragserve.api.body import MAX_NAMES, parse_json
from ragserve.api.chat_messages import read_dialogue, read_schema, read_tools
from ragserve.api.engine_bodies import MOST_PER_BYTE, check_text
from ragserve.api.errors import validated
from ragserve.api.openai_schemas import (
    ChatAnswer,
    ChatChunk,
    ChatRequest,
    Extras,
    Model,
    ModelList,
    SglangChatAnswer,
)
from ragserve.api.openapi import documented
from ragserve.api.query import compact_json, given_settings, is_private, last_event, to_query
from ragserve.api.services import RequestId, Services, Svc, services
from ragserve.api.sse import EventStream, opened, until_disconnect
from ragserve.api.upstream import Upstream
from ragserve.engine.base import Sampling
from ragserve.engine.tool_calls import ToolCall
from ragserve.errors import InvalidRequest, NotFound, RagserveError, TooLarge
from ragserve.tenants.key_file import Pattern
from sglang_ext.wire.joint_names import names_of
from sglang_ext.wire.protocol import longest_text

PREFIX = "ragserve/"
SGLANG_DEFAULT = "default"  # what SGLang's own clients say for "the model that is there"
_PATTERNS = TypeAdapter(list[Pattern])
_URL = re.compile(r"\A[a-zA-Z][a-zA-Z0-9+.-]*+://")
_END = "[DONE]"

router = APIRouter(tags=["openai"])
_BODY = {
    "required": True,
    "content": {
        "application/json": {
            "schema": {"$ref": "#/components/schemas/ChatRequest"},
            "examples": examples.CHAT_REQUESTS,
        }
    },
}


@router.post(
    "/v1/chat/completions",
    summary="Chat with a namespace, as OpenAI's API",
    response_model=ChatAnswer | SglangChatAnswer,
    responses=documented(
        examples.CHAT_ANSWER,
        (400, 404, 409, 413, 429, 502, 503),
        description="The answer, or with `stream` its chunks",
        sse=(examples.CHAT_SSE, {"": ChatChunk}),
        sse_end=_END,
        passes_on=True,
    ),
    openapi_extra={"requestBody": _BODY},
)
async def chat(request: Request, caller: Caller, request_id: RequestId) -> Response:
    """Answer the user's last message; earlier ones are the history, and a system message replaces the
    server's system text. Results of tools may follow it: passages are searched for with the user's message.

    With `response_format` the answer is JSON by the schema, with `tools` it may be calls of them, if the
    model's chat template has tools.

    Citations are `annotations` of the message and, in full, the top-level `citations`; when streaming, both
    come on the last chunk that has a choice. Requests for models not named `ragserve/...` go to SGLang."""
    raw = await request.body()
    data = await parse_json(raw, MAX_NAMES)
    model = _model_of(data)
    svc = await services(request)
    limit = svc.settings.max_body_bytes
    ours = model is not None and model.startswith(PREFIX)
    if ours and len(raw) > limit:
        raise TooLarge(
            f"The request's body is over {limit:,} bytes.", hint="Send less, or raise max_body_bytes."
        )
    if not ours:
        await _check_text(data, raw, svc)
        return await _replayed(request, model, raw)
    caller.check_tokens()
    body = validated(ChatRequest, data)
    asked = await _query(body, svc, caller, request_id)
    # with the results of tools the same question comes again
    asked = replace(asked, private=is_private(request) or bool(asked.turns))
    events = svc.answerer.events(asked)
    try:
        if not body.stream:
            final = await until_disconnect(request, last_event(events))
            return Response(_completion(body, final), media_type="application/json")
        first, pump = await opened(request, events)
    except NotFound as error:
        if error.param == "session":
            raise
        raise _no_model(body.model) from error
    chunks = _Chunks(body, request_id)
    end = f"data: {_END}\n\n".encode()
    return EventStream(request_id, first, pump, encode=chunks.encode, encode_error=chunks.error, end=end)


async def without_retrieval(request: Request, caller: Caller) -> Response:
    """Pass a request for one of SGLang's models on; refuse one for a namespace, which answers chats only."""
    raw = await request.body()
    data = await parse_json(raw)
    model = _model_of(data)
    if model is not None and model.startswith(PREFIX):
        raise InvalidRequest(
            f"Model {model[:128]!r} answers from documents, which this route cannot do.",
            hint="Use POST /v1/chat/completions or POST /rag/query.",
            code="unsupported_model",
            param="model",
        )
    if data.get("previous_response_id") is not None and not caller.who.is_admin:
        raise NotFound(
            "This API key cannot continue a stored response: the engine does not know whose they are.",
            hint="Send the earlier messages with the request.",
            code="response_not_found",
            param="previous_response_id",
        )
    await _check_text(data, raw, await services(request))
    return await _replayed(request, model, raw)


_TEXT_ROUTES = ("completions", "responses", "classify", "score")
WITHOUT_RETRIEVAL = (
    *(f"/v1/{name}" for name in (*_TEXT_ROUTES, "messages", "messages/count_tokens")),
    *("/invocations", "/api/chat", "/api/generate"),  # chats and completions under names of other servers
)
for _path in WITHOUT_RETRIEVAL:
    router.add_api_route(_path, without_retrieval, methods=["POST"], include_in_schema=False)


async def _check_text(data: Any, raw: bytes, svc: Services) -> None:
    """Raise TooLarge for more text than fits into the context: SGLang tokenises it in the event loop."""
    limit = longest_text(svc.engine.info.context_length)
    if len(raw) > limit // MOST_PER_BYTE:
        await asyncio.to_thread(check_text, data, limit)


def _model_of(data: Any) -> str | None:
    """The model of a request; None if it names none. Raises InvalidRequest if it is no text."""
    if not isinstance(data, dict):
        raise InvalidRequest("The body must be a JSON object.", hint="See /docs for its fields.")
    model = data.get("model")
    if model is not None and not isinstance(model, str):
        raise InvalidRequest("model: Input should be a valid string.", param="model")
    return model


async def _replayed(request: Request, model: str | None, raw: bytes) -> Response:
    """Let SGLang answer. Raises NotFound for a model that it does not serve: it would answer with its own."""
    upstream: Upstream = request.app.state.upstream
    if model not in (None, SGLANG_DEFAULT) and not await upstream.knows(str(model)):
        raise _no_model(str(model))
    return upstream.replay(raw)


@router.get(
    "/v1/models",
    summary="List models",
    response_model=ModelList,
    responses=documented(examples.MODELS, (502, 503), description="One model per namespace, then SGLang's"),
)
async def models(request: Request, svc: Svc, caller: Caller) -> Response:
    """List a model for every namespace of the API key; the models of SGLang answer without documents."""
    upstream: Upstream = request.app.state.upstream
    namespaces, others = await asyncio.gather(asyncio.to_thread(svc.store.namespaces), upstream.models())
    ours = [Model(id=PREFIX + one.name).model_dump() for one in caller.visible(namespaces)]
    # SGLang's unchanged: they have fields of their own
    return JSONResponse({"object": "list", "data": [*ours, *others]})


@router.get(
    "/v1/models/{model_id:path}",
    summary="Show a model",
    response_model=Model,
    responses=documented(examples.MODEL, (404, 502, 503), description="The model"),
)
async def model(
    request: Request,
    caller: Caller,
    model_id: Annotated[str, Path(description="`ragserve/NAMESPACE`, or a model of SGLang.")],
) -> Response:
    """Show a namespace's model; other names go to SGLang."""
    if not model_id.startswith(PREFIX):
        upstream: Upstream = request.app.state.upstream
        if model_id not in [one.get("id") for one in await upstream.models()]:
            raise _no_model(model_id)
        return upstream.replay(b"")
    svc = await services(request)
    asked = await _namespaces(model_id, svc, caller)
    known = {one.name for one in caller.visible(await asyncio.to_thread(svc.store.namespaces))}
    if not known.issuperset(names_of(asked.name)):
        raise _no_model(model_id)
    return Response(Model(id=model_id).model_dump_json(), media_type="application/json")


async def _query(body: ChatRequest, svc: Services, caller: Access, request_id: str) -> Query:
    """Turn a dialogue into a query.

    Raises InvalidRequest for messages, tools or a format that cannot be answered, NotFound for an invalid
    namespace."""
    said = read_dialogue(body.messages)
    history = () if body.session not in (None, NEW) else said.history  # a session has it
    svc.check_question(said.question, len(history) + len(said.turns), param="messages")
    where = await _namespaces(body.model, svc, caller)
    check_alone(where.name, body.documents)
    own = await svc.own_settings(where.name, given_settings(body, said.system))
    settings = own.over(svc.settings)
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    sampling = Sampling(
        max_new_tokens=body.max_completion_tokens or body.max_tokens or svc.settings.max_new_tokens,
        temperature=body.temperature or 0.0,
        top_p=1.0 if body.top_p is None else body.top_p,
        stop=tuple(stop),
        seed=body.seed,
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
    )
    return to_query(
        body,
        settings,
        request_id,
        where,
        sampling,
        {},
        search=caller.search_options(body, settings),
        owner=caller.who.owner,
        spend=caller.spend,
        question=said.question,
        history=history,
        turns=said.turns,
        tools=read_tools(body),
        schema=read_schema(body),
        system=own.system_text(said.system, body.session),
    )


async def _namespaces(model: str, svc: Services, caller: Access) -> AskedNamespaces:
    """The namespaces of a model. Raises NotFound for a model that there is not."""
    names = names_of(model.removeprefix(PREFIX))
    check_number(len(names), param="model")
    try:
        given = _PATTERNS.validate_python(names)
        return await readable(given, svc, caller, param="model")
    except (ValidationError, NotFound):
        raise _no_model(model) from None


def _annotations(final: FinalAnswer) -> list[dict[str, Any]]:
    """Annotate each marker at its place, and sentences without markers with the passages that support
    them."""
    cited = {citation.index: citation for citation in final.answer.citations}
    spans: list[tuple[int, int, int, str]] = [
        (marker.index, marker.start, marker.end, "marker") for marker in final.markers
    ]
    spans += [
        (index, sentence.start, sentence.end, sentence.basis or "")
        for sentence in final.answer.sentences
        if sentence.basis != "marker"
        for index in sentence.passages
    ]
    return [
        {
            "type": "url_citation",
            "url_citation": {
                "start_index": start,
                "end_index": end,
                "title": cited[index].title,
                "url": _url(cited[index].source),
                "basis": basis,
            },
        }
        for index, start, end, basis in sorted(spans, key=lambda span: span[1:])
    ]


def _completion(body: ChatRequest, final: FinalAnswer) -> str:
    answer = final.answer
    refused = read_schema(body) is not None and not final.by_model
    message: dict[str, Any] = {
        "content": None if refused or (final.calls and not answer.answer) else answer.answer,
        "refusal": answer.answer if refused else None,
        "annotations": _annotations(final),
    }
    if final.calls:
        message["tool_calls"] = [_call(call) for call in final.calls]
    whole = ChatAnswer.model_validate(
        {
            **_head(body, answer.request_id, "chat.completion"),
            "choices": [_choice(_finish_reason(final), message=message)],
            "usage": _usage(answer),
            **_sources(answer),
        }
    )
    unset = None if final.calls else {"choices": {0: {"message": {"tool_calls"}}}}
    return whole.model_dump_json(exclude=unset)


def _finish_reason(final: FinalAnswer) -> str:
    """Calls that were not cut off are to be made now."""
    reason = final.answer.finish_reason
    return "tool_calls" if final.calls and reason == "stop" else reason


def _head(body: ChatRequest, request_id: str, kind: str) -> dict[str, Any]:
    created = int(time.time())
    return {"id": f"chatcmpl-{request_id}", "object": kind, "created": created, "model": body.model}


def _choice(finish_reason: str | None, **content: Any) -> dict[str, Any]:
    return {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}


def _usage(answer: Answer) -> dict[str, Any]:
    usage = answer.usage
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }


def _sources(answer: Answer) -> dict[str, Any]:
    return {
        "citations": [citation.model_dump() for citation in answer.citations],
        "ragserve": Extras.model_validate(answer, from_attributes=True).model_dump(),
    }


class _Chunks:
    """Encodes events as OpenAI's stream."""

    def __init__(self, body: ChatRequest, request_id: str) -> None:
        self._request_id = request_id
        self._with_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._as_json = read_schema(body) is not None
        self._calls = 0
        self._head = _head(body, request_id, "chat.completion.chunk")

    def encode(self, event: Event) -> Iterator[bytes]:
        if isinstance(event, MessageDelta):
            name = "refusal" if self._as_json and not event.by_model else "content"
            yield self._chunk({name: event.text})
        elif isinstance(event, ToolCall):
            yield self._chunk({"tool_calls": [{"index": self._calls, **_call(event)}]})
            self._calls += 1
        elif isinstance(event, FinalAnswer):
            answer = event.answer
            delta = {"annotations": _annotations(event)}
            yield self._chunk(delta, _finish_reason(event), _sources(answer))
            if self._with_usage:
                yield _data({**self._head, "choices": [], "usage": _usage(answer)})
        elif isinstance(event, SearchResults):
            yield self._chunk({"role": "assistant", "content": ""})

    def error(self, error: RagserveError) -> bytes:
        return _data(error.body(self._request_id))

    def _chunk(
        self, delta: dict[str, Any], finish_reason: str | None = None, extra: dict[str, Any] | None = None
    ) -> bytes:
        usage = {"usage": None} if self._with_usage else {}
        choices = [_choice(finish_reason, delta=delta)]
        return _data({**self._head, "choices": choices, **usage, **(extra or {})})


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _data(value: dict[str, Any]) -> bytes:
    return f"data: {compact_json(value)}\n\n".encode()


def _url(source: str | None) -> str:
    if source is None or _URL.match(source):
        return source or ""
    return PurePosixPath(source).as_uri() if source.startswith("/") else source


def _no_model(name: str) -> NotFound:
    return NotFound(
        f"There is no model {name[:128]!r}.",
        hint="GET /v1/models lists them; ingesting into a namespace makes one.",
        code="model_not_found",
        param="model",
    )
