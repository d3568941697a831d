"""A server's background threads for jobs, one per kind. They also finish jobs that a crashed server left."""

from __future__ import annotations

import logging
import threading
import time
from typing import Protocol

from ragserve import tracing
from ragserve.errors import Conflict, NotFound
from ragserve.ingest.jobs.job_report import JobReport
from ragserve_index import JobStore

log = logging.getLogger(__name__)
_POLL_S = 1.0
_CLEAN_S = 300.0


class RunsJobs(Protocol):
    """The part of `Ingestor` and `Warmer` that a runner needs."""

    jobs: JobStore

    def run(self, job_id: str, *, stop: threading.Event | None = None) -> JobReport: ...

    def tidy(self) -> int:
        """Remove files that no job needs and return their number."""
        ...


class JobRunner:
    """Runs jobs of one kind one by one, oldest first. Jobs over paths are left to their command line."""

    def __init__(self, worker: RunsJobs, kind: str = "upload") -> None:
        self._worker = worker
        self._kind = kind
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._loop, name=f"ragserve-{kind}", daemon=True)
        self._cleaned_at = 0.0

    def start(self) -> None:
        """Remove uploads that no job needs, then start the thread. Call it once."""
        self._clean()
        self._thread.start()

    def wake(self) -> None:
        """Look for jobs now instead of at the next poll."""
        self._wake.set()

    def stop(self, timeout_s: float = 30.0) -> None:
        """Stop after the current batch. The next runner resumes an interrupted job. Idempotent."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _loop(self) -> None:
        while not self._stop.is_set():
            self._wake.clear()
            try:
                if self._run_next():
                    continue
                if time.monotonic() - self._cleaned_at > _CLEAN_S:
                    self._clean()  # uploads of jobs that were cancelled before they ran
            except Exception:
                log.exception("Looking for jobs failed; trying again")
            self._wake.wait(_POLL_S)

    def _clean(self) -> None:
        if removed := self._worker.tidy():
            log.info("Removed %d uploads that no job needs", removed)
        self._cleaned_at = time.monotonic()

    def _run_next(self) -> bool:
        """Run the oldest job that can be claimed. Returns False if there is none."""
        for state in ("queued", "running"):
            jobs = self._worker.jobs.list(state=state, limit=1_000_000)
            for job in sorted(jobs, key=lambda job: job.created_at):
                if job.kind != self._kind:
                    continue
                try:
                    with tracing.span(f"job {self._kind}", **{"ragserve.job_id": job.job_id}):
                        report = self._worker.run(job.job_id, stop=self._stop)
                except (Conflict, NotFound):  # another process runs it, or its namespace is gone
                    continue
                except Exception:
                    log.exception("Job %s (%s) failed", job.job_id, self._kind)
                    return True
                summary = (job.job_id, self._kind, report.state, report.progress.chunks, report.seconds)
                log.info("Job %s (%s): %s, %d chunks in %.1f s", *summary)
                return True
        return False
