"""`/rag/ingest/preview`: how a file would be cut. Nothing is stored."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import BinaryIO

from fastapi import APIRouter, Request
from pydantic import Field

from ragserve.api import chunk_examples as examples
from ragserve.api.access import Caller
from ragserve.api.body import RequestModel, media_type
from ragserve.api.errors import UnsupportedMediaType, validated
from ragserve.api.ingest import form_name
from ragserve.api.openapi import documented
from ragserve.api.services import Services, Svc
from ragserve.api.uploads import upload_form
from ragserve.api.views import Preview, PreviewedChunk
from ragserve.ingest.sources import clean_name

router = APIRouter(tags=["ingest"])
PATH = "/rag/ingest/preview"


class PreviewFields(RequestModel):
    """The text fields of the multipart form."""

    chunk_tokens: int | None = Field(None, ge=16, le=8192)
    limit: int = Field(100, ge=1, le=1000)


_BODY = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["file"],
                "additionalProperties": False,
                "properties": {
                    "file": {"type": "string", "format": "binary"},
                    "chunk_tokens": {
                        "type": "integer",
                        "minimum": 16,
                        "maximum": 8192,
                        "description": "Largest chunk, in tokens. Default: the server's.",
                    },
                    "limit": {
                        "type": "integer",
                        "default": 100,
                        "minimum": 1,
                        "maximum": 1000,
                        "description": "Chunks to show.",
                    },
                },
            },
            "examples": examples.PREVIEW_FORM,
        }
    },
}


@router.post(
    PATH,
    summary="Preview how a file would be cut",
    response_model=Preview,
    responses=documented(
        examples.PREVIEW, (400, 413, 415, 503, 507), description="Its chunks; nothing is stored"
    ),
    openapi_extra={"requestBody": _BODY},
)
async def preview(request: Request, svc: Svc, caller: Caller) -> Preview:
    """Parse a file and cut it into chunks as an ingestion would, with its limits. A file that an ingestion
    would refuse is refused with the same reason (415). Two are made at a time; beside them the answer is
    429."""
    if (kind := media_type(request)) != "multipart/form-data":
        raise UnsupportedMediaType(
            f"A preview takes a file as multipart/form-data, not {kind or 'a body without Content-Type'}.",
            hint="Send it as a form, e.g. curl -F file=@a.pdf.",
        )
    async with upload_form(request, max_files=1, max_file_bytes=svc.settings.max_upload_bytes) as (
        files,
        texts,
    ):
        fields = validated(PreviewFields, texts)
        name = clean_name(form_name(str(files[0].filename)))
        return await asyncio.to_thread(_made, svc, name, files[0].file, fields)


def _made(svc: Services, name: str, stream: BinaryIO, fields: PreviewFields) -> Preview:
    from ragserve.ingest.preview import previewed
    from ragserve.ingest.spool import unusable_disk_explained

    with tempfile.TemporaryDirectory(prefix="ragserve-") as folder:
        copy = Path(folder) / "file"
        with unusable_disk_explained(copy), copy.open("wb") as file:
            shutil.copyfileobj(stream, file)
        filename = name.rsplit("/", 1)[-1]
        parsed = svc.ingestor.previewer.preview(copy, filename, chunk_tokens=fields.chunk_tokens)
    chunks = previewed(parsed, name)
    return Preview(
        filename=filename,
        title=chunks[0].title,
        mime=parsed.mime,
        size_bytes=parsed.size,
        chunk_tokens=fields.chunk_tokens or svc.settings.chunk_tokens,
        n_chunks=len(chunks),
        n_tokens=sum(chunk.n_tokens for chunk in chunks),
        note=parsed.note or None,
        metadata=dict(parsed.metadata),
        chunks=[PreviewedChunk.model_validate(chunk) for chunk in chunks[: fields.limit]],
    )
