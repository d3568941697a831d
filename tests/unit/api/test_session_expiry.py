"""Sessions whose time is up: what is dropped, of which engine, and what does not keep it from happening."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from ragserve.engine.base import EngineInfo
from ragserve.engine.document_cache import CachingEngine, Whereabouts
from ragserve.errors import EngineError
from sglang_ext.wire.protocol import session_key
from tests.unit.api import scripted_server
from tests.unit.api.scripted_server import DOCUMENTS, ScriptedEngine, eventually, serving
from tests.unit.api.test_sessions import FIRST, THEN, ask, refused

TTL_S = 3600.0


class CachingScripted(ScriptedEngine):
    """A scripted engine with a document cache. ``removed``: keys of the sessions that it was told to drop."""

    only_exact: str | None = None

    def __init__(self, tokenizer: Path) -> None:
        super().__init__(tokenizer)
        self.removed: list[str] = []

    @property
    def info(self) -> EngineInfo:
        return replace(super().info, only_exact=self.only_exact)

    async def control(self, operation: str, **arguments: Any) -> dict[str, Any]:
        if operation == "remove_session":
            self.removed.append(arguments["key"])
        return {}

    async def warm(self, request: Any) -> None: ...
    async def prefix(self, namespace: str, input_ids: Any) -> int:
        return 0

    async def where(self, namespace: str, documents: Any) -> Whereabouts:
        return Whereabouts((), (), (), "host", None, 0, 0, 16, 1, {})


class Clock:
    """The time by which sessions expire."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def time(self) -> float:
        return time.time() + self.ahead


class Looks:
    """Stands before the store's `chunks`, which each look at a session's documents asks. ``error``: what it
    fails with from now on."""

    def __init__(self, store: Any) -> None:
        self.count = 0
        self.error: Exception | None = None
        self._chunks = store.chunks

    def __call__(self, *arguments: Any) -> Any:
        self.count += 1
        if self.error is not None:
            raise self.error
        return self._chunks(*arguments)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("ragserve.answering.sessions.dialogues.time", clock)
    monkeypatch.setattr("ragserve.answering.sessions.dialogues._SWEEP_S", 0.01)
    monkeypatch.setattr(scripted_server, "ScriptedEngine", CachingScripted)
    return clock


@pytest.mark.parametrize(
    ("only_exact", "error"),
    [(None, None), ("its layers keep KV of different kinds", None), (None, OSError("the disk is gone"))],
    ids=["composing engine", "exact strategies only", "the store fails"],
)
def test_the_kv_of_a_session_goes_when_its_time_is_up(
    tmp_path: Path,
    model_path: Path,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    only_exact: str | None,
    error: Exception | None,
) -> None:
    """All but that of an engine that cannot drop one prefix without the others. A session that is being
    answered stays, and a store that fails, which is asked about that one's documents, ends nothing."""
    monkeypatch.setattr(CachingScripted, "only_exact", only_exact)
    with serving(tmp_path, model_path, session_ttl_s=TTL_S) as live, live.client() as client:
        engine: Any = live.engine
        assert isinstance(engine, CachingEngine)
        live.index("docs", DOCUMENTS)
        looks = Looks(live.services.store)
        fields = {"strategy": "prefix"}
        left, busy = (ask(client, FIRST, session="new", **fields)["session"]["id"] for _ in range(2))
        engine.hold.clear()
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(ask, client, THEN, session=busy)
            try:
                eventually(lambda: bool(engine.running), "a turn that is being answered")
                looks.error = error
                monkeypatch.setattr(live.services.store, "chunks", looks)
                clock.ahead = TTL_S - 60
                assert listed(client) == {left, busy}
                _two_more(looks)
                assert engine.removed == []
                clock.ahead = TTL_S + 60
                assert listed(client) == {busy}
                refused(client, 404, "session_not_found", session=left)
                _two_more(looks)
                assert engine.removed == ([] if only_exact else [session_key("docs", left)])
                looks.error = None
            finally:
                engine.hold.set()
            assert answer.result()["session"]["turn"] == 2
        clock.ahead = 3 * TTL_S
        assert listed(client) == set()
        if not only_exact:
            eventually(lambda: session_key("docs", busy) in engine.removed, "the other session is dropped")


def test_an_engine_that_cannot_drop_a_session_ends_no_other(
    tmp_path: Path, model_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path, model_path, session_ttl_s=TTL_S) as live, live.client() as client:
        engine: Any = live.engine
        live.index("docs", DOCUMENTS)
        names = [ask(client, FIRST, session="new", strategy="prefix")["session"]["id"] for _ in range(2)]
        asked: list[str] = []

        async def control(operation: str, **arguments: Any) -> dict[str, Any]:
            if operation == "remove_session":
                asked.append(arguments["key"])
                raise EngineError("it is busy", hint="")
            return {}

        monkeypatch.setattr(engine, "control", control)
        clock.ahead = TTL_S + 60
        eventually(lambda: len(asked) == 2, "both are dropped")
        assert set(asked) == {session_key("docs", name) for name in names}


def listed(client: httpx.Client) -> set[str]:
    return {each["id"] for each in client.get("/rag/sessions").json()["sessions"]}


def _two_more(looks: Looks) -> None:
    """Wait until all sessions have been looked through: the second look begins after the first has ended."""
    before = looks.count
    eventually(lambda: looks.count >= before + 2, "two more looks at the sessions")
