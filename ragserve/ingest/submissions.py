"""What is submitted to be ingested: texts, uploads, and options of paths and URLs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from ragserve.ingest.jobs.submitter import Submitter
from ragserve.ingest.sources import printable
from ragserve_index.labelling import check_held
from ragserve_index.viewers import checked_labels


@dataclass(frozen=True, slots=True)
class SubmittedText:
    """A text to index; ``name`` identifies the document in its namespace. ``labels`` as in `NewDocument`."""

    name: str
    text: str
    title: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    labels: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Upload:
    """A client's file. Its name says what it is and hints at the format, and is never a path. ``stream``: its
    bytes, or what makes them when they are stored; ``labels`` as in `NewDocument`."""

    filename: str
    stream: BinaryIO | Callable[[], BinaryIO]
    title: str = ""
    labels: tuple[str, ...] | None = None

    def opened(self) -> BinaryIO:
        """The stream, made if need be."""
        return self.stream() if callable(self.stream) else self.stream


@dataclass(frozen=True, slots=True)
class PathOptions:
    """Options of ingesting paths; ``recursive``, ``globs`` and ``follow_symlinks`` are those of
    `sources.scan`.

    ``prune`` removes documents whose file vanished from a given directory. ``warm`` creates a second job,
    when this one is done, that computes the documents' KV into the document cache (`ragserve.cache.warm`).
    ``sitemap``: each URL stands for its site, whose sitemaps name the pages to take; those on ``other_hosts``
    only with that. ``labels``: those of all documents; None leaves each those that it has.
    """

    recursive: bool = False
    globs: tuple[str, ...] = ()
    prune: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)
    warm: bool = False
    follow_symlinks: bool = False
    sitemap: bool = False
    other_hosts: bool = False
    labels: tuple[str, ...] | None = None


def stored(paths: Sequence[str]) -> list[str]:
    """The paths that can be stored: the others are among the failures of the scan."""
    return [path for path in paths if printable(path) == path]


def given_labels(labels: Sequence[str] | None, by: Submitter) -> list[str] | None:
    """Labels as a job keeps them. Raises InvalidRequest, and Forbidden for those that its submitter does not
    hold."""
    if labels is None:
        return None
    found = checked_labels(labels)
    check_held(by.viewer, found)
    return list(found)
