"""Changing the labels of documents."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ragserve.errors import Conflict, Forbidden
from ragserve_index import registry
from ragserve_index.attached_documents import attached_to
from ragserve_index.database import Connection
from ragserve_index.types import Document
from ragserve_index.viewers import MAX_LABELS, Viewer, checked_labels
from ragserve_index.visible import label_sets, sees, stored_labels, to_json, visible

MAX_NAMED = 8 * MAX_LABELS  # to be removed at once
Change = Callable[[frozenset[str]], Sequence[str]]
"""Makes a document's new labels of the old ones."""


def change(viewer: Viewer, add: Iterable[str], remove: Iterable[str], only: Iterable[str] | None) -> Change:
    """See :meth:`IndexStore.set_labels`. A viewer's change leaves the labels that it does not hold."""
    added, removed = frozenset(checked_labels(add)), frozenset(checked_labels(remove, MAX_NAMED))
    kept = None if only is None else frozenset(checked_labels(only))
    check_held(viewer, added | removed | (kept or frozenset()))

    def changed(labels: frozenset[str]) -> Sequence[str]:
        others = labels.difference(viewer.shown(labels)) if kept is not None else labels
        return sorted((others | (kept or frozenset()) | added) - removed)

    return changed


def check_held(viewer: Viewer, labels: Iterable[str]) -> None:
    """Raises Forbidden for labels that a viewer does not hold."""
    if lacking := sorted(each for each in labels if not viewer.holds((each,))):
        raise Forbidden(
            f"This API key does not hold the label {lacking[0]!r}.",
            hint="Use one of the key's labels, or ask the server's operator.",
            code="label_not_held",
            param="labels",
        )


def check_sees_all(connection: Connection, ns: registry.Namespace, viewer: Viewer) -> None:
    """Raises Forbidden unless a viewer sees every document of a namespace."""
    if visible(connection, ns.id, viewer) is not None:
        raise Forbidden(
            f"Namespace {ns.name!r} has documents with labels that this API key does not hold.",
            hint="Ask the server's operator to drop it.",
            code="label_not_held",
        )


def check_sees_attached(
    connection: Connection, ns: registry.Namespace, attached: Sequence[str], viewer: Viewer
) -> None:
    """Raises Forbidden unless a viewer sees all of what came attached to a document."""
    if hidden_ids(connection, ns.name, attached, viewer):
        raise Forbidden(
            "An attachment of this document has labels that this API key does not hold.",
            hint="Ask the server's operator to remove it.",
            code="label_not_held",
        )


def labels_seen(connection: Connection, namespace: str, viewer: Viewer) -> list[str]:
    """See :meth:`IndexStore.labels`."""
    ns = registry.find_namespace(connection, namespace)
    sets = [] if ns is None else map(json.loads, label_sets(connection, ns.id))
    return sorted({label for labels in sets for label in viewer.shown(labels)})


def hidden_ids(connection: Connection, namespace: str, doc_ids: Sequence[str], viewer: Viewer) -> set[str]:
    """Those of the ids that are documents which a viewer does not see."""
    ns = registry.find_namespace(connection, namespace)
    if ns is None or viewer.labels is None:
        return set()
    stored = stored_labels(connection, ns.id, doc_ids)
    return {doc_id for doc_id, labels in stored.items() if not sees(viewer, labels)}


def set_labels(
    connection: Connection,
    ns: registry.Namespace,
    doc_ids: Sequence[str],
    change: Change,
    viewer: Viewer,
    content_hash: str | None = None,
) -> list[Document]:
    """Give documents of a viewer, and what came attached to them, other labels, those that ``change`` makes
    of the old ones, as version ``ns.version + 1`` if any differ. Returns the documents. Raises NotFound, and
    Conflict for one of another ``content_hash``, and changes nothing."""
    found, differs, named = [], False, set(doc_ids)
    attached = attached_to(connection, ns, doc_ids)
    stored = stored_labels(connection, ns.id, [*doc_ids, *attached])
    for doc_id in [*doc_ids, *(one for one in attached if one not in named and sees(viewer, stored[one]))]:
        before = registry.get_document(connection, ns, doc_id, viewer)
        if content_hash is not None and doc_id in named and before.content_hash != content_hash:
            message = f"Document {before.source!r} was replaced meanwhile."
            raise Conflict(message, hint="Ingest it again.", code="document_replaced")
        kept = frozenset(json.loads(stored[doc_id]))
        labels = checked_labels(change(kept))
        if set(labels) != kept:
            differs = True
            connection.execute(
                "UPDATE documents SET labels = ? WHERE namespace_id = ? AND doc_id = ?",
                (to_json(labels), ns.id, doc_id),
            )
        found.append(replace(before, labels=tuple(viewer.shown(labels))))
    if differs:
        registry.commit_version(connection, ns)
    return found[: len(doc_ids)]
