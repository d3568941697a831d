"""Running one job under a lease: claimed, renewed while it runs, and ended as done, failed, cancelled or interrupted."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ragserve.errors import Conflict
from ragserve.ingest.jobs.lease import LEASE_S, Lease, worker_name
from ragserve.ingest.jobs.report import Interrupted
from ragserve_index import JobStore
from ragserve_index.types import Job

__all__ = ["run_leased"]


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

    ``work(job, should_stop)`` raises ``Interrupted`` when told to stop; ``finish(job, state, error)`` records the end, except that of an
    interruption, whose job is given back to be resumed. ``wait`` waits for the lease of a process that died. What ``work`` raises is
    recorded and raised again. Raises ``NotFound``, ``Conflict`` (it runs elsewhere or is over).
    """
    worker = worker_name()
    job = _claim(jobs, job_id, worker, stop if wait else None)
    state = "done"
    with Lease(jobs, job_id, worker, cancelled=job.cancel_requested) as lease:
        try:
            work(job, lambda: stop.is_set() or lease.lost or lease.cancelled)
        except Interrupted:
            if lease.lost:
                raise Conflict(f"Another process took over job {job_id}; this one stopped.", code="job_lost") from None
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
            raise Conflict(f"Job {job_id} is over: {job.state}.", hint="Run it again; what is done already is skipped.")
        if waiting is None or waiting.wait(1.0):
            raise Conflict(f"Job {job_id} is being run by {job.worker}.", hint=f"If that died, wait {LEASE_S:g} s.", code="job_busy")
