"""The document cache after a kill and after a clean stop. Runs after all other tests of the small engine."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import threading
import time
from typing import Any

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


def test_a_scheduler_that_dies_ends_streams_with_an_error_and_the_server_with_a_reason(
    small_engine: Engine,
) -> None:
    """The exit code and the log say so."""
    engine = small_engine
    family = _family(engine)
    ours: list[str] = []
    theirs: list[str] = []
    body = {"query": "?", "documents": [], "stream": True, "max_new_tokens": 600}
    plain = {
        "input_ids": [5, 6],
        "stream": True,
        "sampling_params": {"max_new_tokens": 600, "ignore_eos": True},
    }
    readers = [
        threading.Thread(target=_read, args=(engine.server.url, path, sent, lines), daemon=True)
        for path, sent, lines in (("/rag/query", body, ours), ("/generate", plain, theirs))
    ]
    for reader in readers:
        reader.start()
    deadline = time.monotonic() + 60
    while not any("message" in line for line in ours) or not theirs:
        assert time.monotonic() < deadline, "no stream began"
        time.sleep(0.01)
    engine.scheduler().send_signal(signal.SIGKILL)
    died = time.monotonic()
    status = engine.server.process.wait(60)
    assert time.monotonic() - died < 30, "SGLang looks once a second; the server then has eight"
    assert _ended(family, status) == 1
    for reader in readers:
        reader.join(60)
    assert ours[-2] == "event: error", ours[-4:]
    error = json.loads(ours[-1].removeprefix("data: "))["error"]
    assert (error["code"], error["type"]) == ("unavailable", "server_error")
    assert "signal 9 (SIGKILL)" in error["message"]
    assert any('"abort"' in line for line in theirs), (theirs[-3:], engine.server.log.read_text()[-3000:])
    log = engine.server.log.read_text()
    assert "The engine has died: scheduler" in log
    assert "ended with signal 9 (SIGKILL)" in log
    assert "Start the server again" in log or "start the server again" in log
    assert "Traceback" not in log[log.index("The engine has died") :]


def _read(url: str, path: str, body: dict[str, Any], lines: list[str]) -> None:
    with (
        contextlib.suppress(httpx.HTTPError),
        httpx.Client(base_url=url, timeout=60) as client,
        client.stream("POST", path, json=body) as response,
    ):
        for line in response.iter_lines():
            if line:
                lines.append(line)


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
