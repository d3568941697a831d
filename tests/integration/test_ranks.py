"""A tensor-parallel process that fails by itself ends the server. The name of this file sorts after those of
the other tests of that engine, so that nobody starts it again."""

from __future__ import annotations

import contextlib
import threading

import httpx

from tests.integration.context_client import composed, generate, plan_of
from tests.integration.engines import Server
from tests.integration.processes import assert_gone, family_of
from tests.integration.test_context_models import IDS, SPANS


def test_a_rank_that_fails_between_collectives_ends_the_server(parallel_server: Server) -> None:
    """The other one waits for it in a recomputation, and would for ever."""
    client, running = parallel_server.client, parallel_server.running
    composed(client, IDS, SPANS, "cacheblend", "alone", share=0.2)
    family = family_of(running.process.pid)
    fault = {"op": "fault", "stage": "recompute", "rank": 1}
    assert client.post("/dumper/ragserve", json=fault).status_code == httpx.codes.OK

    def ask() -> None:
        with contextlib.suppress(httpx.HTTPError, ValueError):
            generate(client, IDS, plan_of(SPANS, "cacheblend", "alone", share=0.2))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    assert running.process.wait(240) == 1
    assert_gone(family)
    asking.join(240)
    log = running.log.read_text()
    assert "did not fail within 5 s" in log
    assert "start the server again" in log[log.index("The engine has died: ") :]
