"""`/rag/documents` and `/rag/namespaces`: list, show and remove indexed documents."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Body, Path, Query
from pydantic import Field

from ragserve.api import examples
from ragserve.api.access import Caller
from ragserve.api.body import RequestModel, Text
from ragserve.api.json_route import JsonRoute
from ragserve.api.namespace_examples import LABELS_REQUESTS
from ragserve.api.openapi import documented
from ragserve.api.schemas import DocumentLabels
from ragserve.api.services import Svc
from ragserve.api.views import (
    DocumentList,
    DocumentView,
    NamespaceList,
    NamespaceView,
)
from ragserve.config import Namespace
from ragserve.errors import NotFound
from ragserve_index.filters import parse_filter
from ragserve_index.types import Document, NamespaceInfo

router = APIRouter(tags=["documents"], route_class=JsonRoute)
DocId = Annotated[Text, Path(min_length=1, max_length=128, description="As in citations and listings.")]
NamespaceName = Annotated[Namespace, Path(description="The namespace.")]


class Where(RequestModel):
    namespace: Namespace = Field("default", description="The namespace of the document.")


class DocumentsPage(Where):
    filter: Annotated[Text, Field(max_length=65_536)] | None = Field(
        None,
        description="A filter as JSON text, as in /rag/query.",
        examples=['{"op":"eq","field":"lang","value":"en"}'],
    )
    source_prefix: Annotated[Text, Field(max_length=4096)] | None = Field(
        None, description="Only sources with this prefix."
    )
    limit: int = Field(100, ge=1, le=1000)
    after: Annotated[Text, Field(max_length=128)] | None = Field(
        None, description="`next` of the previous page."
    )


@router.get(
    "/rag/documents",
    summary="List documents",
    response_model=DocumentList,
    responses=documented(examples.DOCUMENTS, (400, 404, 503), description="One page, ordered by doc_id"),
)
async def documents(page: Annotated[DocumentsPage, Query()], svc: Svc, caller: Caller) -> dict[str, Any]:
    """List the documents of a namespace that match the filter, if any."""
    caller.require("read", page.namespace)
    chosen = None if page.filter is None else parse_filter(page.filter)
    found = await asyncio.to_thread(
        svc.store.documents,
        page.namespace,
        filter=chosen,
        limit=page.limit + 1,  # one more shows if there is another page
        after=page.after,
        source_prefix=page.source_prefix,
    )
    shown = found[: page.limit]
    return {"documents": shown, "next": shown[-1].doc_id if len(found) > page.limit else None}


@router.get(
    "/rag/documents/{doc_id}",
    summary="Show a document",
    response_model=DocumentView,
    responses=documented(examples.DOCUMENT, (400, 404, 503), description="The document"),
)
async def document(doc_id: DocId, where: Annotated[Where, Query()], svc: Svc, caller: Caller) -> Document:
    """Show a document's registry entry; its text is in its chunks."""
    caller.require("read", where.namespace)
    return await asyncio.to_thread(svc.store.document, where.namespace, doc_id)


class Labels(RequestModel):
    labels: DocumentLabels


@router.put(
    "/rag/documents/{doc_id}/labels",
    summary="Change who sees a document",
    response_model=DocumentView,
    responses=documented(
        examples.DOCUMENT, (400, 404, 413, 415, 503, 507), description="The document from now on"
    ),
)
async def label(
    doc_id: DocId,
    where: Annotated[Where, Query()],
    body: Annotated[Labels, Body(openapi_examples=LABELS_REQUESTS)],
    svc: Svc,
    caller: Caller,
) -> Document:
    """Replace a document's labels. Those that the API key does not hold stay, and are not shown.

    Requests that begin after the answer go by the new ones: searches, sessions that rest on the document, and
    listings."""
    caller.require("ingest", where.namespace)
    caller.details = {"document": doc_id, "labels": body.labels}
    changed = await asyncio.to_thread(svc.store.set_labels, where.namespace, [doc_id], only=body.labels)
    return changed[0]


@router.delete(
    "/rag/documents/{doc_id}",
    summary="Remove a document",
    response_model=DocumentView,
    responses=documented(examples.DOCUMENT, (400, 404, 503, 507), description="What was removed"),
)
async def remove(doc_id: DocId, where: Annotated[Where, Query()], svc: Svc, caller: Caller) -> Document:
    """Remove a document and its KV in every tier. Queries that begin after the answer do not see it."""
    caller.require("delete", where.namespace)
    removed = await asyncio.to_thread(svc.store.remove_document, where.namespace, doc_id)
    await svc.evict()
    return removed


@router.get(
    "/rag/namespaces",
    summary="List namespaces",
    response_model=NamespaceList,
    responses=documented(examples.NAMESPACES, (503,), description="Those that the API key covers, by name"),
)
async def namespaces(svc: Svc, caller: Caller) -> dict[str, Any]:
    """List namespaces with size and embedder."""
    found = caller.visible(await asyncio.to_thread(svc.store.namespaces))
    return {"namespaces": sorted(found, key=lambda one: one.name)}


@router.get(
    "/rag/namespaces/{name}",
    summary="Show a namespace",
    response_model=NamespaceView,
    responses=documented(examples.NAMESPACE, (400, 404, 503), description="The namespace"),
)
async def namespace(name: NamespaceName, svc: Svc, caller: Caller) -> NamespaceInfo:
    """Show a namespace's size, version and embedder."""
    caller.require_visible(name)
    return await asyncio.to_thread(svc.store.namespace, name)


@router.delete(
    "/rag/namespaces/{name}",
    summary="Drop a namespace",
    response_model=NamespaceView,
    responses=documented(examples.NAMESPACE, (400, 404, 503, 507), description="What was dropped"),
)
async def drop(name: NamespaceName, svc: Svc, caller: Caller) -> NamespaceInfo:
    """Delete all its documents, chunks, vectors and KV, at once and for good, and cancel its jobs.

    A name that is not indexed is 404, after KV of documents that queries sent under it was dropped."""
    caller.require("delete", name)
    try:
        dropped = await asyncio.to_thread(svc.store.drop_namespace, name)
    except NotFound:
        await svc.engine.forget(name, None)
        await svc.dialogues.end_namespace(name)
        raise
    await svc.evict()
    await svc.dialogues.end_namespace(name)
    await svc.verification.dropped(svc.settings.data_dir, name)
    return dropped
