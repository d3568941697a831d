"""Work on namespaces that no search waits for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock


class BackgroundWork:
    """A thread for work on namespaces, by their ids: one piece at a time for each. Thread-safe."""

    def __init__(self, name: str) -> None:
        """``name``: of the thread."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._lock = Lock()
        self._busy: set[int] = set()
        self._closed = False

    def works_on(self, namespace_id: int) -> bool:
        """True if work on a namespace waits or runs."""
        return namespace_id in self._busy

    def start(self, namespace_id: int, work: Callable[[], object]) -> None:
        """Do work on a namespace, unless there is some already, or this is closed."""
        with self._lock:
            if self._closed or namespace_id in self._busy:
                return
            self._busy.add(namespace_id)
            self._thread.submit(self._run, namespace_id, work)

    def _run(self, namespace_id: int, work: Callable[[], object]) -> None:
        try:
            work()
        finally:
            self._busy.discard(namespace_id)

    def close(self) -> None:
        """Take no more work, and wait for what there is."""
        with self._lock:
            self._closed = True
        self._thread.shutdown(wait=True)
