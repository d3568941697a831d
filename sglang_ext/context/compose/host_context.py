"""Finds a composed context in the host pages of its documents, for a request that reads it there."""

from __future__ import annotations

import numpy as np

from sglang_ext.context.compose.request import ComposedContext, DocumentOnDevice
from sglang_ext.kv_offload.documents.context_pages import ContextPages
from sglang_ext.kv_offload.documents.host_documents import HostDocuments, WantedDocument


def context_on_host(
    context: ComposedContext, documents: HostDocuments, page_size: int
) -> ContextPages | None:
    """Hold the pages of all of the context's documents; None, and none are held, if not all of what it keeps
    is on the host. It must keep the same tokens in all layers (`ContextSelection.is_copied`).

    The device has documents' values: host pages of 8 bits do not stand for one that it has.
    ``page_size``: tokens of a page of the context."""
    sources = context.located.sources
    if documents.pages.shape.bits == 8 and any(isinstance(s, DocumentOnDevice) for s in sources):
        return None
    spans, block = context.plan.spans, documents.pages.shape.block
    wanted = [
        WantedDocument(
            key,
            context.plan.owner(number),
            context.ids_32[span.start : span.end],
            context.blocks(number, block),
        )
        for number, (span, key) in enumerate(zip(spans, context.keys, strict=True))
    ]
    found = documents.hold(wanted)
    if found is None:
        return None
    starts = np.array([span.start for span in spans], dtype=np.int64)
    return ContextPages(
        documents,
        list(context.keys),
        found,
        kept=context.selection.kept.numpy(),
        starts=starts,
        shifts=starts if context.partial.rotate else np.zeros_like(starts),
        page_size=page_size,
    )
