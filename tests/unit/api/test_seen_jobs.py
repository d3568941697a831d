"""Listings of jobs of which the newest are hidden from who asks."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragserve.api.seen_jobs import SeenJobs
from ragserve.tenants.principal import Grant, Principal
from ragserve_index import IndexStore, JobStore


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_jobs_behind_hidden_ones_are_listed(tmp_path: Path, limit: int) -> None:
    who = Principal("nurse", "nurse", (Grant(("ward",), frozenset({"read"})),))
    with IndexStore(tmp_path) as store:
        jobs = JobStore(store)
        own = [jobs.create("ward", {"kind": "upload"}).job_id for _ in range(2)]
        for _ in range(20):
            jobs.create("ward", {"kind": "upload", "labels": ["doctors"]})
        found = SeenJobs(jobs, store.seen_by(who.viewer), who).listed(None, None, limit)
    assert [job.job_id for job in found] == own[::-1][:limit]
