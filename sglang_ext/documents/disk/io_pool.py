"""Two IO threads for the disk. Reads go first, and at most one write runs at a time, so that a read always
finds a thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

logger = logging.getLogger(__name__)
THREADS = 2
Job = Callable[[], None]


class IoPool:
    """Runs reads and writes, each kind in order of submission. Thread-safe. A job that raises is only logged:
    jobs account for their own failures.
    """

    def __init__(self, name: str, threads: int = THREADS) -> None:
        self._wake = threading.Condition()
        self._reads: deque[Job] = deque()
        self._writes: deque[Job] = deque()
        self._writing = False
        self._busy = 0
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def read(self, job: Job) -> bool:
        """Queue a read. False once the pool is closed: the job will not run."""
        return self._submit(self._reads, job)

    def write(self, job: Job) -> bool:
        """Queue a write, as ``read``."""
        return self._submit(self._writes, job)

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing is queued or running; False on timeout."""
        until = time.monotonic() + timeout_s
        with self._wake:
            while self._reads or self._writes or self._busy:
                if not self._wake.wait(until - time.monotonic()) and time.monotonic() >= until:
                    return False
        return True

    def close(self) -> None:
        """Finish running jobs and drop queued ones."""
        with self._wake:
            self._closed = True
            self._reads.clear()
            self._writes.clear()
            self._wake.notify_all()
        for thread in self._threads:
            thread.join()

    def _submit(self, queue: deque[Job], job: Job) -> bool:
        with self._wake:
            if self._closed:
                return False
            queue.append(job)
            self._wake.notify()
        return True

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._reads and (self._writing or not self._writes):
                    if self._closed:
                        return
                    self._wake.wait()
                is_write = not self._reads
                job = (self._writes if is_write else self._reads).popleft()
                self._writing = self._writing or is_write
                self._busy += 1
            try:
                job()
            except Exception:
                logger.exception("a job of the document cache's disk tier failed")
            with self._wake:
                self._busy -= 1
                if is_write:
                    self._writing = False
                self._wake.notify_all()
