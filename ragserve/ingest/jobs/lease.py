"""The lease on a running job, renewed by a thread. An expired one means that its process died."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ragserve.errors import Conflict, ModelUnavailable, explained
from ragserve.ingest.jobs.job_report import (
    Interrupted,
    JobReport,
    OnProgress,
    Progress,
    failures_of,
    progress_of,
)
from ragserve_index import JobStore
from ragserve_index.types import Job

LEASE_S = 15.0
"""Seconds that the job of a killed process stays claimed. The lease is renewed every third of that."""

log = logging.getLogger(__name__)


def worker_name() -> str:
    """A name for one run: host, process id and a random part."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"


class Lease:
    """Renews a claim while the block lasts.

    ``lost``: another process took the job over. ``cancelled``: someone asked for its end. Either ends the
    run.
    """

    def __init__(self, jobs: JobStore, job_id: str, worker: str, *, cancelled: bool = False) -> None:
        self._jobs, self._job_id, self._worker = jobs, job_id, worker
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="ragserve-lease", daemon=True)
        self.lost = False
        self.cancelled = cancelled

    def __enter__(self) -> Lease:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def release(self, error: str | None = None) -> None:
        """Give the job back unfinished, so that it can be resumed at once. ``error``: what it waits for."""
        self.__exit__()
        self._jobs.release(self._job_id, self._worker, error)

    def _renew(self) -> None:
        ticks = 0
        while not self._end.wait(1.0):
            ticks += 1
            try:
                self.cancelled = self.cancelled or self._jobs.cancel_requested(self._job_id)
                due = ticks % int(LEASE_S // 3) == 0
                if due and not self._jobs.heartbeat(self._job_id, self._worker, LEASE_S):
                    self.lost = True
                    return
            # a full disk, a busy registry: the run itself meets and reports it, and the lease must go on
            except Exception as error:  # noqa: BLE001
                log.warning("The lease of job %s could not be renewed: %s", self._job_id, error)


@dataclass(frozen=True, slots=True)
class JobRun:
    """A run of a claimed job. Its work updates ``progress``, calls ``notify`` and obeys ``should_stop``."""

    job: Job
    progress: Progress
    should_stop: Callable[[], bool]
    on_progress: OnProgress

    def notify(self) -> None:
        self.on_progress(self.progress)


def run_leased(
    jobs: JobStore,
    job_id: str,
    work: Callable[[JobRun], None],
    *,
    finish: Callable[[Job, str, str | None], object] | None = None,
    failures: tuple[str, ...] = ("failed",),
    on_progress: OnProgress | None = None,
    stop: threading.Event | None = None,
    wait: bool = False,
) -> JobReport:
    """Claim a job, run ``work`` on it and record its end.

    Args:
        work: Raises ``Interrupted`` when ``should_stop()``. Its other errors are recorded and raised again;
            after ``ModelUnavailable``, the job is given back.
        finish: Called as ``finish(job, state, error)`` to record the end, as ``job.worker``; default: in the
            job's row. An interrupted job is not finished but given back, to be resumed.
        failures: States of the items that the report lists as failures.
        stop: Interrupts the run.
        wait: Wait for the lease of a dead process to expire.

    Raises:
        NotFound: There is no such job.
        Conflict: It runs elsewhere, was taken over, or is over.
    """
    started = time.monotonic()
    record = finish or (lambda job, state, error: jobs.finish(job.job_id, state, error, worker=job.worker))
    stop = stop or threading.Event()
    worker = worker_name()
    job = _claim(jobs, job_id, worker, stop if wait else None)
    progress = progress_of(job)
    state = "done"
    with Lease(jobs, job_id, worker, cancelled=job.cancel_requested) as lease:

        def should_stop() -> bool:
            return stop.is_set() or lease.lost or lease.cancelled

        def end(state: str, error: str | None) -> None:
            """Record the end, unless it is another process that runs the job by now."""
            if lease.lost:
                message = f"Another process took over job {job_id}; this one stopped."
                raise Conflict(message, code="job_lost")
            record(job, state, error)

        try:
            work(JobRun(job, progress, should_stop, on_progress or (lambda _: None)))
        except Interrupted:
            is_cancelled = lease.cancelled or jobs.cancel_requested(job_id)
            state = "cancelled" if is_cancelled else "interrupted"
        except ModelUnavailable as failure:
            lease.release(f"{failure} The job goes on where it stopped when the model answers.")
            raise
        except Exception as failure:
            said = explained(failure) if isinstance(failure, OSError) else None
            end("failed", str(said or failure))
            raise
        if state == "interrupted" and not lease.lost:
            lease.release()
        else:
            end(state, None)
    seconds = time.monotonic() - started
    return JobReport(job_id, job.namespace, state, seconds, progress, failures_of(jobs, job_id, *failures))


def _claim(jobs: JobStore, job_id: str, worker: str, waiting: threading.Event | None) -> Job:
    while True:
        claimed = jobs.claim(worker, LEASE_S, job_id)
        if claimed is not None:
            return claimed
        job = jobs.get(job_id)
        if job.finished:
            hint = "Run it again; finished work is skipped."
            why = f" ({job.error})" if job.error else ""
            raise Conflict(f"Job {job_id} is over: {job.state}{why}.", hint=hint)
        if waiting is None or waiting.wait(1.0):
            raise Conflict(
                f"Job {job_id} is being run by {job.worker}.",
                hint=f"If that process died, wait {LEASE_S:g} s.",
                code="job_busy",
            )
