"""The claim on a job while it runs, renewed by a thread; an expired one is a job whose process died, which anyone may take over."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from types import TracebackType

from ragserve.errors import RagserveError
from ragserve_index import JobStore

__all__ = ["LEASE_S", "Lease", "worker_name"]

LEASE_S = 15.0
"""Seconds that a job of a killed process stays claimed. Renewed every third of it."""

log = logging.getLogger(__name__)


def worker_name() -> str:
    """Of this run: host, process and a random part."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"


class Lease:
    """``lost``: another process took the job over; ``cancelled``: someone asked for its end. Both mean stop."""

    def __init__(self, jobs: JobStore, job_id: str, worker: str, *, cancelled: bool = False) -> None:
        self._jobs, self._job_id, self._worker = jobs, job_id, worker
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="ragserve-lease", daemon=True)
        self.lost = False
        self.cancelled = cancelled

    def __enter__(self) -> Lease:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end.set()
        self._thread.join()

    def release(self) -> None:
        """Give the job back unfinished, so that it can be resumed at once."""
        self._end.set()
        self._thread.join()
        self._jobs.heartbeat(self._job_id, self._worker, 0.0)

    def _renew(self) -> None:
        ticks = 0
        while not self._end.wait(1.0):
            ticks += 1
            try:
                self.cancelled = self.cancelled or self._jobs.cancel_requested(self._job_id)
                if ticks % int(LEASE_S // 3) == 0 and not self._jobs.heartbeat(self._job_id, self._worker, LEASE_S):
                    self.lost = True
                    return
            except RagserveError as error:  # the disk full or the registry busy: the run itself meets and reports it
                log.warning("The lease of job %s could not be renewed: %s", self._job_id, error)
