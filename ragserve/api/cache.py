"""/rag/cache: what the document cache holds, checks of it, and making room."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Response
from pydantic import Field

from ragserve.api import examples
from ragserve.api.body import RequestModel, Text
from ragserve.api.ingest import job_view
from ragserve.api.openapi import documented
from ragserve.api.schemas import JobView
from ragserve.api.services import Svc
from ragserve.config import Namespace
from ragserve.errors import InvalidRequest

router = APIRouter(prefix="/rag/cache", tags=["cache"])


_EVICT: dict[str, Any] = {
    "device": {"summary": "Answer the next queries from host memory", "value": {"tiers": ["device"]}}
}


class EvictRequest(RequestModel):
    """Which tiers to empty; the tiers below keep their copies."""

    tiers: list[Literal["device", "host"]] = Field(min_length=1, max_length=2)


_WARM: dict[str, Any] = {
    "namespace": {"summary": "All documents of a namespace", "value": {"namespace": "docs"}},
    "some": {"summary": "Some documents", "value": {"namespace": "docs", "documents": ["lighthouse.pdf"]}},
}


class WarmRequest(RequestModel):
    """Whose KV to compute."""

    namespace: Namespace = Field("default", description="The namespace.")
    documents: list[Annotated[Text, Field(min_length=1, max_length=4096)]] | None = Field(
        None,
        min_length=1,
        max_length=10_000,
        description="doc_id or source of each; all of the namespace if not given.",
    )


async def _control(svc: Svc, operation: str, **arguments: Any) -> dict[str, Any]:
    control = getattr(svc.engine, "control", None)
    if control is None:
        raise InvalidRequest(
            "This server has no document cache: its engine runs elsewhere.",
            hint="Ask the server that runs the engine.",
            code="no_document_cache",
        )
    return dict(await control(operation, **arguments))


@router.get(
    "",
    summary="What the document cache holds",
    responses=documented(examples.CACHE, 400, 502, 503, description="Figures per tier"),
)
async def stat(svc: Svc) -> dict[str, Any]:
    """Bytes, budgets and documents per tier (device, host, disk) and namespace; hits, misses, evictions,
    faults.
    """
    return await _control(svc, "stat")


@router.post(
    "/verify",
    summary="Check the document cache",
    responses=documented(
        {"pages": 412, "bad": []}, 400, 502, 503, description="Pages read, and what is wrong with which"
    ),
)
async def verify(svc: Svc) -> dict[str, Any]:
    """Read every page on disk against its checksum and check the accounting of all tiers. Slow: generation
    waits meanwhile.
    """
    return await _control(svc, "verify")


@router.post(
    "/warm",
    summary="Compute documents' KV ahead of queries",
    status_code=202,
    response_model=JobView,
    responses=documented(
        examples.JOB_WARM,
        400,
        404,
        503,
        507,
        success=202,
        description="Taken; `Location` is the job to watch",
    ),
)
async def warm(body: Annotated[WarmRequest, Body(openapi_examples=_WARM)], svc: Svc) -> Response:
    """A job that computes what is not cached yet and writes it through to the lowest tier, at the disk's
    pace.

    It survives a restart and is cancelled like any job. A document's item is `warmed`, `unchanged` (it was
    cached), `failed` or `skipped` (no longer indexed, or the tier's budget is full), with the reason."""
    from ragserve.cache.warm import submit_warm

    runner = svc.warm_ups()
    job = await asyncio.to_thread(submit_warm, svc.store, body.namespace, body.documents)
    runner.wake()
    return Response(
        job_view(job).model_dump_json(),
        202,
        headers={"Location": f"/rag/jobs/{job.job_id}"},
        media_type="application/json",
    )


@router.post(
    "/evict",
    summary="Drop documents from upper tiers",
    responses=documented({}, 400, 502, 503, description="They are dropped"),
)
async def evict(body: Annotated[EvictRequest, Body(openapi_examples=_EVICT)], svc: Svc) -> dict[str, Any]:
    """For measurements and to give memory back: the next use of a document comes from the tier below."""
    return await _control(svc, "evict", tiers=list(body.tiers))


@router.delete(
    "", summary="Empty the document cache", responses=documented({}, 400, 502, 503, description="It is empty")
)
async def clear(svc: Svc) -> dict[str, Any]:
    """Remove every document's KV from every tier. Documents stay indexed; their KV is computed again when
    needed.
    """
    return await _control(svc, "clear")
