"""Follow files and directories: report changes since the last look, without gaps while an ingestion runs."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from ragserve.errors import InvalidRequest, RagserveError
from ragserve.ingest.sources import is_path, is_within, matches

_POLL_MS = 200


class Watch:
    """Collects changes from the moment that ``__enter__`` returns; iterate over it to get them."""

    def __init__(
        self,
        inputs: Sequence[str],
        recursive: bool,
        globs: Sequence[str],
        exclude: Path,
        stop: threading.Event,
        *,
        follow_symlinks: bool = False,
    ) -> None:
        named = [os.path.expanduser(path) for path in inputs if is_path(path)]
        paths = [os.path.realpath(path) for path in named if os.path.lexists(path)]
        if not paths:
            raise InvalidRequest("--follow-changes needs a file or directory to follow.")
        self._roots = [path for path in paths if os.path.isdir(path)]
        self._files = {path for path in paths if not os.path.isdir(path)}
        self._recursive = recursive
        self._globs = globs
        self._exclude = os.path.join(os.path.realpath(exclude), "")
        self._stop = stop
        self._follow_symlinks = follow_symlinks

    @property
    def roots(self) -> list[str]:
        """The real paths of the directories followed."""
        return self._roots

    def __enter__(self) -> Watch:
        from watchfiles import watch

        # watch a file through its directory: editors replace files, and a watch on the old one would go deaf
        folders = dict.fromkeys([*self._roots, *(os.path.dirname(path) for path in self._files)])
        # its own thread collects changes between two calls of next()
        self._watch = watch(
            *folders,
            watch_filter=None,
            stop_event=self._stop,
            rust_timeout=_POLL_MS,
            yield_on_timeout=True,
            recursive=self._recursive,
            raise_interrupt=False,
        )
        try:
            self._first = next(self._watch, set())  # starts it
        except (OSError, RuntimeError) as error:
            hint = "The system may be out of inotify watches."
            raise RagserveError(f"The file watcher did not start: {error}", hint=hint) from error
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._watch.close()

    def __iter__(self) -> Iterator[tuple[list[str], bool]]:
        """Yield (existing paths that changed, whether any path vanished) until the stop event is set, also
        after each look that found no change."""
        for changes in chain([self._first], self._watch):
            paths = sorted(path for path in {path for _, path in changes} if self._wanted(path))
            existing = [path for path in paths if os.path.exists(path)]
            yield existing, any(not os.path.lexists(path) for path in paths)

    def _wanted(self, path: str) -> bool:
        if path.startswith(self._exclude):
            return False
        if path in self._files:
            return True
        for root in self._roots:
            relative = os.path.relpath(path, root)
            if relative.startswith("..") or any(part.startswith(".") for part in relative.split(os.sep)):
                continue
            if not self._follow_symlinks and not is_within(os.path.realpath(path), self._roots):
                return False  # the scan has reported the link
            if os.path.isdir(path):
                return self._recursive
            return matches(relative, self._globs)
        return False
