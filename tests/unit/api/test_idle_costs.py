"""A server that measures costs and is to warm documents meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ragserve.cache.warm import KIND
from ragserve.engine.document_cache import Whereabouts
from ragserve.profiles.gate import FILE_NAME, Entry, record
from ragserve_index import JobStore
from tests.unit.api import scripted_server
from tests.unit.api.scripted_server import DOCUMENTS, ScriptedEngine, eventually, serving
from tests.unit.api.test_verification import GOOD


class Cold(ScriptedEngine):
    """An engine with an empty document cache, on the host."""

    def __init__(self, tokenizer: Path) -> None:
        super().__init__(tokenizer)
        self.found: set[tuple[int, ...]] = set()
        self.looked_for: list[str] = []
        self.warmed: list[tuple[str, set[str]]] = []  # namespaces, and what ran meanwhile

    async def control(self, operation: str, **arguments: Any) -> dict[str, Any]:
        return {"fingerprint": "print", "host": {"bytes": 0}}

    async def warm(self, request: Any) -> None:
        self.warmed.append((request.namespace, set(self.running)))
        self.found |= {tuple(request.input_ids[span.start : span.end]) for span in request.spans}

    async def prefix(self, namespace: str, input_ids: Any) -> int:
        return 0

    async def where(self, namespace: str, documents: Any) -> Whereabouts:
        self.looked_for += [namespace] * len(documents)
        here = tuple(tuple(ids) in self.found for ids in documents)
        below: Any = tuple("host" if found else "absent" for found in here)
        return Whereabouts(here, here, below, "host", None, 10**9, 0, 16, 1, {})


def test_a_warm_up_in_the_background_waits_while_a_case_is_measured(
    tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripted_server, "ScriptedEngine", Cold)
    record(tmp_path / FILE_NAME, "print", {"epic:first=8": Entry({"s": GOOD}, "tiny", "d", "h", "float32")})
    with serving(tmp_path, model_path, idle_tuning=True) as live, live.client() as client:
        engine: Any = live.engine
        engine.hold.clear()
        eventually(lambda: "calibrate" in engine.running, "a case is being measured")
        live.index("docs", DOCUMENTS)
        JobStore(live.services.store).create("docs", {"kind": KIND, "background": True}, sorted(DOCUMENTS))
        eventually(lambda: "docs" in engine.looked_for, "the warm-up has begun")
        for _ in range(20):
            assert client.get("/info").json()["warming"]["documents_left"] == 3
        engine.hold.set()
        eventually(lambda: not client.get("/info").json()["warming"]["jobs"], "all are warmed")
        meanwhile = [running for namespace, running in engine.warmed if namespace == "docs"]
    assert meanwhile
    assert not any(meanwhile), "nothing was measured"
