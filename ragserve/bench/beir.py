"""Retrieval collections in BEIR's layout: ``corpus.jsonl[.gz]``, ``queries.jsonl[.gz]``,
``qrels/test.tsv``."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragserve.errors import InvalidRequest
from ragserve.json_lines import json_lines

_LAYOUT = "A collection has corpus.jsonl[.gz], queries.jsonl[.gz] and qrels/test.tsv."


@dataclass(frozen=True, slots=True)
class Collection:
    """``documents``: id -> (title, text); ``queries``: id -> text, judged ones only; ``judged``: query ->
    document -> gain."""

    name: str
    documents: dict[str, tuple[str, str]]
    queries: dict[str, str]
    judged: dict[str, dict[str, int]]

    def passage(self, doc_id: str) -> str:
        """Title and text as one string; the title is left out if the text starts with it."""
        title, text = self.documents[doc_id]
        return text if not title or text.startswith(title) else f"{title}\n{text}"


def load(folder: Path, *, max_queries: int | None = None) -> Collection:
    """Read and check a collection. Raises InvalidRequest if a file is missing or malformed, or a judgement
    names an unknown id."""
    documents = {
        _text(row, "_id", folder): (str(row.get("title") or ""), _text(row, "text", folder))
        for row in _rows(folder, "corpus")
    }
    queries = {_text(row, "_id", folder): _text(row, "text", folder) for row in _rows(folder, "queries")}
    judged: dict[str, dict[str, int]] = {}
    path = folder / "qrels" / "test.tsv"
    if not path.exists():
        raise InvalidRequest(f"{path} does not exist.", hint=_LAYOUT)
    with path.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(file, delimiter="\t"), 2):
            try:
                query, document, gain = row["query-id"], row["corpus-id"], int(row["score"])
            except (KeyError, TypeError, ValueError) as error:
                raise InvalidRequest(
                    f"{path}, line {number}: expected columns query-id, corpus-id, score."
                ) from error
            if query not in queries or document not in documents:
                raise InvalidRequest(
                    f"{path}, line {number}: query {query!r} or document {document!r} is not in the "
                    "collection."
                )
            if gain > 0:
                judged.setdefault(query, {})[document] = gain
    wanted = {name: text for name, text in queries.items() if name in judged}
    if max_queries is not None:
        wanted = dict(list(wanted.items())[:max_queries])
    if not wanted:
        raise InvalidRequest(f"{folder}: no query has a relevant document.")
    name = folder.resolve()
    return Collection(name.parent.name if name.name == "retrieval" else name.name, documents, wanted, judged)


def _rows(folder: Path, name: str) -> Iterator[dict[str, Any]]:
    packed = folder / f"{name}.jsonl.gz"
    path = packed if packed.exists() else folder / f"{name}.jsonl"
    return (row for _, row in json_lines(path, _LAYOUT))


def _text(row: dict[str, Any], field: str, folder: Path) -> str:
    value = row.get(field)
    if value is None:
        raise InvalidRequest(f"{folder}: a row has no {field!r}.")
    return str(value)
