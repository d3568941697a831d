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
    for name, made in dialogue.namespaces_made_at.items():
        if made_at.get(name) != made:
            return "its namespace was removed." if name == dialogue.namespace else f"{name!r} was removed."
    texts: dict[str, dict[int, tuple[str, str]]] = {}
    for p in dialogue.passages:
        if p.chunk_id is not None:
            texts.setdefault(p.namespace or dialogue.namespace, {})[p.chunk_id] = p.title, p.text
    for name, own in texts.items():
        try:
            found = store.chunks(name, list(own))
        except NotFound:
            return "a document that it rests on was removed or replaced."
        changed = [chunk.title for chunk in found if (chunk.title, chunk.text) != own[chunk.chunk_id]]
        if changed:
            return f"document {changed[0]!r}, on which it rests, was replaced."
    return None
