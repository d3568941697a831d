"""Postgres's side of what SQL says differently: JSON, ids, and filters on metadata."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from ragserve_index.database import Connection, Dialect
from ragserve_index.postgres.full_text import FullText

_PARAMETER = re.compile(r"\?(\d*)")


class PostgresDialect(Dialect):
    """Metadata is also ``jsonb``, in the column ``fields``."""

    integers = "(SELECT CAST(value AS BIGINT) AS value FROM jsonb_array_elements_text(CAST(? AS jsonb)))"
    texts = "jsonb_array_elements_text(CAST(? AS jsonb))"
    skip_locked = " FOR UPDATE SKIP LOCKED"
    nfc = "normalize"
    stamps_kept = 10_000
    lexical = FullText()

    def reserve_chunks(self, connection: Connection, n: int) -> int:
        last = connection.execute("UPDATE last_chunk SET chunk_id = chunk_id + ? RETURNING chunk_id", (n,))
        return int(last.fetchone()[0]) - n + 1

    def one_of(self, field: str, values: tuple[Any, ...], out: list[Any]) -> str:
        out += [field, json.dumps(values, ensure_ascii=False)]
        # of a list and a plain value, @> asks whether it is an element
        found = (
            "COALESCE((SELECT bool_or((d.fields -> CAST(? AS TEXT)) @> value)"
            " FROM jsonb_array_elements(CAST(? AS jsonb))), FALSE)"
        )
        if None not in values:
            return found
        out.append(field)
        return f"({found} OR COALESCE(jsonb_typeof(d.fields -> CAST(? AS TEXT)), 'null') = 'null')"

    def in_range(self, field: str, bounds: Sequence[tuple[str, int | float | str]], out: list[Any]) -> str:
        value, kind, sql_type = "CAST(d.fields ->> CAST(? AS TEXT) AS NUMERIC)", "number", "NUMERIC"
        if isinstance(bounds[0][1], str):
            value, kind, sql_type = '(d.fields ->> CAST(? AS TEXT)) COLLATE "C"', "string", "TEXT"
        out.append(field)
        for _, bound in bounds:
            out += [field, str(bound)]
        compared = " AND ".join(f"{value} {sign} CAST(? AS {sql_type})" for sign, _ in bounds)
        # CASE: nothing but a number may be cast to one
        return (
            f"CASE WHEN jsonb_typeof(d.fields -> CAST(? AS TEXT)) = '{kind}' THEN {compared} ELSE FALSE END"
        )


@lru_cache(maxsize=1024)
def converted(sql: str) -> tuple[str, bool]:
    """The statement with psycopg's parameters, and True if they are numbered."""
    numbered = False

    def parameter(found: re.Match[str]) -> str:
        nonlocal numbered
        numbered = numbered or bool(found[1])
        return f"%(p{found[1]})s" if found[1] else "%s"

    return _PARAMETER.sub(parameter, sql.replace("%", "%%")), numbered


POSTGRES = PostgresDialect()
