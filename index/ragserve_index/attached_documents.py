"""Documents that came attached to another one: they go with it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from ragserve_index import registry
from ragserve_index.batch import document_ids
from ragserve_index.database import Connection
from ragserve_index.registry import Namespace
from ragserve_index.viewers import EVERYTHING

ATTACHMENTS = "attachments"
"""Metadata of a message: the names of its attachments. Their sources are its own, ``/``, and the name."""
PARENT = "parent"
"""Metadata of an attachment: the source of the message that it came with."""


def attached_to(connection: Connection, ns: Namespace, doc_ids: Sequence[str]) -> list[str]:
    """Ids of the documents that came attached to these, or to those that did."""
    found: list[str] = []
    level = _documents(connection, ns, doc_ids)
    while level:
        sources = {source for _, source, _ in level}
        named = [
            doc_id
            for _, source, metadata in level
            for name in _names(metadata)
            for doc_id in document_ids(ns.name, f"{source}/{name}")
        ]
        below = _documents(connection, ns, named) if named else []
        level = [each for each in below if each[2].get(PARENT) in sources and each[0] not in found]
        found += [doc_id for doc_id, _, _ in level]
    return found


def remove_attached(connection: Connection, ns: Namespace, doc_ids: Iterable[str]) -> None:
    """Remove documents, each as a version of its own."""
    for doc_id in doc_ids:
        registry.delete_document(connection, registry.namespace(connection, ns.name), doc_id, EVERYTHING)


def _names(metadata: Mapping[str, object]) -> list[object]:
    named = metadata.get(ATTACHMENTS)  # a user's own may be anything
    return named if isinstance(named, list) else []


def _documents(
    connection: Connection, ns: Namespace, doc_ids: Sequence[str]
) -> list[tuple[str, str, dict[str, object]]]:
    rows = connection.execute(
        "SELECT doc_id, source, metadata FROM documents"
        f" WHERE namespace_id = ? AND doc_id IN (SELECT value FROM {connection.dialect.texts} listed)",
        (ns.id, json.dumps(list(doc_ids))),
    )
    return [
        (doc_id, source, json.loads(metadata))
        for doc_id, source, metadata in rows
        if ATTACHMENTS in metadata or PARENT in metadata
    ]
