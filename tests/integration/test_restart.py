"""The document cache and sessions after a kill, the cache after a clean stop, and the other SGLang that is
served: the engine starts again on that one. Runs after all other tests of the small engine."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import sys
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx

from sglang_ext.wire.protocol import SGLANG_VERSIONS, ContextPlan
from tests.integration.context_client import composed, generate, plan_of, report, result
from tests.integration.processes import assert_gone, family_of
from tests.integration.small_engine import NEW, Engine
from tests.integration.talks import STRATEGIES, Talk, ingest

OTHER_VERSION = next(each for each in SGLANG_VERSIONS if each != version("sglang"))
OTHER = Path(sys.prefix) / f"sglang-{OTHER_VERSION}"
"""Where `scripts/install` puts it on a machine without a GPU."""


def test_documents_survive_a_kill_while_they_are_written_and_streams_end_with_its_reason(
    small_engine: Engine,
) -> None:
    engine = small_engine
    engine.reset()
    engine.control("budget", disk_bytes=2**30)
    texts = [5, 6]
    ids, spans = engine.prompt(texts)
    composed(engine.client, ids, spans, namespace="left")
    talks, wanted = _begun_talks(engine)
    engine.control("flush")
    family = family_of(engine.server.process.pid)
    writing = threading.Thread(target=_write_until_it_dies, args=(engine.server.url,), daemon=True)
    writing.start()
    deadline = time.monotonic() + 240
    while not engine.control("stat")["disk"]["namespaces"].get("written", {"documents": 0})["documents"]:
        assert time.monotonic() < deadline, "nothing is written"
    ours, theirs, readers = _cut_streams(engine)
    assert engine.server.process.wait(240) == 1
    assert_gone(family)
    for thread in (writing, *readers):
        thread.join(240)
    _assert_cut_with_a_reason(ours, theirs, engine.server.log.read_text())
    engine.down()
    engine.up(OTHER if OTHER.is_dir() else None)
    if OTHER.is_dir():
        assert engine.client.get("/info").json()["versions"]["sglang"] == OTHER_VERSION
    answer = generate(
        engine.client, ids, plan_of(spans, namespace="left"), n_new=NEW
    )  # no document request first
    engine.right("concat", texts, result(answer))
    assert set(report(answer)["by_tier"]) == {"disk"}
    _assert_talks_go_on(engine, talks, wanted)
    figures = engine.check()
    assert figures["disk"]["namespaces"]["written"]["documents"] > 0, "those that were whole"
    assert not any((engine.folder / "kv" / "rank-0-of-1" / ".tmp").glob("*"))
    family = family_of(engine.server.process.pid)
    engine.server.process.send_signal(signal.SIGTERM)
    assert engine.server.process.wait(240) == 0, "a clean stop"
    assert_gone(family)


def _begun_talks(engine: Engine) -> tuple[dict[str, Talk], dict[str, str]]:
    """Sessions of two turns, and what their third turn says when the server is not started again."""
    ingest(engine, "talks")
    talks, wanted = {}, {}
    for strategy in STRATEGIES:
        whole = Talk(engine, "talks", strategy)
        talks[strategy] = Talk(engine, "talks", strategy)
        for _ in range(2):
            assert talks[strategy].turn()["answer"] == whole.turn()["answer"]
        wanted[strategy] = whole.turn()["answer"]
    assert wanted["all"] == wanted["prefix"]
    return talks, wanted


def _assert_talks_go_on(engine: Engine, talks: dict[str, Talk], wanted: dict[str, str]) -> None:
    for strategy, talk in talks.items():
        engine.control("flush")
        before = engine.control("stat")["moved_bytes"]["from_disk"]
        answer = talk.turn()
        assert answer["answer"] == wanted[strategy]
        if strategy != "prefix":
            assert answer["session"]["tokens_held"] == 0, "its turns were composed again"
            assert answer["session"]["tokens_computed"] > 0
            assert answer["context"]["notes"] == []
            assert engine.control("stat")["moved_bytes"]["from_disk"] > before


def _cut_streams(engine: Engine) -> tuple[list[str], list[str], list[threading.Thread]]:
    """Kill the scheduler while it writes an answer of SGLang's and one of ours; their lines as they come.

    What a client has read says little of how far the answers are. So the scheduler is stopped first, until
    all that it has written is read, and goes on where one of them is whole.
    """
    url, scheduler = engine.server.url, engine.scheduler()
    ours: list[str] = []
    theirs: list[str] = []
    killed = threading.Event()

    def read_theirs() -> None:
        plain = {"input_ids": [5, 6], "stream": True}
        endless = {"max_new_tokens": 200, "ignore_eos": True}
        while not killed.is_set():
            _read(url, "/generate", {**plain, "sampling_params": endless}, theirs)

    def read_ours() -> None:
        query = {"query": "?", "documents": [], "stream": True, "max_new_tokens": 60}
        while not killed.is_set():
            _read(url, "/rag/query", query, ours)

    readers = [threading.Thread(target=read, daemon=True) for read in (read_theirs, read_ours)]
    for reader in readers:
        reader.start()
    deadline = time.monotonic() + 240
    while True:
        assert time.monotonic() < deadline, "there was no word of both"
        if _are_between_words(ours, theirs):
            scheduler.suspend()
            _wait_until_read(ours, theirs)
            if _are_between_words(ours, theirs):
                break
            scheduler.resume()
        time.sleep(0.005)
    killed.set()
    scheduler.send_signal(signal.SIGKILL)
    return ours, theirs, readers


def _are_between_words(ours: list[str], theirs: list[str]) -> bool:
    """Both answers have begun, and none is whole."""
    event = next((line for line in reversed(ours) if line.startswith("event: ")), "")
    return event == "event: message" and bool(theirs) and '"finish_reason":null' in theirs[-1]


def _wait_until_read(*answers: list[str], quiet_s: float = 2.0) -> None:
    """Wait until no line has come for a while."""
    lines, since = -1, time.monotonic()
    while time.monotonic() - since < quiet_s:
        if lines != (lines := sum(map(len, answers))):
            since = time.monotonic()
        time.sleep(0.05)


def _assert_cut_with_a_reason(ours: list[str], theirs: list[str], log: str) -> None:
    assert ours[-2] == "event: error", ours[-4:]
    error = json.loads(ours[-1].removeprefix("data: "))["error"]
    assert (error["code"], error["type"]) == ("unavailable", "server_error")
    assert "signal 9 (SIGKILL)" in error["message"]
    assert any('"abort"' in line for line in theirs), theirs[-3:]
    said = log[log.index("The engine has died: scheduler") :]
    assert "ended with signal 9 (SIGKILL)" in said
    assert "start the server again" in said, "what to do"
    assert "Traceback" not in said


def _read(url: str, path: str, body: dict[str, Any], lines: list[str]) -> None:
    with (
        contextlib.suppress(httpx.HTTPError),
        httpx.Client(base_url=url, timeout=240) as client,
        client.stream("POST", path, json=body) as response,
    ):
        for line in response.iter_lines():
            if line:
                lines.append(line)


def _write_until_it_dies(url: str) -> None:
    draw = random.Random(9)
    with httpx.Client(base_url=url, timeout=240) as client, contextlib.suppress(httpx.HTTPError):
        while True:
            generate(
                client,
                [draw.randrange(10, 8000) for _ in range(300)],
                ContextPlan("document", "written"),
                n_new=1,
            )
