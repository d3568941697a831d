"""Documents that somebody else has cut: JSON lines, a chunk each, to files that the job's parser
`parsers.prechunked` reads.

A line that cannot be used costs that line: it becomes a failed source of the job, ``FILE:LINE``."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, BinaryIO

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ragserve.errors import InvalidRequest, TooLarge
from ragserve.ingest.parsers.base import has_words, joined_notes, one_line, without_controls
from ragserve.ingest.sources import clean_name
from ragserve_index.batch import metadata_json

PARSER = "prechunked"
"""Module of `ragserve.ingest.parsers` that reads what `CutDocument.stream` writes."""
MOST_DOCUMENTS = 10_000
"""Documents of one import: each is a file of its own until the job has read it."""
MOST_BAD = 1_000
"""Bad lines of one import that are listed; a last one counts the others."""
_LINE_BYTES = 4 * 2**20
_NAMED = 20  # fields that a note names
_Text = Annotated[str, Field(max_length=4096)]


class ChunkLine(BaseModel):
    """A line: a chunk, its document, and its place there. Other fields are left out, which a note says."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)

    text: str = Field(min_length=1)
    document: str | None = Field(default=None, min_length=1, max_length=1024)
    title: str | None = Field(default=None, max_length=1024)
    page: int | None = Field(default=None, ge=1, le=1_000_000)
    section: str | None = Field(default=None, max_length=1024)
    order: int | float | None = Field(default=None, ge=-1e15, le=1e15)
    metadata: dict[
        Annotated[str, Field(min_length=1, max_length=128)],
        _Text | bool | int | float | Annotated[list[_Text], Field(max_length=256)] | None,
    ] = Field(default_factory=dict, max_length=64)


@dataclass(slots=True)
class CutDocument:
    """The chunks of one document, as they came."""

    name: str
    title: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    differing: set[str] = field(default_factory=set)
    ignored: set[str] = field(default_factory=set)
    chunks: list[tuple[float, dict[str, Any]]] = field(default_factory=list)

    def add(self, line: ChunkLine, ignored: Iterable[str]) -> None:
        """Take a line. Metadata belongs to documents: a field whose values differ is left out."""
        self.title = self.title or one_line(line.title or "")
        for key, value in line.metadata.items():
            if key not in self.differing and self.metadata.setdefault(key, value) != value:
                self.differing.add(key)
                del self.metadata[key]
        self.ignored.update(ignored)
        place = float("inf") if line.order is None else float(line.order)
        self.chunks.append((place, {"text": line.text, "page": line.page, "section": line.section}))

    def stream(self) -> BinaryIO:
        """The document as the parser reads it; lines without ``order`` come last, in the order of the
        file."""
        note = joined_notes(
            _named("metadata that differs between chunks of a document left out", self.differing),
            _named("unknown fields left out", self.ignored),
        )
        ordered = [chunk for _, chunk in sorted(self.chunks, key=lambda one: one[0])]
        return io.BytesIO(json.dumps({"note": note, "chunks": ordered}).encode())


def read_lines(
    files: Iterable[tuple[str, BinaryIO]], *, max_bytes: int
) -> tuple[list[CutDocument], list[tuple[str, str]]]:
    """Read files, each with its name, which is also that of the document of lines without one. Returns the
    documents, and (place, reason) of the lines that cannot be used.

    Raises ``TooLarge`` for a file of more bytes, or more documents than `MOST_DOCUMENTS`, and
    ``InvalidRequest`` if no line can be used."""
    documents: dict[str, CutDocument] = {}
    bad: list[tuple[str, str]] = []
    more = 0
    for filename, stream in files:
        default = clean_name(filename)
        for number, raw in _numbered(filename, stream, max_bytes):
            try:
                line, ignored = _line(raw)
                name = default if line.document is None else clean_name(line.document)
            except (ValueError, InvalidRequest) as error:
                if len(bad) < MOST_BAD:
                    bad.append((f"{default}:{number}", _reason(error)))
                else:
                    more += 1
                continue
            if name not in documents:
                if len(documents) == MOST_DOCUMENTS:
                    hint = "Split the file and import the parts one after the other."
                    raise TooLarge(f"The lines are of more than {MOST_DOCUMENTS:,} documents.", hint=hint)
                documents[name] = CutDocument(name)
            documents[name].add(line, ignored)
    if not documents:
        first = f" {bad[0][0]}: {bad[0][1]}" if bad else ""
        raise InvalidRequest(
            f"No line holds a chunk.{first}",
            hint='A line is an object like {"document": "a.md", "text": "...", "page": 3}.',
            code="no_chunks",
            param="files",
        )
    bad = [(place, reason) for place, reason in bad if place not in documents]
    return list(documents.values()), [*bad, (f"{more:,} more lines", "not usable")] if more else bad


def _numbered(filename: str, stream: BinaryIO, max_bytes: int) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers from 1. One that is too long comes as its beginning,
    which is no JSON."""
    size = number = 0
    while raw := stream.readline(_LINE_BYTES + 1):
        number += 1
        size += len(raw)
        line = raw
        while not raw.endswith(b"\n") and (raw := stream.readline(_LINE_BYTES)):
            size += len(raw)
            if size > max_bytes:
                break
        if size > max_bytes:
            hint = "Raise RAGSERVE_MAX_UPLOAD_BYTES or split it."
            raise TooLarge(f"{filename!r} is larger than {max_bytes:,} bytes.", hint=hint)
        if line.strip():
            yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line


def _line(raw: bytes) -> tuple[ChunkLine, set[str]]:
    """A line and the names of its unknown fields. Raises ``ValueError`` that says what is wrong."""
    if len(raw) > _LINE_BYTES:
        raise ValueError(f"longer than {_LINE_BYTES:,} bytes")
    try:
        value = json.loads(raw.decode().rstrip())
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} (character {error.pos})") from None
    except ValueError as error:  # a number of thousands of digits
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("not an object")
    line = ChunkLine.model_validate(value)
    text = without_controls(line.text)
    if not has_words(text):
        raise ValueError("text: has no letter and no digit")
    metadata_json(line.metadata, "metadata")
    line = line.model_copy(update={"text": text})
    return line, {str(name)[:64] for name in value if name not in ChunkLine.model_fields}


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        wrong = error.errors(include_url=False, include_context=False, include_input=False)[0]
        return f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}"
    return str(error)


def _named(what: str, names: set[str]) -> str:
    if not names:
        return ""
    shown = sorted(names)
    return f"{what}: {', '.join(shown[:_NAMED])}{', ...' if len(shown) > _NAMED else ''}"
