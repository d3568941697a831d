"""`/rag/feedback`: ratings of answers, for `ragserve eval`; `/rag/unanswered`: what was asked and not
found."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Query
from pydantic import Field

from ragserve.answering.namespace_log import said_at
from ragserve.answering.rating_log import as_row, rated, unanswered
from ragserve.api import namespace_examples as examples
from ragserve.api.access import Caller
from ragserve.api.body import JsonRoute, NonBlank, Text
from ragserve.api.documents import Where
from ragserve.api.openapi import documented
from ragserve.api.services import RequestId, Svc
from ragserve.api.views import RatedAnswers, UnansweredQuestions
from ragserve.errors import InvalidRequest

router = APIRouter(tags=["feedback"], route_class=JsonRoute)


class Rating(Where):
    """What a user says of an answer. The server keeps no answers, so it comes along."""

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
    """Keep a thumb up or down with its question and answer, where the server does (`feedback_bytes`)."""
    caller.require("read", body.namespace)
    await asyncio.to_thread(svc.store.namespace, body.namespace)
    if not svc.feedback.is_on:
        raise InvalidRequest(
            "This server keeps no feedback.",
            hint="Start it with --feedback-bytes, for example 16777216.",
            code="feedback_off",
        )
    record = {
        "id": body.answer_id or request_id,
        "answer": body.answer,
        "rating": body.rating,
        "documents": body.documents,
    }
    now = time.time()
    svc.feedback.note(body.namespace, body.query, now, caller.who.viewer, **record)
    return {"rows": [as_row({**record, "question": body.query, "time": said_at(now)}, body.namespace)]}


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
