"""A file with its attachments: each becomes a document of its own, or a note of the file it came in.

Attachments are parsed one by one, each with the limits of a file, so that a bad one fails alone. They have no
items to resume by: they are written with their message or not at all, and read again when it has changed."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from ragserve.ingest.parsers.attached import MOST
from ragserve.ingest.parsers.base import joined_notes
from ragserve.ingest.parsing.parse_process import (
    INTERRUPTED,
    AttachedFile,
    Failed,
    ParsedFile,
    ParseProcess,
    ParseRequest,
    Unchanged,
)
from ragserve.ingest.planned import PlannedFile
from ragserve_index.attached_documents import ATTACHMENTS, PARENT

Result = tuple[PlannedFile, ParsedFile | Unchanged | Failed]

DEPTH = 3  # messages within messages
_CHARACTERS = 64 << 20  # of all attachments of a file: they are held until they are written
_TIMEOUTS = 10  # times the limit of a file for all of its attachments
_NOTES = 6  # attachments that a note names


@dataclass(slots=True)
class _Budget:
    """What is left for the attachments of one file."""

    deadline: float
    files: int = MOST  # those of attached messages included
    characters: int = _CHARACTERS

    def spent(self) -> str:
        if self.files <= 0:
            return f"more than {MOST} attachments"
        if self.characters <= 0:
            return f"more than {_CHARACTERS >> 20} Mi characters of attachments"
        return "the time for attachments is over" if time.monotonic() > self.deadline else ""


def results_of(parser: ParseProcess, file: PlannedFile) -> list[Result]:
    """Parse a file, unless its planning has failed, and its attachments, which come first. Where it fails, or
    the run is stopped meanwhile, its result is the only one."""
    return _results(parser, file, _Budget(time.monotonic() + _TIMEOUTS * parser.timeout_s), DEPTH)


def _results(parser: ParseProcess, file: PlannedFile, budget: _Budget, depth: int) -> list[Result]:
    request = file.request
    if isinstance(request, Failed):
        return [(file, request)]
    result = parser.parse(request)
    if not isinstance(result, ParsedFile) or not result.attachments:
        return [(file, result)]
    found: list[Result] = []
    names: list[str] = []
    left_out: list[str] = []
    try:
        for attached in result.attachments:
            *below, (planned, outcome) = _attached(parser, file, request, attached, budget, depth)
            if isinstance(outcome, ParsedFile):
                found += [*below, (planned, outcome)]
                names.append(attached.name)
            elif isinstance(outcome, Failed) and outcome.code == INTERRUPTED:
                return [(file, outcome)]
            elif isinstance(outcome, Failed):
                left_out.append(f"{attached.name} ({outcome.reason})")
    finally:
        remove(result.attachments)
    metadata = {**result.metadata, ATTACHMENTS: names} if names else result.metadata
    whole = replace(
        result, attachments=(), metadata=metadata, note=joined_notes(result.note, _note(left_out))
    )
    return [*found, (file, whole)]


def _attached(
    parser: ParseProcess,
    file: PlannedFile,
    request: ParseRequest,
    attached: AttachedFile,
    budget: _Budget,
    depth: int,
) -> list[Result]:
    filename = attached.name.rsplit("/", 1)[-1]
    ext = os.path.splitext(filename)[1].lower()
    own = ParseRequest(
        attached.path, filename, ext, request.salt, charset=attached.charset, attachments=depth > 1
    )
    metadata = {**file.metadata, PARENT: file.source}
    planned = replace(
        file,
        source=f"{file.source}/{attached.name}",
        request=own,
        title="",
        metadata=metadata,
        found=False,
        root=file.root or file.source,
    )
    if why := budget.spent():
        return [(planned, Failed(why, "too_many_attachments"))]
    budget.files -= 1
    results = _results(parser, planned, budget, depth - 1)
    if isinstance(results[-1][1], ParsedFile):
        budget.characters -= sum(len(chunk.text) for chunk in results[-1][1].chunks)
    return results


def remove(files: Sequence[AttachedFile]) -> None:
    """Remove the files that attachments wait in."""
    for file in files:
        with suppress(FileNotFoundError):
            os.unlink(file.path)


def _note(left_out: Sequence[str]) -> str:
    if not left_out:
        return ""
    more = f", and {len(left_out) - _NOTES:,} more" if len(left_out) > _NOTES else ""
    return f"attachments left out: {', '.join(left_out[:_NOTES])}{more}"
