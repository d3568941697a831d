"""`/rag/ingest` and `/rag/jobs`: ingest documents in jobs that survive a restart."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import Field

from ragserve.api import examples
from ragserve.api.access import Access, Caller
from ragserve.api.body import RequestModel, Text, media_type, parse_json
from ragserve.api.errors import UnsupportedMediaType, validated
from ragserve.api.openapi import documented
from ragserve.api.schemas import GivenLabels, IngestTexts, IngestUrls, Metadata
from ragserve.api.services import Services, Svc
from ragserve.api.uploads import upload_form
from ragserve.api.views import JobDetail, JobList, JobView
from ragserve.config import Namespace
from ragserve_index.types import Job

_MAX_NAMES = 100_000  # of a body: a thousand texts may have metadata of 64 fields each
router = APIRouter(tags=["ingest"])
JobId = Annotated[Text, Path(min_length=1, max_length=128, description="As returned by POST /rag/ingest.")]
JobState = Literal["queued", "running", "done", "failed", "cancelled"]
ItemState = Literal["pending", "indexed", "warmed", "unchanged", "removed", "failed", "skipped"]


class UploadFields(RequestModel):
    """The text fields of the multipart form."""

    namespace: Namespace = "default"
    metadata: Metadata = Field(default_factory=dict)
    labels: GivenLabels = None
    warm: bool = False
    prechunked: bool = False


class JobsPage(RequestModel):
    namespace: Namespace | None = Field(None, description="Only of this namespace.")
    state: JobState | None = Field(None, description="Only in this state.")
    limit: int = Field(100, ge=1, le=1000)


class ItemsPage(RequestModel):
    state: ItemState | None = Field(None, description="Only sources in this state.")
    limit: int = Field(100, ge=1, le=1000)
    after: int = Field(0, ge=0, description="`next` of the previous page.")


_FORM_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["files"],
    "additionalProperties": False,
    "properties": {
        "files": {
            "type": "array",
            "items": {"type": "string", "format": "binary"},
            "description": "At most /info limits.max_upload_files.",
        },
        "namespace": {"type": "string", "default": "default"},
        "metadata": {
            "type": "string",
            "description": "A JSON object: fields of all these documents, for filters.",
        },
        "labels": {
            "type": "string",
            "description": "A JSON list of labels of all these documents: who may see them. Each is one that "
            "the API key holds. Default: documents keep those that they have.",
        },
        "warm": {
            "type": "boolean",
            "default": False,
            "description": "Compute their KV into the document cache afterwards.",
        },
        "prechunked": {
            "type": "boolean",
            "default": False,
            "description": "The files are JSON lines of chunks, which are taken as they are: `text`, and "
            "where wanted `document` (its name), `title`, `page`, `section`, `order` and `metadata`. A line "
            "that cannot be used is a failed source.",
        },
    },
}
_BODY = {
    "required": True,
    "content": {
        "multipart/form-data": {"schema": _FORM_SCHEMA, "examples": examples.INGEST_FILES},
        "application/json": {
            "schema": {
                "oneOf": [
                    {"$ref": "#/components/schemas/IngestTexts"},
                    {"$ref": "#/components/schemas/IngestUrls"},
                ]
            },
            "examples": examples.INGEST_TEXTS | examples.INGEST_URLS,
        },
    },
}


@router.post(
    "/rag/ingest",
    summary="Ingest files, texts or URLs",
    status_code=202,
    response_model=JobView,
    responses=documented(
        examples.JOB_QUEUED,
        (400, 409, 413, 415, 503, 507),
        success=202,
        description="Accepted; `Location` is the job to watch",
    ),
    openapi_extra={"requestBody": _BODY},
)
async def ingest(request: Request, svc: Svc, caller: Caller) -> Response:
    """Take a multipart form of files, texts or URLs as JSON. They are on disk before the answer is sent, so a
    restart resumes the job; URLs are fetched by the job.

    An unreadable file fails alone, with the reason in the job's items. A file or text of an existing name
    replaces it; unchanged content costs a hash. Uploaded files are identified by their filename. With `warm`,
    a second job of kind `warm` follows."""
    kind = media_type(request)
    if kind == "application/json":
        data = await parse_json(await request.body(), _MAX_NAMES)
        take = _urls if isinstance(data, dict) and "urls" in data else _texts
        job = await take(data, svc, caller)
    elif kind == "multipart/form-data":
        job = await _files(request, svc, caller)
    else:
        raise UnsupportedMediaType(
            "Documents come as multipart/form-data or application/json, not as "
            f"{kind or 'a body without Content-Type'}.",
            hint="Send files as a form, e.g. curl -F files=@a.pdf.",
        )
    for runner in (svc.runner, svc.url_runner):
        runner.wake()
    return accepted(job, caller)


async def _texts(data: Any, svc: Services, caller: Access) -> Job:
    from ragserve.ingest.ingestor import SubmittedText

    body = validated(IngestTexts, data)
    caller.require("ingest", body.namespace)
    if body.warm:
        svc.warm_ups()
    texts = [
        SubmittedText(
            t.name, t.text, t.title or "", t.metadata, None if t.labels is None else tuple(t.labels)
        )
        for t in body.texts
    ]
    submit = svc.ingestor.submit_texts
    return await asyncio.to_thread(submit, body.namespace, texts, warm=body.warm, by=caller.submitter)


async def _urls(data: Any, svc: Services, caller: Access) -> Job:
    from ragserve.ingest.ingestor import PathOptions

    body = validated(IngestUrls, data)
    caller.require("ingest", body.namespace)
    if body.prune:
        caller.require("delete", body.namespace)
    if body.warm:
        svc.warm_ups()
    options = PathOptions(
        prune=body.prune,
        metadata=dict(body.metadata),
        warm=body.warm,
        sitemap=body.sitemap,
        other_hosts=body.other_hosts,
        labels=None if body.labels is None else tuple(body.labels),
    )
    return await asyncio.to_thread(
        svc.ingestor.submit_urls,
        body.namespace,
        body.urls,
        options,
        max_bytes=caller.who.limits.max_upload_bytes,
        by=caller.submitter,
    )


async def _files(request: Request, svc: Services, caller: Access) -> Job:
    from ragserve.ingest.ingestor import Upload

    limits = svc.settings
    async with upload_form(
        request, max_files=limits.max_upload_files, max_file_bytes=limits.max_upload_bytes
    ) as (files, texts):
        fields = validated(UploadFields, texts)
        caller.require("ingest", fields.namespace)
        if fields.warm:
            svc.warm_ups()
        labels = None if fields.labels is None else tuple(fields.labels)
        uploads = [Upload(form_name(str(file.filename)), file.file, labels=labels) for file in files]
        submit = svc.ingestor.submit_chunks if fields.prechunked else svc.ingestor.submit_files
        return await asyncio.to_thread(
            submit,
            fields.namespace,
            uploads,
            dict(fields.metadata),
            warm=fields.warm,
            by=caller.submitter,
        )


def form_name(name: str) -> str:
    """A file's name as its client has it: forms write three characters so, and no others."""
    return name.replace("%22", '"').replace("%0D", "\r").replace("%0A", "\n")


@router.get(
    "/rag/jobs",
    summary="List jobs",
    response_model=JobList,
    responses=documented(examples.JOBS, (400, 503), description="Newest first"),
)
async def jobs(page: Annotated[JobsPage, Query()], svc: Svc, caller: Caller) -> dict[str, Any]:
    """List ingestions and warm-ups, of the server and of `ragserve ingest` alike. Where a namespace has
    documents that the API key does not see, the key's own alone."""
    listed = svc.seen_jobs(caller).listed
    return {"jobs": await asyncio.to_thread(listed, page.namespace, page.state, page.limit)}


@router.get(
    "/rag/jobs/{job_id}",
    summary="Watch a job",
    response_model=JobDetail,
    responses=documented(examples.JOB, (400, 404, 503), description="The job, with a page of its sources"),
)
async def job(job_id: JobId, page: Annotated[ItemsPage, Query()], svc: Svc, caller: Caller) -> dict[str, Any]:
    """Show the job's state and the outcome of each of its sources, with the reason."""
    seen = svc.seen_jobs(caller)
    found = await asyncio.to_thread(seen.get, job_id)
    caller.namespace = found.namespace
    items = await asyncio.to_thread(seen.items, found, page.state)
    end = page.after + page.limit
    return {
        **JobView.model_validate(found, from_attributes=True).model_dump(),
        "items": items[page.after : end],
        "next": end if end < len(items) else None,
    }


@router.delete(
    "/rag/jobs/{job_id}",
    summary="Cancel a job",
    status_code=202,
    response_model=JobView,
    responses=documented(
        examples.JOB_CANCELLING, (400, 404, 503), success=202, description="It ends after the source at hand"
    ),
)
async def cancel(job_id: JobId, svc: Svc, caller: Caller) -> Job:
    """Stop a job. What is already indexed or warmed stays; a job that has ended is unchanged."""
    found = await asyncio.to_thread(svc.seen_jobs(caller).get, job_id)
    caller.require("ingest", found.namespace)
    await asyncio.to_thread(svc.ingestor.jobs.request_cancel, job_id)
    return await asyncio.to_thread(svc.ingestor.jobs.get, job_id)


def accepted(job: Job, caller: Access) -> Response:
    """Answer 202 with a new job and its address, and note it for the audit log."""
    caller.details = {"job": job.job_id, "documents": job.n_items}
    view = JobView.model_validate(job, from_attributes=True)
    headers = {"Location": f"/rag/jobs/{job.job_id}"}
    return Response(view.model_dump_json(), 202, headers, media_type="application/json")
