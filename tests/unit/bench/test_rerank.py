"""The reranking benchmark over a small question set, with the real index and prompts; the engine is scripted,
and the figures can be worked out by hand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ragserve.answering.prompt import PromptBuilder
from ragserve.bench import rerank
from ragserve.config import DEFAULT_MODEL, load
from ragserve.errors import InvalidRequest
from ragserve.verification.report import GrowingReport
from tests.unit.api.scripted_server import ScriptedEngine, WordEmbedder

# words of the question are in the wrong passages, so that the search has the right one last
WRONG = [f"The lamp of the reef was built {i}." for i in range(6)]
RIGHT = "Alan Stevenson made it."
ROWS = [
    {
        "id": str(i),
        "question": question,
        "answers": ["Alan Stevenson"],
        "ctxs": [{"title": "", "text": text, "gold": text == RIGHT} for text in (*WRONG, RIGHT)],
    }
    for i, question in enumerate(["who built the lamp", "the lamp of the reef"])
]


class Keys(ScriptedEngine):
    """An engine whose keys know the right passage, and which repeats it if a prompt has it."""

    def __init__(self) -> None:
        super().__init__(Path(DEFAULT_MODEL))
        prompts = PromptBuilder.load(DEFAULT_MODEL)
        self.right = prompts.document_ids("", RIGHT)
        self.analysed: list[list[int]] = []
        self.reply = lambda request: ["Alan Stevenson" if self._has_it(request.input_ids) else "Nobody"]

    def _has_it(self, ids: list[int]) -> bool:
        n = len(self.right)
        return any(ids[at : at + n] == self.right for at in range(len(ids)))

    async def prefix(self, namespace: str, input_ids: Any) -> int:
        return 0

    async def where(self, namespace: str, documents: Sequence[list[int]]) -> Any:
        return SimpleNamespace(below=["host" if ids in self.analysed else "absent" for ids in documents])

    async def warm(self, request: Any) -> None:
        self.analysed += [request.input_ids[span.start : span.end] for span in request.spans]

    async def control(self, operation: str, **arguments: Any) -> dict[str, Any]:
        given = arguments["documents"]
        return {"scores": [float(ids == self.right) if ids in self.analysed else None for ids in given]}


class Backwards:
    """A reranker that turns the order round."""

    comparable = True

    async def scores(self, namespace: str, question: str, chunks: Sequence[Any]) -> list[float]:
        return [float(place) for place in range(len(chunks))]

    async def close(self) -> None: ...


def test_each_reranker_is_measured_by_its_order_and_by_the_answers(tmp_path: Path) -> None:
    path = tmp_path / "lamps.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    report = GrowingReport("rerank", tmp_path / "rerank.json", note="")
    settings = load(data_dir=tmp_path / "data", retrieval="hybrid")
    engine = Keys()
    asked = rerank.read(path, 0)
    asyncio.run(rerank.measure(asked, engine, WordEmbedder(), settings, {"a/backwards": Backwards()}, report))
    dense, lexical, off, keys, backwards = report.rows
    assert [(row["retrieval"], row["rerank"]) for row in report.rows] == [
        *((retrieval, "off") for retrieval in ("dense", "lexical", "hybrid")),
        *(("hybrid", name) for name in ("keys", "backwards")),
    ]
    assert json.loads((tmp_path / "rerank.json").read_text())["rows"] == report.rows
    assert {(row["questions"], row["passages"]) for row in report.rows} == {(2, 7)}
    assert lexical["recall@50"] == 0, "no word of a question is in the right passage"
    for row in (dense, lexical, off):
        assert row["ndcg@5"] == row["f1"] == row["em"] == 0, "the right passage is the seventh, or not found"
    assert backwards["ndcg@5"] == backwards["f1"] == backwards["em"] == 1
    assert {row["recall@50"] for row in (dense, off, keys, backwards)} == {1}
    assert keys["ndcg@5"] > 0
    assert keys["f1"] == 1, "fused with the search, the right passage is among the first five"
    assert off["ms_p50"] is None
    assert keys["ms_p50"] > 0
    assert len(engine.analysed) == 7, "each passage once"


def test_a_set_without_gold_passages_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lamps.jsonl"
    row = ROWS[0] | {"answers": ["Robert"], "ctxs": [{"title": "", "text": WRONG[0], "gold": False}]}
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    with pytest.raises(InvalidRequest, match="no question has a passage with its answer"):
        rerank.read(path, 0)
