"""The server's side of jobs: one background thread per kind, that runs its own and those that a crashed
server left.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Protocol

from ragserve.errors import Conflict, NotFound, RagserveError
from ragserve.ingest.jobs.job_report import JobReport
from ragserve_index import JobStore

__all__ = ["JobRunner"]

log = logging.getLogger(__name__)
_POLL_S = 1.0
_CLEAN_S = 300.0


class RunsJobs(Protocol):
    """What a runner wants of an Ingestor or a Warmer."""

    jobs: JobStore

    def run(self, job_id: str, *, stop: threading.Event | None = None) -> JobReport: ...

    def tidy(self) -> int:
        """Remove what no job needs; how many."""
        ...


class JobRunner:
    """Runs jobs of one kind one after another, oldest first. Those over paths are left to the command line
    that made them.
    """

    def __init__(self, worker: RunsJobs, kind: str = "upload") -> None:
        self._worker = worker
        self._kind = kind
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._cleaned_at = 0.0

    def start(self) -> None:
        """Remove uploads that no job needs, then start the thread. Once per object."""
        if self._thread is not None:
            raise RagserveError("The job runner was started already.")
        self._clean()
        self._thread = threading.Thread(target=self._loop, name=f"ragserve-{self._kind}", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """A job was submitted: look now, not at the next poll."""
        self._wake.set()

    def stop(self, timeout_s: float = 30.0) -> None:
        """Stop after the batch in progress; a job cut short is resumed by the next runner. Idempotent."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _loop(self) -> None:
        while not self._stop.is_set():
            self._wake.clear()
            try:
                ran = self._run_next()
                if not ran and time.monotonic() - self._cleaned_at > _CLEAN_S:
                    self._clean()  # what jobs cancelled before they ran have left
            except Exception:
                log.exception("Looking for jobs failed; trying again")
                ran = False
            if not ran:
                self._wake.wait(_POLL_S)

    def _clean(self) -> None:
        removed = self._worker.tidy()
        if removed:
            log.info("Removed %d uploads that no job needs", removed)
        self._cleaned_at = time.monotonic()

    def _run_next(self) -> bool:
        """Whether a job was run."""
        for state in ("queued", "running"):
            jobs = [
                job for job in self._worker.jobs.list(state=state, limit=1_000_000) if job.kind == self._kind
            ]
            for job in sorted(jobs, key=lambda job: job.created_at):
                try:
                    report = self._worker.run(job.job_id, stop=self._stop)
                except (Conflict, NotFound):  # another process runs it, or it is gone with its namespace
                    continue
                except Exception:
                    log.exception("Job %s (%s) failed", job.job_id, self._kind)
                    return True
                log.info(
                    "Job %s (%s): %s, %d chunks in %.1f s",
                    job.job_id,
                    self._kind,
                    report.state,
                    report.progress.chunks,
                    report.seconds,
                )
                return True
        return False
