"""Documents that somebody else has cut: JSON lines, a chunk each, to files that the job's parser
`parsers.prechunked` reads.

A line that cannot be used costs that line: it becomes a failed source of the job, ``FILE:LINE``. An import is
in memory until its documents are on disk, so its bytes, its chunks and the imports at a time are bounded."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, BinaryIO

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ragserve.errors import InvalidRequest, TooLarge, TooManyRequests
from ragserve.ingest.parsers.base import has_words, joined_notes, one_line, without_controls
from ragserve.ingest.sources import clean_name
from ragserve_index.batch import metadata_json

PARSER = "prechunked"
"""Module of `ragserve.ingest.parsers` that reads what `CutDocument.stream` writes."""
MOST_DOCUMENTS = 10_000
"""Documents of one import: each is a file of its own until the job has read it."""
MOST_CHUNKS = 250_000
"""Chunks of one import: each takes about 120 bytes beside its text (measured with short ones)."""
MOST_AT_ONCE = 2
"""Imports that a process reads at a time."""
MOST_BAD = 1_000
"""Bad lines of one import that are listed; a last one counts the others."""
_LINE_BYTES = 4 * 2**20
_SPLIT = "Split it and import the parts one after the other."
_FIELDS = 256  # of a document's metadata, and of unknown fields that are remembered
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
    too_many: set[str] = field(default_factory=set)
    chunks: list[tuple[float, bytes]] = field(default_factory=list)

    def add(self, line: ChunkLine, ignored: Iterable[str]) -> None:
        """Take a line. Metadata belongs to documents: a field whose values differ is left out."""
        self.title = self.title or one_line(line.title or "")
        for key, value in line.metadata.items():
            if key in self.differing:
                continue
            if key not in self.metadata and len(self.metadata) + len(self.differing) >= _FIELDS:
                _note_one(self.too_many, key)
            elif self.metadata.setdefault(key, value) != value:
                self.differing.add(key)
                del self.metadata[key]
        for name in ignored:
            _note_one(self.ignored, name)
        place = float("inf") if line.order is None else float(line.order)
        chunk: dict[str, Any] = {"text": line.text}
        if line.page is not None:
            chunk["page"] = line.page
        if line.section is not None:
            chunk["section"] = one_line(line.section)
        self.chunks.append((place, _json(chunk)))  # no larger than its line was

    def stream(self) -> BinaryIO:
        """The document as the parser reads it; lines without ``order`` come last, in the order of the
        file."""
        note = joined_notes(
            _named("metadata that differs between chunks of a document left out", self.differing),
            _named(f"metadata beyond {_FIELDS} fields left out", self.too_many),
            _named("unknown fields left out", self.ignored),
        )
        ordered = [chunk for _, chunk in sorted(self.chunks, key=lambda one: one[0])]
        return io.BytesIO(b'{"note":%s,"chunks":[%s]}' % (_json(one_line(note)), b",".join(ordered)))


@contextmanager
def one_import(free: threading.BoundedSemaphore) -> Iterator[None]:
    """Read an import within the block. Raises ``TooManyRequests`` beside `MOST_AT_ONCE` others."""
    if not free.acquire(blocking=False):
        raise TooManyRequests(
            f"{MOST_AT_ONCE} imports of chunks are being read already.",
            hint="Send it again when they are accepted.",
            code="imports_busy",
        )
    try:
        yield
    finally:
        free.release()


def read_lines(
    files: Iterable[tuple[str, BinaryIO]], *, max_bytes: int
) -> tuple[list[CutDocument], list[tuple[str, str]]]:
    """Read files, each with its name, which is also that of the document of lines without one. Returns the
    documents, and (place, reason) of the lines that cannot be used.

    Raises ``TooLarge`` for more bytes of all files together, more documents than `MOST_DOCUMENTS` or more
    chunks than `MOST_CHUNKS`, and ``InvalidRequest`` if no line can be used."""
    documents: dict[str, CutDocument] = {}
    bad: list[tuple[str, str]] = []
    more = n_chunks = 0
    size = _Size(max_bytes)
    for filename, stream in files:
        default = clean_name(filename)
        for number, raw in _numbered(filename, stream, size):
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
                    raise TooLarge(f"The lines are of more than {MOST_DOCUMENTS:,} documents.", hint=_SPLIT)
                documents[name] = CutDocument(name)
            n_chunks += 1
            if n_chunks > MOST_CHUNKS:
                raise TooLarge(f"There are more than {MOST_CHUNKS:,} chunks.", hint=_SPLIT)
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


@dataclass(slots=True)
class _Size:
    """Bytes read of an import."""

    most: int
    read: int = 0

    def add(self, filename: str, n: int) -> None:
        """Count ``n`` bytes of a file. Raises ``TooLarge``."""
        self.read += n
        if self.read > self.most:
            hint = f"Raise RAGSERVE_MAX_UPLOAD_BYTES, or: {_SPLIT}"
            message = f"With {filename!r} the import is larger than {self.most:,} bytes."
            raise TooLarge(message, hint=hint, param="files")


def _numbered(filename: str, stream: BinaryIO, size: _Size) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers from 1. One that is too long comes as its beginning,
    which is no JSON."""
    number = 0
    while raw := stream.readline(_LINE_BYTES + 1):
        number += 1
        size.add(filename, len(raw))
        line = raw
        while not raw.endswith(b"\n") and (raw := stream.readline(_LINE_BYTES)):
            size.add(filename, len(raw))
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


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        wrong = error.errors(include_url=False, include_context=False, include_input=False)[0]
        return f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}"
    return str(error)


def _note_one(names: set[str], name: str) -> None:
    if len(names) < _FIELDS:
        names.add(name)


def _named(what: str, names: set[str]) -> str:
    if not names:
        return ""
    shown = sorted(names)
    return f"{what}: {', '.join(shown[:_NAMED])}{', ...' if len(shown) > _NAMED else ''}"
