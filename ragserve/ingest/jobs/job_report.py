"""What an ingestion says while it runs and when it is over."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Interrupted", "JobReport", "Progress"]


class Interrupted(Exception):
    """The run was stopped before its end; what is done stays."""


@dataclass(slots=True)
class Progress:
    """Files by outcome so far; chunks and tokens indexed (or, in a warm-up, computed) in this run.

    Seconds are those spent embedding and writing to the index.
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


@dataclass(frozen=True, slots=True)
class JobReport:
    """The outcome of a run. ``state``: done, failed, cancelled, or interrupted (resumable). ``vanished``:
    documents whose file is gone.
    """

    job_id: str
    namespace: str
    state: str
    seconds: float
    progress: Progress
    failures: tuple[tuple[str, str], ...] = ()
    vanished: tuple[str, ...] = ()
    error: str | None = None
    warm_job: str | None = None

    def as_json(self) -> dict[str, Any]:
        """JSON-ready; rates are per second of the whole run."""
        counts = asdict(self.progress)
        counts.pop("current")
        files = {
            name: counts.pop(name)
            for name in ("total", "indexed", "unchanged", "failed", "skipped", "removed", "warmed")
        }
        seconds = max(self.seconds, 1e-9)
        return {
            "job_id": self.job_id,
            "namespace": self.namespace,
            "state": self.state,
            "error": self.error,
            "files": files,
            **{
                name: round(value, 3) if isinstance(value, float) else value for name, value in counts.items()
            },
            "seconds": round(self.seconds, 3),
            "chunks_per_s": round(self.progress.chunks / seconds, 1),
            "tokens_per_s": round(self.progress.tokens / seconds, 1),
            "failures": [{"source": source, "reason": reason} for source, reason in self.failures],
            "vanished": list(self.vanished),
            "warm_job": self.warm_job,
        }
