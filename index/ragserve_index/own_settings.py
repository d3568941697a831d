"""A namespace's own settings: a JSON object that the registry keeps and does not read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ragserve_index.database import Connection


def read(connection: Connection, name: str) -> dict[str, Any]:
    """The settings of the namespace of a name; empty without any."""
    row = connection.execute(
        "SELECT s.data FROM namespace_settings s JOIN namespaces n ON n.id = s.namespace_id WHERE n.name = ?",
        (name,),
    ).fetchone()
    return dict(json.loads(row[0])) if row else {}


def write(connection: Connection, namespace_id: int, settings: Mapping[str, Any]) -> None:
    """Replace a namespace's settings."""
    connection.execute("DELETE FROM namespace_settings WHERE namespace_id = ?", (namespace_id,))
    if settings:
        data = json.dumps(dict(settings), ensure_ascii=False)
        connection.execute("INSERT INTO namespace_settings VALUES (?, ?)", (namespace_id, data))
