"""Traces before any engine sees them: requests made of them, and traces that are refused."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ragserve.answering.auto import StrategyChoice
from ragserve.answering.prompt import Prompt, PromptBuilder
from ragserve.bench import replay
from ragserve.bench import retrieval_trace as traces
from ragserve.config import DEFAULT_MODEL
from ragserve.engine.base import EngineTimings, EngineUsage, GenerateChunk, GenerateRequest
from ragserve.engine.document_cache import Whereabouts
from ragserve.errors import InvalidRequest, RagserveError
from ragserve.strategy_spec import StrategySpec
from sglang_ext.wire.protocol import ContextReport


def write(folder: Path, queries: list[object], documents: list[object], *, packed: bool = True) -> Path:
    trace = folder / "t.trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, queries)))
    lines = "\n".join(map(json.dumps, documents))
    if packed:
        (folder / "t.docs.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    else:
        (folder / "t.docs.jsonl").write_text(lines)
    return trace


@pytest.mark.parametrize("packed", [True, False])
def test_prompts_are_those_of_the_product(tmp_path: Path, packed: bool) -> None:
    documents = [{"id": i, "text": f"Fact {i} is true.", "title": f"T{i}"} for i in range(5)]
    queries = [{"doc_ids": [i, i + 1, i], "question": f"Is fact {i} true?"} for i in range(4)]
    path = write(tmp_path, queries, documents, packed=packed)
    trace = traces.read_trace(path, 3, DEFAULT_MODEL)
    assert [query.ids for query in trace.queries] == [
        query.ids for query in traces.read_trace(path, 3, DEFAULT_MODEL).queries
    ]
    assert trace.name == "t"
    assert len(trace.queries) == 3
    builder = PromptBuilder.load(DEFAULT_MODEL)
    assert trace.unique["1"] == builder.document_ids("T1", "Fact 1 is true.")
    assert trace.tokens == sum(
        len(builder.document_ids(f"T{i}", f"Fact {i} is true.")) for i in map(int, trace.unique)
    )
    for query in trace.queries:
        assert len(query.documents) == 2, "the same document is not put into a prompt twice"
        assert query.ids[: query.spans[0].end] == builder.system_ids()
        assert [query.ids[span.start : span.end] for span in query.spans[1:]] == [
            trace.unique[name] for name in query.documents
        ]
    order = [query.documents[0] for query in traces.read_trace(path, 9, DEFAULT_MODEL).queries]
    assert order == ["0", "1", "2", "3"], "in the order of the trace"


def test_bad_traces_are_refused(tmp_path: Path) -> None:
    document = {"id": 1, "text": "x"}
    with pytest.raises(InvalidRequest, match="not beside it"):
        traces.read_trace(write(tmp_path, [{"doc_ids": [1, 2]}], [document]), 1, DEFAULT_MODEL)
    with pytest.raises(InvalidRequest, match="without doc_ids"):
        traces.read_trace(write(tmp_path, [{"ids": [1]}], [document]), 1, DEFAULT_MODEL)
    with pytest.raises(InvalidRequest, match="without 'text'"):
        traces.read_trace(write(tmp_path, [{"doc_ids": [1]}], [{"id": 1}]), 1, DEFAULT_MODEL)
    (tmp_path / "t.docs.jsonl.gz").unlink()
    with pytest.raises(InvalidRequest, match="no documents beside"):
        traces.read_trace(tmp_path / "t.trace.jsonl", 1, DEFAULT_MODEL)
    (tmp_path / "t.trace.jsonl").write_text("{")
    (tmp_path / "t.docs.jsonl").write_text(json.dumps(document))
    with pytest.raises(InvalidRequest, match="not JSON"):
        traces.read_trace(tmp_path / "t.trace.jsonl", 1, DEFAULT_MODEL)
    with pytest.raises(InvalidRequest, match="needs a trace"):
        replay.run(None)


class Engine:
    """Two documents fit on the device, all on disk; ``over`` names a tier that breaks its budget."""

    def __init__(self) -> None:
        self.device: list[tuple[int, ...]] = []
        self.disk: set[tuple[int, ...]] = set()
        self.over = ""
        self.asked: list[GenerateRequest] = []

    async def where(self, namespace: str, documents: Sequence[Sequence[int]]) -> Whereabouts:
        on_device = tuple(tuple(ids) in self.device for ids in documents)
        below: Any = tuple("disk" if tuple(ids) in self.disk else "absent" for ids in documents)
        return Whereabouts(on_device, (False,) * len(below), below, "disk", None, 0, 0, 16, 1, {})

    async def warm(self, request: GenerateRequest) -> None:
        self.disk |= {tuple(request.input_ids[span.start : span.end]) for span in request.spans}

    async def control(self, operation: str, **arguments: Any) -> dict[str, Any]:
        if operation == "evict":
            self.device = []
        elif operation == "remove_namespace":
            self.device, self.disk = [], set()
        tier = {"bytes": 5, "budget_bytes": 10, "documents": 1, "metadata_share": 0.01}
        tiers = {name: tier | {"bytes": 11 if name == self.over else 5} for name in replay.TIERS}
        return tiers | {"evictions": {"device": 0, "host": 0, "disk": 0}}

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        self.asked.append(request)
        for span in request.spans[1:]:
            ids = tuple(request.input_ids[span.start : span.end])
            self.disk.add(ids)
            self.device = [*[each for each in self.device if each != ids], ids][-2:]
        context = (
            None
            if request.strategy == "prefix"
            else ContextReport(request.strategy, 1, 1, 0, {}, 0.0, 0.0, 0.0)
        )
        yield GenerateChunk("x", EngineUsage(100, 25, 1), EngineTimings(), "stop", context)


class Alternating:
    """Chooses prefix and concat by turns."""

    def __init__(self) -> None:
        self.asked: list[Prompt] = []

    async def choose(self, prompt: Prompt, namespace: str) -> StrategyChoice:
        self.asked.append(prompt)
        return StrategyChoice(StrategySpec("prefix" if len(self.asked) % 2 else "concat"), "its turn")


def test_documents_are_counted_where_they_are_on_arrival(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = [{"id": i, "text": f"Fact {i} is true."} for i in range(4)]
    path = write(tmp_path, [{"doc_ids": [0, 1]}, {"doc_ids": [1, 2]}, {"doc_ids": [0, 3]}], documents)
    trace, engine = traces.read_trace(path, 3, DEFAULT_MODEL), Engine()
    monkeypatch.setattr(replay, "CASES", replay.CASES[:3])
    prefix, cold, warmed = asyncio.run(replay._Replay(engine, trace, 0.2).run())  # type: ignore[arg-type]
    assert prefix["prefix %"] == 25.0
    found = [(row["device %"], row["host %"], row["disk %"], row["miss %"]) for row in (cold, warmed)]
    assert found[0] == (16.7, 0.0, 16.7, 66.7), "1 comes back on the device, 0 from disk, the others are new"
    assert found[1] == (16.7, 0.0, 83.3, 0.0)
    assert {request.strategy for request in engine.asked} == {"prefix", "concat"}
    assert all(request.input_ids[request.spans[-1].end :] for request in engine.asked), (
        "a question follows the documents"
    )
    monkeypatch.setattr(
        replay, "CASES", (replay.ReplayCase("auto, half warmed", "auto", {}, True, part=0.5),)
    )
    assert asyncio.run(replay._Replay(engine, trace, 0.2).run()) == [], "nothing to choose by"  # type: ignore[arg-type]
    auto: Any = Alternating()
    (half,) = asyncio.run(replay._Replay(engine, trace, 0.2, auto).run())  # type: ignore[arg-type]
    assert (half["composed %"], len(auto.asked)) == (33.3, 3)
    assert (half["vs prefix %"], half["composed vs prefix %"]) == (None, None), "prefix was not replayed"
    assert [request.strategy for request in engine.asked[-3:]] == ["prefix", "concat", "prefix"]
    assert all(prompt.documents_kept == 2 for prompt in auto.asked)
    monkeypatch.undo()
    engine.over = "host"
    with pytest.raises(RagserveError, match="host tier holds 11 bytes, 10 allowed"):
        asyncio.run(replay._Replay(engine, trace, 0.2).run())  # type: ignore[arg-type]
