"""A short form of campaign `fleet` over scripted workers, and what it takes for an error of a kill."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, cast

import httpx

from ragserve.engine.running_server import RunningServer
from tests.campaigns import fleet
from tests.campaigns.progress import Progress
from tests.campaigns.site import Site
from tests.unit.fleet.fake_worker import FakeWorker


def test_answers_stay_the_same_while_workers_die(
    two: list[FakeWorker], client: httpx.Client, tmp_path: Path
) -> None:
    returns: list[threading.Thread] = []

    def kill(url: str) -> None:
        (worker,) = [each for each in two if each.url == url]
        worker.kill()
        returns.append(threading.Thread(target=worker.start))
        returns[-1].start()

    progress = Progress(tmp_path / "progress", "fleet", seed=1, target=20)
    url = str(client.base_url).rstrip("/")
    running = RunningServer(url, tmp_path, cast(Any, None), tmp_path / "log", 0.0)
    with Site(running) as site:
        fleet.run(progress, site, kill, clients=2, documents=3, every_s=60)
    for each in returns:
        each.join(240)
    assert progress.violations == []
    assert (
        {"asked", "killed", "ended"} <= progress.counts.keys() <= {"asked", "sent again", "killed", "ended"}
    )
    assert progress.data["figures"]["kills"] == progress.counts["killed"] == len(returns)


def test_an_error_is_a_kills_if_the_request_ran_then() -> None:
    kills = fleet.Kills([(10.0, 10.5)])
    assert kills.within(9.0, 10.1)
    assert kills.within(10.4, 12.0)
    assert not kills.within(8.0, 9.9)
    assert not kills.within(10.6, 12.0)
