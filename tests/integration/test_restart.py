"""The document cache after a kill and after a clean stop. Runs after all other tests of the small engine."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time

import httpx

from sglang_ext.protocol import ContextPlan
from tests.integration.context_client import composed, generate, plan_of, report, result
from tests.integration.processes import assert_gone, family_of
from tests.integration.small_engine import NEW, Engine


def test_documents_survive_a_kill_while_they_are_written_and_no_process_survives_its_server(
    small_engine: Engine,
) -> None:
    engine = small_engine
    engine.reset()
    engine.control("budget", disk_bytes=2**30)
    texts = [5, 6]
    ids, spans = engine.prompt(texts)
    composed(engine.client, ids, spans, namespace="left")
    engine.control("flush")
    family = family_of(engine.server.process.pid)
    writing = threading.Thread(target=_write_until_it_dies, args=(engine.server.url,), daemon=True)
    writing.start()
    deadline = time.monotonic() + 60
    while not engine.control("stat")["disk"]["namespaces"].get("written", {"documents": 0})["documents"]:
        assert time.monotonic() < deadline, "nothing is written"
    engine.scheduler().send_signal(signal.SIGKILL)
    assert engine.server.process.wait(60) != 0
    assert_gone(family)
    writing.join(60)
    engine.down()
    engine.up()
    answer = generate(
        engine.client, ids, plan_of(spans, namespace="left"), n_new=NEW
    )  # no document request first
    engine.right("concat", texts, result(answer))
    assert set(report(answer)["by_tier"]) == {"disk"}
    figures = engine.check()
    assert figures["disk"]["namespaces"]["written"]["documents"] > 0, "those that were whole"
    assert not any((engine.folder / "kv" / "rank-0-of-1" / ".tmp").glob("*"))
    family = family_of(engine.server.process.pid)
    engine.server.process.send_signal(signal.SIGTERM)
    assert engine.server.process.wait(60) == 0, "a clean stop"
    assert_gone(family)


def _write_until_it_dies(url: str) -> None:
    draw = random.Random(9)
    with httpx.Client(base_url=url, timeout=60) as client, contextlib.suppress(httpx.HTTPError):
        while True:
            generate(
                client,
                [draw.randrange(10, 8000) for _ in range(300)],
                ContextPlan("document", "written"),
                n_new=1,
            )
