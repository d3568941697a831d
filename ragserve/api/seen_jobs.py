"""Jobs as a caller sees them: those of its namespaces, and of documents that it sees."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from ragserve.ingest.jobs.submitter import Submitter, labels_of
from ragserve_index.jobs import job_not_found
from ragserve_index.types import Job, JobItem

if TYPE_CHECKING:
    from ragserve.tenants.principal import Principal
    from ragserve_index import IndexStore, JobStore

_ALL = 1_000_000


class SeenJobs:
    """Where a namespace hides documents from a caller, it sees the jobs alone that it has submitted: those of
    others name documents, and count them."""

    def __init__(self, jobs: JobStore, store: IndexStore, who: Principal) -> None:
        """``store``: as the caller sees it."""
        self._jobs, self._store, self._who = jobs, store, who
        self._hiding: dict[str, bool] = {}

    def get(self, job_id: str) -> Job:
        """Raises NotFound, alike for one of others and for one that never was."""
        job = self._jobs.get(job_id)
        if not self._sees(job):
            raise job_not_found(job_id)
        return job

    def listed(self, namespace: str | None, state: str | None, limit: int) -> list[Job]:
        """Up to ``limit`` jobs (of a namespace, in a state), newest first."""
        if self._who.is_admin:
            return self._jobs.list(namespace, state, limit)
        most = limit
        while True:
            jobs = self._jobs.list(namespace, state, most, within=self._who.patterns)
            found = [job for job in jobs if self._sees(job)]
            if len(found) >= limit or len(jobs) < most:
                return found[:limit]
            most *= 8  # each job is a query of its own

    def unfinished(self) -> list[Job]:
        """All that are queued or running."""
        return [job for state in ("queued", "running") for job in self.listed(None, state, _ALL)]

    def items(self, job: Job, state: str | None) -> list[JobItem]:
        """A job's items (in a state), without those of documents that are hidden from the caller."""
        items = self._jobs.items(job.job_id, state)
        if not self._hides(job.namespace):
            return items
        hidden = self._store.hidden(job.namespace, [item.source for item in items])
        return [item for item in items if item.source not in hidden]

    def _sees(self, job: Job) -> bool:
        if self._who.is_admin:
            return True
        if not self._who.covers(job.namespace):
            return False
        if Submitter.of(job).owner == self._who.owner:
            return True
        return self._who.viewer.holds(labels_of(job)) and not self._hides(job.namespace)

    def _hides(self, namespace: str) -> bool:
        """Whether a namespace hides documents from the caller: never one that is gone."""
        if namespace not in self._hiding:
            self._hiding[namespace] = self._store.hides(namespace) and namespace in self._there
        return self._hiding[namespace]

    @cached_property
    def _there(self) -> frozenset[str]:
        return frozenset(self._store.made_at())
