"""Figures of a fleet are sums, but those of what its workers share."""

from __future__ import annotations

from ragserve.fleet.merged_answers import merged

NAMES = ["http://one", "http://two"]


def test_a_store_that_workers_share_is_one() -> None:
    one = {"away": False, "documents": 2, "stored": 3, "bytes": 900, "budget_bytes": 1000, "path": "/s"}
    other = one | {"away": True, "documents": 1, "bytes": 800}
    found = merged([{"remote": one}, {"remote": other}], NAMES)["remote"]
    assert found["away"], "one of them does not reach it"
    assert (found["bytes"], found["budget_bytes"], found["path"]) == (900, 1000, "/s")
    assert (found["documents"], found["stored"]) == (3, 6), "of each worker"


def test_what_each_worker_has_is_added() -> None:
    host = {"bytes": 10, "budget_bytes": 20, "metadata_share": 0.25}
    disk = {"bytes": 5, "budget_bytes": None, "scanned": True}
    one = {"host": host, "disk": disk, "remote": None}
    other = {"host": host | {"metadata_share": 0.5}, "disk": disk | {"scanned": False}}
    found = merged([one, other], NAMES)
    assert found["host"] == {"bytes": 20, "budget_bytes": 40, "metadata_share": 0.5}
    assert found["disk"] == {"bytes": 10, "budget_bytes": None, "scanned": False}
    assert found["remote"] is None
