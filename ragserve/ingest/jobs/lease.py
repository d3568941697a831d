"""The claim on a job while it runs, renewed by a thread; an expired one is a job whose process died, which
anyone may take over.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable
from types import TracebackType

from ragserve.errors import Conflict, RagserveError
from ragserve.ingest.jobs.job_report import Interrupted
from ragserve_index import JobStore
from ragserve_index.types import Job

__all__ = ["LEASE_S", "Lease", "run_leased", "worker_name"]

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
                if ticks % int(LEASE_S // 3) == 0 and not self._jobs.heartbeat(
                    self._job_id, self._worker, LEASE_S
                ):
                    self.lost = True
                    return
            except (
                RagserveError
            ) as error:  # the disk full or the registry busy: the run itself meets and reports it
                log.warning("The lease of job %s could not be renewed: %s", self._job_id, error)


def run_leased(
    jobs: JobStore,
    job_id: str,
    work: Callable[[Job, Callable[[], bool]], None],
    finish: Callable[[Job, str, str | None], None],
    *,
    stop: threading.Event,
    wait: bool,
) -> tuple[Job, str]:
    """(the job as it was claimed, its state: done, cancelled or interrupted).

    ``work(job, should_stop)`` raises ``Interrupted`` when told to stop; ``finish(job, state, error)`` records
    the end, except that of an interruption, whose job is given back to be resumed. ``wait`` waits for the
    lease of a process that died. What ``work`` raises is recorded and raised again. Raises ``NotFound``,
    ``Conflict`` (it runs elsewhere or is over)."""
    worker = worker_name()
    job = _claim(jobs, job_id, worker, stop if wait else None)
    state = "done"
    with Lease(jobs, job_id, worker, cancelled=job.cancel_requested) as lease:
        try:
            work(job, lambda: stop.is_set() or lease.lost or lease.cancelled)
        except Interrupted:
            if lease.lost:
                raise Conflict(
                    f"Another process took over job {job_id}; this one stopped.", code="job_lost"
                ) from None
            state = "cancelled" if lease.cancelled else "interrupted"
        except Exception as failure:
            finish(job, "failed", str(failure))
            raise
        if state == "interrupted":
            lease.release()
        else:
            finish(job, state, None)
    return job, state


def _claim(jobs: JobStore, job_id: str, worker: str, waiting: threading.Event | None) -> Job:
    while True:
        claimed = jobs.claim(worker, LEASE_S, job_id)
        if claimed is not None:
            return claimed
        job = jobs.get(job_id)
        if job.finished:
            raise Conflict(
                f"Job {job_id} is over: {job.state}.", hint="Run it again; what is done already is skipped."
            )
        if waiting is None or waiting.wait(1.0):
            raise Conflict(
                f"Job {job_id} is being run by {job.worker}.",
                hint=f"If that died, wait {LEASE_S:g} s.",
                code="job_busy",
            )
