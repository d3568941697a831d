"""SGLang's own router in front of two scripted workers: keys by its ring, plans, streams, its death."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest
from pydantic import SecretStr

from ragserve.bench.running_router import is_installed, running_router
from ragserve.config import load
from ragserve.engine.ports import LOOPBACK, hold_port, port_of
from ragserve.fleet import fleet_engine
from ragserve.fleet.fleet_engine import FleetEngine
from tests.unit.fleet.fake_worker import KEY, answered, request, run_on, until, workers

if not is_installed():
    pytest.skip("smg has no wheel for this platform", allow_module_level=True)


def test_requests_reach_their_workers_by_the_ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_engine, "PROBE_S", 0.1)
    log = tmp_path / "router.log"

    async def work(engine: FleetEngine, first: subprocess.Popen[bytes]) -> None:
        await until(engine, True)
        for number in range(1, 9):
            await answered(engine, number)
        assert sum(len(each.ledger.answered) for each in made) == 8
        for each in made:
            (key,) = {key for key in each.ledger.keys if key}
            assert key.startswith(f"0 {each.ledger.data_dir.name}/"), "each by a key of its own"
        for each in made:
            each.ledger.after_first.clear()
        chunks = engine.generate(request(1, "prefix"))
        assert (await anext(chunks)).text, "before the answer is complete"
        await chunks.aclose()  # type: ignore[attr-defined]
        for each in made:
            each.ledger.after_first.set()
        first.kill()
        await asyncio.to_thread(first.wait)
        async with asyncio.timeout(240):
            while [one["routed"] for one in engine.workers()] != [False, False]:
                await answered(engine, 1, "prefix")
        for number in range(1, 5):
            await answered(engine, number, "prefix")
        # the same workers by other names: another ring, where keys lead elsewhere
        with running_router([url.replace(LOOPBACK, "localhost") for url in urls], log, KEY, port=port):
            await until(engine, True)
            for number in range(1, 5):
                await answered(engine, number)

    with hold_port() as held, workers(tmp_path, 2) as made:
        port = port_of(held)
        urls = [each.url for each in made]
        with running_router(urls, log, KEY, port=port) as first:
            settings = load(
                engine_api_key=SecretStr(KEY),
                data_dir=tmp_path / "front",
                workers=",".join(urls),
                router_url=f"http://{LOOPBACK}:{port}",
            )
            run_on(lambda: FleetEngine(settings, urls, others_s=0), lambda engine: work(engine, first))
