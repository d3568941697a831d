"""Short forms of the campaigns on the real engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.campaigns import dialogues, load, mixed, operations, tenants
from tests.campaigns.progress import Progress
from tests.campaigns.site import Site
from tests.integration.engines import Server


@pytest.fixture(scope="module")
def server(quick_server: Server) -> Server:
    """None of these answers need be right."""
    return quick_server


def test_operations(server: Any, tmp_path: Path) -> None:
    progress = Progress(tmp_path, "operations", seed=1, target=40)
    with Site(server.running) as site:
        operations.run(progress, site)
    assert (progress.operations, progress.violations) == (40, [])


def test_dialogues(server: Any, tmp_path: Path) -> None:
    progress = Progress(tmp_path, "dialogues", seed=1, target=3)
    with Site(server.running) as site:
        dialogues.run(progress, site)
    assert (progress.operations, progress.violations) == (3, [])


def test_tenants(server: Any, tmp_path: Path) -> None:
    probes = sum(map(len, tenants.PROBES.values()))
    progress = Progress(tmp_path, "tenants", seed=1, target=probes)
    with Site(server.running) as site:
        tenants.run(progress, site)
    assert (progress.operations, progress.violations) == (probes, [])


def test_load(server: Any, tmp_path: Path) -> None:
    progress = Progress(tmp_path, "load", seed=2, target=8)  # of three clients, one begins with leaving
    with Site(server.running) as site:
        load.run(progress, site, clients=3, documents=6, burst_every=2, entries=2)
    assert progress.violations == []
    assert {"asked", "left", "replaced", "ended"} <= set(progress.counts)
    assert progress.data["figures"]["latency ms p50"] > 0


def test_mixed(server: Any, tmp_path: Path) -> None:
    progress = Progress(tmp_path, "mixed", seed=1, target=40)
    with Site(server.running) as site:
        mixed.run(progress, site, clients=3, schemas=2)
    assert progress.violations == []
    assert {"hostile", "health", "ended"} <= set(progress.counts)
    assert progress.data["figures"]["hostile requests to draw from"] > 10_000
