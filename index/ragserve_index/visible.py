"""What a viewer sees of a namespace, in SQL.

Documents have few different sets of labels. `Viewer` decides about each set, and SQL compares texts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ragserve.errors import Forbidden, InvalidRequest
from ragserve_index.batch import Prepared, document_ids
from ragserve_index.database import Connection
from ragserve_index.errors import InvalidDocument
from ragserve_index.types import NamespaceInfo, NewDocument
from ragserve_index.viewers import Viewer, checked_labels

Condition = tuple[str, list[Any]]
"""SQL over the alias ``d`` (documents), never NULL, and its parameters."""

_LABEL_SETS = """
WITH RECURSIVE sets(labels) AS (
  SELECT min(labels) FROM documents WHERE namespace_id = ?1
  UNION ALL
  SELECT (SELECT min(d.labels) FROM documents d WHERE d.namespace_id = ?1 AND d.labels > sets.labels)
  FROM sets WHERE sets.labels IS NOT NULL
)
SELECT labels FROM sets WHERE labels IS NOT NULL
"""  # a look-up for each, whereas DISTINCT reads an entry for each document


def label_sets(connection: Connection, ns_id: int) -> list[str]:
    """The sets of labels that documents of the namespace have, as they are stored."""
    return [row[0] for row in connection.execute(_LABEL_SETS, (ns_id,))]


def stored_labels(connection: Connection, ns_id: int, doc_ids: Iterable[str]) -> dict[str, str]:
    """The labels of those of the documents that exist, by doc_id, as they are stored."""
    rows = connection.execute(
        "SELECT doc_id, labels FROM documents"
        f" WHERE namespace_id = ? AND doc_id IN (SELECT value FROM {connection.dialect.texts} listed)",
        (ns_id, json.dumps(list(doc_ids))),
    )
    return dict(rows.fetchall())


def visible(connection: Connection, ns_id: int, viewer: Viewer) -> Condition | None:
    """The condition that a document of the namespace is one of the viewer's; None if all are."""
    if viewer.labels is None:
        return None
    sets = label_sets(connection, ns_id)
    seen = [each for each in sets if viewer.sees(json.loads(each))]
    if len(seen) == len(sets):
        return None
    return f"d.labels IN (SELECT value FROM {connection.dialect.texts} listed)", [json.dumps(seen)]


def as_seen(connection: Connection, ns_id: int, info: NamespaceInfo, condition: Condition) -> NamespaceInfo:
    """The namespace with the numbers of the documents that meet a viewer's condition."""
    sql, parameters = condition
    counted = connection.execute(
        "SELECT count(*), CAST(coalesce(sum(d.n_chunks), 0) AS BIGINT),"
        " CAST(coalesce(sum(d.n_tokens), 0) AS BIGINT) FROM documents d"
        f" WHERE d.namespace_id = ? AND {sql}",
        [ns_id, *parameters],
    ).fetchone()
    n_documents, n_chunks, n_tokens = counted
    return replace(info, n_documents=n_documents, n_chunks=n_chunks, n_tokens=n_tokens)


def both(one: Condition | None, other: Condition | None) -> Condition | None:
    """The condition that two are met."""
    if one is None or other is None:
        return one or other
    return f"({one[0]} AND {other[0]})", [*one[1], *other[1]]


def to_json(labels: Sequence[str]) -> str:
    """Labels as they are stored."""
    return json.dumps(list(labels), separators=(",", ":"))


def replaced_labels(viewer: Viewer, document: NewDocument, old: str) -> str:
    """Labels of a document that a viewer writes, as they are stored. Of the ``old`` ones those stay that the
    viewer does not hold. Raises Forbidden for a document that the viewer does not see, and InvalidDocument
    for too many labels."""
    if not sees(viewer, old):
        raise Forbidden(
            f"Document {document.source!r} has labels that this API key does not hold.",
            hint="Give the new one another name.",
            code="label_not_held",
        )
    if document.labels is None:
        return old
    others = [each for each in json.loads(old) if not viewer.holds((each,))]
    try:
        return to_json(checked_labels([*document.labels, *others]))
    except InvalidRequest as error:
        message = f"Document {document.source!r} would have {error.message}"
        raise InvalidDocument(message, code=error.code, param=error.param) from None


def labels_of_new(
    connection: Connection, ns_id: int, namespace: str, batch: Sequence[Prepared]
) -> dict[str, str]:
    """What documents of a batch keep if they are new, by doc_id, as labels are stored. Attachments get those
    that their messages have now, whatever they had when the batch was begun."""
    before = {
        item.doc_id: to_json(item.document.labels_before) for item in batch if item.document.labels is None
    }
    roots = {item.document.root for item in batch if item.document.root and item.document.labels is None}
    if not roots:
        return before
    ids = {doc_id: root for root in roots for doc_id in document_ids(namespace, root)}
    found = {ids[doc_id]: labels for doc_id, labels in stored_labels(connection, ns_id, ids).items()}
    return before | {item.doc_id: found[item.document.root] for item in batch if item.document.root in found}


def sees(viewer: Viewer, labels: str) -> bool:
    """True if a viewer sees documents with these labels, as they are stored."""
    return viewer.labels is None or viewer.sees(json.loads(labels))
