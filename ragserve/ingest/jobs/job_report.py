"""Progress of a job while it runs, and its report at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from ragserve_index import JobStore
from ragserve_index.types import Job

_FILES = ("total", "indexed", "unchanged", "failed", "skipped", "removed", "warmed")


class Interrupted(Exception):
    """The run was stopped before its end; finished work stays."""


@dataclass(slots=True)
class Progress:
    """Files by outcome so far, and chunks and tokens indexed (in a warm-up: computed) by this run.

    ``embed_s`` and ``index_s`` are the seconds spent on embedding and on writing to the index.
    """

    total: int = 0
    indexed: int = 0
    unchanged: int = 0
    failed: int = 0
    skipped: int = 0
    removed: int = 0
    warmed: int = 0
    chunks: int = 0
    tokens: int = 0
    size_bytes: int = 0
    embed_s: float = 0.0
    index_s: float = 0.0
    current: str = ""

    @property
    def done(self) -> int:
        return self.indexed + self.unchanged + self.failed + self.skipped + self.warmed


OnProgress = Callable[[Progress], None]


def progress_of(job: Job, *, chunks: int = 0, tokens: int = 0) -> Progress:
    """Progress of a job as recorded so far: at its scan, before an interruption, or by another process."""
    there = job.n_items - job.counts.get("removed", 0)  # files
    progress = Progress(total=there, chunks=chunks, tokens=tokens)
    for outcome in ("indexed", "unchanged", "failed", "skipped", "removed", "warmed"):
        setattr(progress, outcome, job.counts.get(outcome, 0))
    return progress


def failures_of(jobs: JobStore, job_id: str, *states: str) -> tuple[tuple[str, str], ...]:
    """(source, reason) of the job's items in one of ``states``."""
    return tuple((item.source, item.reason or "") for state in states for item in jobs.items(job_id, state))


@dataclass(frozen=True, slots=True)
class JobReport:
    """Result of a run.

    ``state`` is done, failed, cancelled, or interrupted (resumable); ``failures``, ``skipped`` and
    ``notes`` (on indexed files) hold (source, reason); ``vanished`` holds sources whose file is gone;
    ``warm_job`` is the id of the warm-up job that follows.
    """

    job_id: str
    namespace: str
    state: str
    seconds: float
    progress: Progress
    failures: tuple[tuple[str, str], ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    notes: tuple[tuple[str, str], ...] = ()
    vanished: tuple[str, ...] = ()
    error: str | None = None
    warm_job: str | None = None

    def as_json(self) -> dict[str, Any]:
        """The report as plain data; rates are per second of the whole run."""
        counts = {k: round(v, 3) if isinstance(v, float) else v for k, v in asdict(self.progress).items()}
        del counts["current"]
        files = {name: counts.pop(name) for name in _FILES}
        seconds = max(self.seconds, 1e-9)
        return {
            **{name: getattr(self, name) for name in ("job_id", "namespace", "state", "error")},
            "files": files,
            **counts,
            "seconds": round(self.seconds, 3),
            "chunks_per_s": round(self.progress.chunks / seconds, 1),
            "tokens_per_s": round(self.progress.tokens / seconds, 1),
            "failures": _listed(self.failures),
            "skipped": _listed(self.skipped),
            "notes": _listed(self.notes),
            "vanished": list(self.vanished),
            "warm_job": self.warm_job,
        }


def _listed(items: tuple[tuple[str, str], ...]) -> list[dict[str, str]]:
    return [{"source": source, "reason": reason} for source, reason in items]
