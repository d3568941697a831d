"""Warm-ups of what was ingested while no server ran, in the background of the next one."""

from __future__ import annotations

import logging
from collections import defaultdict

from ragserve.cache.warm import KIND
from ragserve.ingest.prune import every_document
from ragserve_index import IndexStore, JobStore
from ragserve_index.types import Document

log = logging.getLogger(__name__)
_MARKS = 16  # tokens that a prompt's layout adds to a chunk, at least


def submit_cold(store: IndexStore, room: int | None) -> int:
    """Queue a warm-up in the background for every namespace, its newest documents first: of all of them
    those that the lasting tier has ``room`` for, in tokens (None: without a limit). Returns their number.

    What is cached already is skipped as the job comes to it. A namespace whose earlier warm-up goes on gets
    no other, and a registry that servers share none: each has a cache of its own."""
    if store.database.shared:
        return 0
    jobs = JobStore(store)
    busy = {
        job.namespace
        for state in ("queued", "running")
        for job in jobs.list(state=state, limit=1_000_000)
        if job.kind == KIND
    }
    names = [info.name for info in store.namespaces() if info.n_documents and info.name not in busy]
    newest: list[Document] = sorted(
        (document for name in names for document in every_document(store, name)),
        key=lambda document: -document.updated_at,
    )
    chosen: dict[str, list[str]] = defaultdict(list)
    for document in newest:
        tokens = document.n_tokens + _MARKS * document.n_chunks
        if room is not None and tokens > room:
            break
        room = None if room is None else room - tokens
        chosen[document.namespace].append(document.source)
    for name, sources in chosen.items():
        jobs.create(name, {"kind": KIND, "background": True}, sources)
    return sum(map(len, chosen.values()))
