"""Measurements of retrieval over a small collection, with the real embedder and index."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import long_chunks, typing_errors
from tests.unit.bench.small_collection import DOCUMENTS, write_collection


@pytest.fixture
def collection(tmp_path: Path) -> Path:
    return write_collection(tmp_path / "small")


def test_long_chunks_are_measured_by_their_beginning_and_by_windows(collection: Path, tmp_path: Path) -> None:
    filler = ("Gulls", "Gulls scream over the harbour and steal bread. " * 30)
    documents = {"gulls": filler, **DOCUMENTS, "more": filler, "end": filler}
    rows = [{"_id": name, "title": title, "text": text} for name, (title, text) in documents.items()]
    (collection / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = long_chunks.run(tmp_path / "out", data=[collection])
    by_system = {row["embedded"]: row for row in found["rows"]}
    assert set(by_system) == {"beginning", "mean of windows", "largest of windows"}
    assert all(row["chunks"] == 2 and row["windows"] > 1 for row in found["rows"])
    # all answers are in the first chunk, behind what the embedder reads at once
    assert by_system["beginning"]["recall@10"] == 1
    assert by_system["mean of windows"]["ndcg@10"] >= by_system["beginning"]["ndcg@10"]
    assert json.loads((tmp_path / "out" / "long-chunks.json").read_text())["rows"] == found["rows"]


def test_questions_are_measured_with_and_without_correction(collection: Path, tmp_path: Path) -> None:
    lines = tmp_path / "lines.txt"
    lines.write_text("A white bird screams.\nWhich white bird screms?\n")
    found = typing_errors.run(tmp_path / "out", quick=True, data=[collection, lines])
    *judged, plain, _, many = found["rows"]
    rows = {(row["typed"], row["retrieval"], row["spelling"]): row for row in judged}
    assert len(rows) == len(judged) == 12
    for search in ("dense", "lexical", "hybrid"):
        assert rows["plain", search, "on"]["ndcg@10"] == rows["plain", search, "off"]["ndcg@10"]
        assert rows["typo", search, "on"]["restored"] == rows["typo", search, "on"]["changed"] == 1, "breod"
        assert rows["typo", search, "on"]["read"] == rows["typo", search, "on"]["read_restored"] == 1
        assert rows["typo", search, "on"]["ndcg@10"] >= rows["typo", search, "off"]["ndcg@10"]
    assert plain["changed"] == 1
    assert many["changed"] > 0.9 * many["questions"]
    assert json.loads((tmp_path / "out" / "typing-errors.json").read_text())["rows"] == found["rows"]
