"""Whether a session may go on: the documents that it rests on must be in the index as it has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ragserve.errors import NotFound

if TYPE_CHECKING:
    from ragserve.answering.sessions.kept_dialogue import Dialogue
    from ragserve_index import IndexStore


def lost_document(dialogue: Dialogue, store: IndexStore, made_at: Mapping[str, float]) -> str | None:
    """Say which document of a session is not in the index any more, or that its namespace is gone; None if
    all is there. ``made_at``: `IndexStore.made_at`, of now. Reads the registry."""
    made = dialogue.namespace_made_at
    if made is not None and made_at.get(dialogue.namespace) != made:
        return "its namespace was removed."
    texts = {p.chunk_id: (p.title, p.text) for p in dialogue.passages if p.chunk_id is not None}
    if not texts:
        return None
    try:
        found = store.chunks(dialogue.namespace, list(texts))
    except NotFound:
        return "a document that it rests on was removed or replaced."
    changed = [chunk.title for chunk in found if (chunk.title, chunk.text) != texts[chunk.chunk_id]]
    return f"document {changed[0]!r}, on which it rests, was replaced." if changed else None
