"""`/rag/cache`: figures of the document cache, verification, warm-up and eviction."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Response
from pydantic import Field

from ragserve.api import examples
from ragserve.api.access import Caller
from ragserve.api.body import RequestModel, Text
from ragserve.api.ingest import accepted
from ragserve.api.json_route import CheckedRoute
from ragserve.api.openapi import documented
from ragserve.api.services import Svc
from ragserve.api.views import JobView
from ragserve.config import Namespace

router = APIRouter(prefix="/rag/cache", tags=["cache"], route_class=CheckedRoute)


class EvictRequest(RequestModel):
    """The tiers to empty; the tiers below keep their copies."""

    tiers: list[Literal["device", "host"]] = Field(min_length=1, max_length=2)


class WarmRequest(RequestModel):
    """Documents whose KV to compute."""

    namespace: Namespace = Field("default", description="The namespace.")
    documents: list[Annotated[Text, Field(min_length=1, max_length=4096)]] | None = Field(
        None,
        min_length=1,
        max_length=10_000,
        description="doc_id or source of each; default: all of the namespace.",
    )


@router.get(
    "",
    summary="Show the document cache",
    responses=documented(examples.CACHE, (400, 502, 503), description="Figures per tier"),
)
async def stat(svc: Svc) -> dict[str, Any]:
    """Bytes, budgets and documents per tier (device, host, disk) and namespace; hits, misses, evictions and
    faults; analyses, and how many of them are `waiting` for an idle moment."""
    return await svc.document_cache().control("stat")


@router.post(
    "/verify",
    summary="Check the document cache",
    responses=documented(
        {"pages": 412, "bad": []}, (400, 502, 503), description="Pages read, and the faulty ones with reasons"
    ),
)
async def verify(svc: Svc) -> dict[str, Any]:
    """Check every page on disk against its checksum, and the accounting of all tiers. Slow; generation goes
    on meanwhile."""
    return await svc.document_cache().control("verify")


@router.post(
    "/warm",
    summary="Compute documents' KV ahead of queries",
    status_code=202,
    response_model=JobView,
    responses=documented(
        examples.JOB_WARM,
        (400, 404, 413, 415, 503, 507),
        success=202,
        description="Accepted; `Location` is the job to watch",
    ),
)
async def warm(
    body: Annotated[WarmRequest, Body(openapi_examples=examples.WARM_REQUESTS)], svc: Svc, caller: Caller
) -> Response:
    """Start a job that computes missing KV and writes it through to the lowest tier, at the disk's pace.

    It survives a restart and can be cancelled like any job. A document's item is `warmed`, `unchanged` (it
    was cached), `failed` or `skipped` (no longer indexed, or the tier's budget is full), with the reason."""
    from ragserve.cache.warm import submit_warm

    caller.require("ingest", body.namespace)
    runner = svc.warm_ups()
    job = await asyncio.to_thread(submit_warm, svc.store, body.namespace, body.documents, caller.submitter)
    runner.wake()
    return accepted(job, caller)


@router.post(
    "/evict",
    summary="Drop documents from upper tiers",
    responses=documented({}, (400, 413, 415, 502, 503), description="Dropped"),
)
async def evict(
    body: Annotated[EvictRequest, Body(openapi_examples=examples.EVICT_REQUESTS)], svc: Svc
) -> dict[str, Any]:
    """Evict documents, to measure or to free memory: their next use reads the tier below."""
    return await svc.document_cache().control("evict", tiers=list(body.tiers))


@router.delete(
    "", summary="Empty the document cache", responses=documented({}, (400, 502, 503), description="Empty")
)
async def clear(svc: Svc) -> dict[str, Any]:
    """Remove every document's KV from every tier, and prompts and sessions that may hold documents, unless an
    answer under way reads them. Documents stay indexed; their KV is computed again when needed."""
    return await svc.document_cache().control("clear")
