"""A file that a job is to ingest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ragserve.ingest.parsing.parse_process import Failed, ParseRequest


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file to ingest. ``source`` identifies the document; a failed fetch has ``Failed`` as request.

    ``found``: it was found in a directory, where files that are never text are skipped. ``labels`` as in
    `NewDocument`, as are ``labels_before``; ``root``: the source of the file that an attachment came in, or
    its message did.
    """

    source: str
    request: ParseRequest | Failed
    title: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    found: bool = False
    labels: tuple[str, ...] | None = None
    root: str = ""
    labels_before: tuple[str, ...] = ()
