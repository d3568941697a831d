"""Who has submitted a job: what it may replace, and who may look at it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ragserve_index.types import Job
from ragserve_index.viewers import EVERYTHING, Viewer

_FIELD = "submitter"  # of a job's spec


@dataclass(frozen=True, slots=True)
class Submitter:
    """``owner``: as of sessions; "" for a command. ``viewer``: a job replaces documents that it sees only."""

    owner: str = ""
    viewer: Viewer = EVERYTHING

    @classmethod
    def of(cls, job: Job) -> Submitter:
        """Who has submitted a job."""
        found = job.spec.get(_FIELD)
        if found is None:
            return cls()
        labels = found["labels"]
        return cls(found["owner"], EVERYTHING if labels is None else Viewer.holding(labels))

    def as_spec(self) -> dict[str, Any]:
        """What a job's spec says of it; nothing for a command."""
        if not self.owner:
            return {}
        labels = None if self.viewer.labels is None else sorted(self.viewer.labels)
        return {_FIELD: {"owner": self.owner, "labels": labels}}


def labels_of(job: Job) -> list[str]:
    """The labels that a job gives to documents."""
    return list(job.spec.get("labels") or ())
