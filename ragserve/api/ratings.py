"""`/rag/feedback`: ratings of answers, for `ragserve eval`; `/rag/unanswered`: what was asked and not
found."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Body, Query
from pydantic import Field

from ragserve.answering.namespace_log import said_at
from ragserve.answering.rating_log import as_row, rated, unanswered
from ragserve.api import namespace_examples as examples
from ragserve.api.access import Caller
from ragserve.api.asked_namespaces import asked_namespaces
from ragserve.api.body import NonBlank, Text
from ragserve.api.documents import Where
from ragserve.api.json_route import JsonRoute
from ragserve.api.openapi import documented
from ragserve.api.schemas import NamespaceNames, OneOrSeveral
from ragserve.api.services import RequestId, Svc
from ragserve.api.views import RatedAnswers, UnansweredQuestions
from ragserve.errors import InvalidRequest, NotFound
from sglang_ext.wire.joint_names import names_of

if TYPE_CHECKING:
    from ragserve_index import IndexStore

router = APIRouter(tags=["feedback"], route_class=JsonRoute)


class Rating(Where, OneOrSeveral):
    """What a user says of an answer. The server keeps no answers, so it comes along."""

    namespaces: NamespaceNames | None = None
    rating: Literal["up", "down"]
    query: Annotated[NonBlank, Field(max_length=65_536)] = Field(description="The question, as it was asked.")
    answer: Annotated[Text, Field(max_length=65_536)]
    documents: list[Annotated[Text, Field(max_length=4096)]] = Field(
        default_factory=list, max_length=64, description="The `doc_id` or source of each cited document."
    )
    answer_id: Annotated[Text, Field(max_length=128)] | None = Field(
        None, description="`request_id` of the answer: a later rating of the same answer replaces this one."
    )


class UnansweredPage(Where):
    limit: int = Field(100, ge=1, le=1000)


@router.post(
    "/rag/feedback",
    summary="Rate an answer",
    status_code=202,
    response_model=RatedAnswers,
    responses=documented(
        examples.FEEDBACK,
        (400, 404, 413, 415, 503),
        success=202,
        description="The row that it becomes",
    ),
)
async def rate(
    body: Annotated[Rating, Body(openapi_examples=examples.FEEDBACK_REQUESTS)],
    svc: Svc,
    caller: Caller,
    request_id: RequestId,
) -> dict[str, Any]:
    """Keep a thumb up or down with its question and answer, where the server does (`feedback_bytes`).

    One for an answer from several namespaces is kept in each, with those of its documents that are there, and
    without the answer, which has text of the others."""
    where = await asked_namespaces(body.namespace, body.namespaces, svc, caller)
    names = names_of(where.name)
    for name in names:
        await asyncio.to_thread(svc.store.namespace, name)
    if not svc.feedback.is_on:
        raise InvalidRequest(
            "This server keeps no feedback.",
            hint="Start it with --feedback-bytes, for example 16777216.",
            code="feedback_off",
        )
    now, rows = time.time(), []
    for name in names:
        alone = len(names) == 1
        record = {
            "id": body.answer_id or request_id,
            "answer": body.answer if alone else "",
            "rating": body.rating,
            "documents": body.documents
            if alone
            else await asyncio.to_thread(_those_in, svc.store, name, body),
        }
        svc.feedback.note(name, body.query, now, caller.who.viewer, asked=names, **record)
        rows.append(as_row({**record, "question": body.query, "time": said_at(now)}, name))
    return {"rows": rows}


def _those_in(store: IndexStore, namespace: str, body: Rating) -> list[str]:
    """The cited documents that are in a namespace."""

    def is_there(name: str) -> bool:
        try:
            store.document(namespace, name)
        except NotFound:
            return store.find_source(namespace, name) is not None
        return True

    return [name for name in body.documents if is_there(name)]


@router.get(
    "/rag/feedback",
    summary="List ratings",
    response_model=RatedAnswers,
    responses=documented(examples.FEEDBACK, (400, 404, 503), description="Rows of `ragserve eval`"),
)
async def ratings(where: Annotated[Where, Query()], svc: Svc, caller: Caller) -> dict[str, Any]:
    """List a namespace's ratings, oldest first, as `ragserve eval` reads them: answers that were found good
    with their documents, and the questions of the others."""
    caller.require("ingest", where.namespace)
    await asyncio.to_thread(svc.store.namespace, where.namespace)
    return {"rows": await asyncio.to_thread(rated, svc.settings.data_dir, svc.store, where.namespace)}


@router.get(
    "/rag/unanswered",
    summary="List what was asked and not found",
    response_model=UnansweredQuestions,
    responses=documented(examples.UNANSWERED, (400, 404, 503), description="Questions, newest first"),
)
async def not_found(page: Annotated[UnansweredPage, Query()], svc: Svc, caller: Caller) -> dict[str, Any]:
    """List questions that the documents did not seem to answer, where the server keeps questions
    (`query_log_bytes`)."""
    caller.require("ingest", page.namespace)
    await asyncio.to_thread(svc.store.namespace, page.namespace)
    found = await asyncio.to_thread(unanswered, svc.settings.data_dir, svc.store, page.namespace, page.limit)
    return {"questions": found}
