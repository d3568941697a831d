"""A server's background threads for jobs, one per kind. They also finish jobs that a crashed server left,
unless two servers have crashed with the job."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from ragserve import tracing
from ragserve.errors import Conflict, ModelUnavailable, NotFound, RagserveError, explained
from ragserve.ingest.jobs.job_report import JobReport
from ragserve_index import JobStore
from ragserve_index.types import Job

log = logging.getLogger(__name__)
UPLOADS = "upload"
_POLL_S = 1.0
_CLEAN_S = 300.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 300.0  # of a job that could not be run: no embedder, a full disk
_TURN_S = 60.0  # of a job while others wait: enough that what an interruption costs is little beside it


class RunsJobs(Protocol):
    """The part of `Ingestor` and `Warmer` that a runner needs."""

    jobs: JobStore

    def run(self, job_id: str, *, stop: threading.Event | None = None) -> JobReport: ...

    def tidy(self) -> int:
        """Remove files that no job needs and return their number."""
        ...


class JobRunner:
    """Runs jobs of one kind one by one. Jobs over paths are left to their command line.

    Namespaces take turns, each with its oldest job, which is interrupted after a while if others wait. Its
    next turn is twice as long, so that a file which takes longer than a turn is finished in the end.
    """

    def __init__(self, worker: RunsJobs, kind: str = UPLOADS) -> None:
        self._worker = worker
        self._kind = kind
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._loop, name=f"ragserve-{kind}", daemon=True)
        self._cleaned_at = 0.0
        self._over = threading.Event()  # the turn in progress
        self._served_at: dict[str, float] = {}  # by namespace, of those that have jobs
        self._turn_s: dict[str, float] = {}  # by job, of those that were interrupted
        # by job that waits: the length and end of its pause, and whether it was cancelled before
        self._pauses: dict[str, tuple[float, float, bool]] = {}

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
        self._over.set()
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
        """Run the job whose turn it is. Returns False if none can be claimed."""
        jobs = self._open_jobs()
        self._served_at = {job.namespace: self._served_at.get(job.namespace, 0.0) for job in jobs}
        self._turn_s = {job.job_id: self._turn_s.get(job.job_id, _TURN_S) for job in jobs}
        self._pauses = {one.job_id: self._pauses[one.job_id] for one in jobs if one.job_id in self._pauses}
        for job in sorted(jobs, key=lambda job: (self._served_at[job.namespace], job.created_at)):
            if self._waits(job):
                continue
            try:
                if job.error and self._worker.jobs.fail_if_died_twice(job.job_id):
                    log.error("Job %s (%s) failed: its process died twice", job.job_id, self._kind)
                    continue
                with (
                    tracing.span(f"job {self._kind}", **{"ragserve.job_id": job.job_id}),
                    self._turn(job) as over,
                ):
                    report = self._worker.run(job.job_id, stop=over)
            except (Conflict, NotFound):  # another process runs it, or its namespace is gone
                continue
            except Exception as error:  # noqa: BLE001 - on a full disk not even its start is recorded
                self._pause(job, error)
                return True
            self._served_at[job.namespace] = time.monotonic()
            self._pauses.pop(job.job_id, None)
            self._turn_s[job.job_id] *= 2
            summary = (job.job_id, self._kind, report.state, report.progress.chunks, report.seconds)
            log.info("Job %s (%s): %s, %d chunks in %.1f s", *summary)
            return True
        return False

    def _waits(self, job: Job) -> bool:
        _, until, was_cancelled = self._pauses.get(job.job_id, (0.0, 0.0, False))
        return time.monotonic() < until and (was_cancelled or not job.cancel_requested)

    def _pause(self, job: Job, error: Exception) -> None:
        before, _, _ = self._pauses.get(job.job_id, (_FIRST_PAUSE_S / 2, 0.0, False))
        wait_s = min(2 * before, _LONGEST_PAUSE_S)
        self._served_at[job.namespace] = now = time.monotonic()
        self._pauses[job.job_id] = wait_s, now + wait_s, job.cancel_requested
        if isinstance(error, ModelUnavailable):
            log.warning("Job %s (%s) goes on in %.0f s: %s", job.job_id, self._kind, wait_s, error.message)
            return
        said = explained(error) if isinstance(error, OSError) else error
        trace = None if isinstance(said, RagserveError) else error
        told = "Job %s (%s) failed; unless that could be recorded, it is run again in %.0f s: %s"
        log.error(told, job.job_id, self._kind, wait_s, said or error, exc_info=trace)

    def _open_jobs(self) -> list[Job]:
        return [
            job
            for state in ("queued", "running")
            for job in self._worker.jobs.list(state=state, limit=1_000_000)
            if job.kind == self._kind
        ]

    @contextmanager
    def _turn(self, job: Job) -> Iterator[threading.Event]:
        """The event that ends a job's turn: its time is over and others wait, or the runner stops."""
        self._over = over = threading.Event()
        ended = threading.Event()
        if self._stop.is_set():
            over.set()

        def watch() -> None:
            wait_s = self._turn_s[job.job_id]
            while not ended.wait(wait_s):
                wait_s = min(_POLL_S, wait_s)
                if self._others_wait(job):
                    over.set()
                    return

        thread = threading.Thread(target=watch, name=f"ragserve-{self._kind}-turn", daemon=True)
        thread.start()
        try:
            yield over
        finally:
            ended.set()
            thread.join()

    def _others_wait(self, job: Job) -> bool:
        """Return whether a job of another namespace could run."""
        try:
            jobs = self._open_jobs()
        except RagserveError:  # a busy registry: the run itself meets and reports it
            return False
        now = time.time()
        return any(
            other.namespace != job.namespace
            and not self._waits(other)
            and (other.state == "queued" or (other.lease_until is not None and other.lease_until < now))
            for other in jobs
        )
