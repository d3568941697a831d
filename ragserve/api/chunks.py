"""`/rag/documents/{doc_id}/chunks`: list, read, edit, disable and enable the pieces of a document."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Body, Path, Query
from pydantic import Field, model_validator

from ragserve.api import chunk_examples as examples
from ragserve.api.access import Caller
from ragserve.api.body import RequestModel, Text
from ragserve.api.documents import DocId, Where
from ragserve.api.json_route import JsonRoute
from ragserve.api.openapi import documented
from ragserve.api.services import Svc
from ragserve.api.views import ChunkList, ChunkView, LostCorrections
from ragserve.errors import NotFound

router = APIRouter(tags=["documents"], route_class=JsonRoute)
CHUNKS = "/rag/documents/{doc_id}/chunks"
CHUNK = "/rag/documents/{doc_id}/chunks/{ordinal}"
LOST = "/rag/documents/{doc_id}/lost-corrections"
MAX_CHARS = 100_000
Ordinal = Annotated[int, Path(ge=0, lt=2**31, description="`ordinal` of the chunk, from 0.")]


class ChunksPage(Where):
    limit: int = Field(100, ge=1, le=1000)
    after: int = Field(0, ge=0, description="`next` of the previous page.")


class ChunkChange(RequestModel):
    """What to change of a chunk; what is left out stays."""

    version: Annotated[Text, Field(min_length=1, max_length=64)] = Field(
        description="`version` of the chunk as it was read. If it was changed since, the answer is 409."
    )
    text: Annotated[Text, Field(max_length=MAX_CHARS)] | None = Field(
        None, description="Its text, of `chunk_tokens` tokens at most. `original` ends the edit."
    )
    disabled: bool | None = Field(None, description="True: in no search, from the next one on.")

    @model_validator(mode="after")
    def _asks(self) -> ChunkChange:
        if self.text is None and self.disabled is None:
            raise ValueError("nothing to change: give text or disabled")
        return self


@router.get(
    CHUNKS,
    summary="Show a document's chunks",
    response_model=ChunkList,
    responses=documented(examples.CHUNKS, (400, 404, 503), description="One page, in the document's order"),
)
async def chunks(
    doc_id: DocId, page: Annotated[ChunksPage, Query()], svc: Svc, caller: Caller
) -> dict[str, Any]:
    """Show the searched pieces of a document and their places in it, with the right `ingest` also those that
    are disabled."""
    caller.require("read", page.namespace)
    found = await asyncio.to_thread(
        svc.store.chunk_changes.states, page.namespace, doc_id, after=page.after, limit=page.limit + 1
    )
    following = page.after + page.limit
    shown = [each for each in found if each.chunk.ordinal < following]
    edits = caller.who.may("ingest", page.namespace)
    views = [ChunkView.of(each, edits=edits) for each in shown if edits or not each.disabled]
    return {"chunks": views, "next": following if len(found) > len(shown) else None}


@router.get(
    CHUNK,
    summary="Show a chunk",
    response_model=ChunkView,
    responses=documented(examples.CHUNK, (400, 404, 503), description="The chunk"),
)
async def chunk(
    doc_id: DocId, ordinal: Ordinal, where: Annotated[Where, Query()], svc: Svc, caller: Caller
) -> ChunkView:
    """Show one piece of a document; a disabled one with the right `ingest`."""
    caller.require("read", where.namespace)
    found = await asyncio.to_thread(svc.store.chunk_changes.state, where.namespace, doc_id, ordinal)
    edits = caller.who.may("ingest", where.namespace)
    if found.disabled and not edits:
        raise NotFound(f"Document {doc_id!r} has no chunk {ordinal}.", code="chunk_not_found")
    return ChunkView.of(found, edits=edits)


@router.patch(
    CHUNK,
    summary="Edit, disable or enable a chunk",
    response_model=ChunkView,
    responses=documented(
        examples.EDITED_CHUNK,
        (400, 404, 409, 413, 415, 429, 503, 507),
        description="The chunk as it is now",
    ),
)
async def change(
    doc_id: DocId,
    ordinal: Ordinal,
    where: Annotated[Where, Query()],
    body: Annotated[ChunkChange, Body(openapi_examples=examples.CHANGES)],
    svc: Svc,
    caller: Caller,
) -> ChunkView:
    """Give a chunk another text, or take it out of every search. Queries that begin after the answer see it
    so; KV of the old text is dropped, and sessions that rest on the document end.

    The change stays while the file is ingested again, as long as its chunk has the same text there."""
    caller.require_visible(where.namespace)
    caller.require("ingest", where.namespace)
    changed = await asyncio.to_thread(
        svc.ingestor.editor.change,
        where.namespace,
        doc_id,
        ordinal,
        body.version,
        text=body.text,
        disabled=body.disabled,
        viewer=caller.who.viewer,
    )
    caller.details.update(document=doc_id, chunk=ordinal)
    await svc.evict()
    return ChunkView.of(changed, edits=True)


@router.get(
    LOST,
    summary="Show lost corrections",
    response_model=LostCorrections,
    responses=documented(examples.LOST, (400, 404, 503), description="At most 1,000, the first lost first"),
)
async def lost(doc_id: DocId, where: Annotated[Where, Query()], svc: Svc, caller: Caller) -> dict[str, Any]:
    """Show changes of chunks whose text a new version of the file no longer has."""
    caller.require_visible(where.namespace)
    caller.require("ingest", where.namespace)
    await asyncio.to_thread(svc.store.document, where.namespace, doc_id)
    found = await asyncio.to_thread(svc.store.chunk_changes.lost, where.namespace, [doc_id])
    return {"lost": sorted(found.get(doc_id, []), key=lambda one: one.lost_at)}


@router.delete(
    LOST,
    summary="Forget lost corrections",
    response_model=LostCorrections,
    responses=documented(examples.NOTHING_LOST, (400, 404, 503, 507), description="None is left"),
)
async def forget(doc_id: DocId, where: Annotated[Where, Query()], svc: Svc, caller: Caller) -> dict[str, Any]:
    """Remove them for good."""
    caller.require_visible(where.namespace)
    caller.require("ingest", where.namespace)
    await asyncio.to_thread(svc.store.chunk_changes.forget_lost, where.namespace, doc_id)
    return {"lost": []}
