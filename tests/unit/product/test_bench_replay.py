"""What a trace becomes before any engine sees it, and what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from ragserve.bench import replay
from ragserve.config import DEFAULT_MODEL
from ragserve.errors import InvalidRequest
from ragserve.prompt import PromptBuilder


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
    trace = replay.read_trace(path, 3, DEFAULT_MODEL)
    assert [query.ids for query in trace.queries] == [query.ids for query in replay.read_trace(path, 3, DEFAULT_MODEL).queries]
    assert trace.name == "t"
    assert len(trace.queries) == 3
    builder = PromptBuilder.load(DEFAULT_MODEL)
    assert trace.unique["1"] == builder.document_ids("T1", "Fact 1 is true.")
    assert trace.tokens == sum(len(builder.document_ids(f"T{i}", f"Fact {i} is true.")) for i in map(int, trace.unique))
    for query in trace.queries:
        assert len(query.documents) == 2, "the same document is not put into a prompt twice"
        assert query.ids[: query.spans[0][1]] == builder.system_ids()
        assert [query.ids[a:b] for a, b in query.spans[1:]] == [trace.unique[name] for name in query.documents]
    order = [query.documents[0] for query in replay.read_trace(path, 9, DEFAULT_MODEL).queries]
    assert order == ["0", "1", "2", "3"], "in the order of the trace"


def test_bad_traces_are_refused(tmp_path: Path) -> None:
    document = {"id": 1, "text": "x"}
    with pytest.raises(InvalidRequest, match="not beside it"):
        replay.read_trace(write(tmp_path, [{"doc_ids": [1, 2]}], [document]), 1, DEFAULT_MODEL)
    with pytest.raises(InvalidRequest, match="without doc_ids"):
        replay.read_trace(write(tmp_path, [{"ids": [1]}], [document]), 1, DEFAULT_MODEL)
    with pytest.raises(InvalidRequest, match="without 'text'"):
        replay.read_trace(write(tmp_path, [{"doc_ids": [1]}], [{"id": 1}]), 1, DEFAULT_MODEL)
    (tmp_path / "t.docs.jsonl.gz").unlink()
    with pytest.raises(InvalidRequest, match="no documents beside"):
        replay.read_trace(tmp_path / "t.trace.jsonl", 1, DEFAULT_MODEL)
    (tmp_path / "t.trace.jsonl").write_text("{")
    (tmp_path / "t.docs.jsonl").write_text(json.dumps(document))
    with pytest.raises(InvalidRequest, match="cannot be read"):
        replay.read_trace(tmp_path / "t.trace.jsonl", 1, DEFAULT_MODEL)
    with pytest.raises(InvalidRequest, match="needs a trace"):
        replay.run(None)
