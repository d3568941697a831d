"""SQLite's side of what SQL says differently: JSON, ids, and filters on metadata."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ragserve_index.database import Connection, Dialect
from ragserve_index.sqlite.fts5 import Fts5


class SqliteDialect(Dialect):
    """Metadata is JSON text, read by SQLite's JSON functions."""

    integers = texts = "json_each(?)"
    skip_locked = ""
    nfc = "nfc"  # of `SqliteDatabase`
    stamps_kept = 0
    lexical = Fts5()

    def reserve_chunks(self, connection: Connection, n: int) -> int:
        last = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'chunks'").fetchone()
        return int(last[0]) + 1 if last else 1  # AUTOINCREMENT: inserting the chunks moves it

    def one_of(self, field: str, values: tuple[Any, ...], out: list[Any]) -> str:
        texts = [value for value in values if isinstance(value, str)]
        numbers = [
            value for value in values if isinstance(value, int | float) and not isinstance(value, bool)
        ]
        given = [
            (kinds, json.dumps(wanted, ensure_ascii=False))
            for kinds, wanted in ((("text",), texts), (("integer", "real"), numbers))
            if wanted
        ]
        path = f'$."{field}"'
        out.append(path)
        cases = []
        if given:
            out.append(path)
            elements = []
            for kinds, listed in given:
                out.append(listed)
                among = ", ".join(f"'{kind}'" for kind in kinds)
                elements.append(f"(e.type IN ({among}) AND e.value IN (SELECT value FROM json_each(?)))")
            cases.append(
                "WHEN 'array' THEN EXISTS (SELECT 1 FROM json_each(json_extract(d.metadata, ?)) e"
                f" WHERE {' OR '.join(elements)})"
            )
        for kinds, listed in given:
            for kind in kinds:
                out += [path, listed]
                cases.append(
                    f"WHEN '{kind}' THEN json_extract(d.metadata, ?) IN (SELECT value FROM json_each(?))"
                )
        for value, kind in ((True, "true"), (False, "false"), (None, "null")):
            if any(one is value for one in values):
                cases.append(f"WHEN '{kind}' THEN 1")
        return f"(CASE COALESCE(json_type(d.metadata, ?), 'null') {' '.join(cases)} ELSE 0 END)"

    def in_range(self, field: str, bounds: Sequence[tuple[str, int | float | str]], out: list[Any]) -> str:
        path = f'$."{field}"'
        kinds = "('text')" if isinstance(bounds[0][1], str) else "('integer','real')"
        out.append(path)
        for _, value in bounds:
            out += [path, value]
        compared = " AND ".join(f"json_extract(d.metadata, ?) {sign} ?" for sign, _ in bounds)
        return f"COALESCE(json_type(d.metadata, ?) IN {kinds} AND {compared}, 0)"


SQLITE = SqliteDialect()
