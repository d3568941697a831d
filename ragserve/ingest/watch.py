"""Follow files and directories: what changed since the last look, from a watcher that runs before the first
ingestion starts.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from ragserve.errors import InvalidRequest, RagserveError
from ragserve.ingest.sources import is_url, matches

__all__ = ["Watch"]

_POLL_MS = 200


class Watch:
    """Collects changes from the moment that ``__enter__`` returns, so that nothing is missed while an
    ingestion runs.
    """

    def __init__(
        self,
        inputs: Sequence[str],
        *,
        recursive: bool,
        globs: Sequence[str],
        exclude: Path,
        stop: threading.Event,
    ) -> None:
        paths = [
            os.path.realpath(os.path.expanduser(path))
            for path in inputs
            if not is_url(path) and os.path.lexists(os.path.expanduser(path))
        ]
        if not paths:
            raise InvalidRequest("--follow-changes needs a file or directory to follow.")
        self._roots = [path for path in paths if os.path.isdir(path)]
        self._files = {path for path in paths if not os.path.isdir(path)}
        self._recursive = recursive
        self._globs = globs
        self._exclude = os.path.join(os.path.realpath(exclude), "")
        self._stop = stop
        self._changes: queue.SimpleQueue[set[str] | BaseException] = queue.SimpleQueue()
        self._watching = threading.Event()
        self._thread = threading.Thread(target=self._collect, name="ragserve-watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        if not self._watching.wait(30.0):
            raise RagserveError(
                "The file watcher did not start.", hint="The system may be out of inotify watches."
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(5.0)

    def __iter__(self) -> Iterator[tuple[list[str], bool]]:
        """(existing paths that changed, whether any vanished), until the stop event is set."""
        while not self._stop.is_set():
            try:
                changed = self._changes.get(timeout=0.2)
            except queue.Empty:
                continue
            if isinstance(changed, BaseException):
                raise changed
            paths = sorted(path for path in changed if self._wanted(path))
            if paths:
                yield (
                    [path for path in paths if os.path.exists(path)],
                    any(not os.path.lexists(path) for path in paths),
                )

    def _collect(self) -> None:
        from watchfiles import watch

        # a file is watched through its directory: editors replace files, and a watch on the old one would go
        # deaf
        folders = dict.fromkeys([*self._roots, *(os.path.dirname(path) for path in self._files)])
        try:
            for changes in watch(
                *folders,
                watch_filter=None,
                stop_event=self._stop,
                rust_timeout=_POLL_MS,
                yield_on_timeout=True,
                recursive=self._recursive,
                raise_interrupt=False,
            ):
                self._watching.set()
                if changes:
                    self._changes.put({path for _, path in changes})
        except Exception as error:  # noqa: BLE001 - handed to the thread that iterates
            self._changes.put(error)
            self._watching.set()

    def _wanted(self, path: str) -> bool:
        if path.startswith(self._exclude):
            return False
        if path in self._files:
            return True
        for root in self._roots:
            relative = os.path.relpath(path, root)
            if relative.startswith("..") or any(part.startswith(".") for part in relative.split(os.sep)):
                continue
            if os.path.isdir(path):
                return self._recursive
            return matches(relative, self._globs)
        return False
