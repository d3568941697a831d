"""Collections in BEIR's layout."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from ragserve.bench import beir
from ragserve.errors import InvalidRequest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    corpus = [
        {"_id": "1", "title": "Cats", "text": "Cats purr."},
        {"_id": "2", "title": "Dogs", "text": "They bark."},
    ]
    with gzip.open(tmp_path / "corpus.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in corpus)
    queries = [
        {"_id": "q2", "text": "bark?"},
        {"_id": "q1", "text": "purr?"},
        {"_id": "q3", "text": "nobody judged"},
    ]
    (tmp_path / "queries.jsonl").write_text("".join(json.dumps(row) + "\n" for row in queries))
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\t1\t2\nq2\t2\t1\nq2\t1\t0\n")
    return tmp_path


def test_load(folder: Path) -> None:
    collection = beir.load(folder)
    assert collection.queries == {
        "q2": "bark?",
        "q1": "purr?",
    }  # by id, not by place; q3 has no relevant document
    assert collection.judged == {"q1": {"1": 2}, "q2": {"2": 1}}
    assert collection.passage("1") == "Cats purr."  # the text begins with its title
    assert collection.passage("2") == "Dogs\nThey bark."
    assert list(beir.load(folder, max_queries=1).queries) == ["q2"]


@pytest.mark.parametrize("name", ["corpus.jsonl.gz", "queries.jsonl", "qrels/test.tsv"])
def test_missing_file(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(InvalidRequest, match=r"does not exist.*corpus\.jsonl"):
        beir.load(folder)


@pytest.mark.parametrize(
    ("qrels", "says"),
    [
        ("query-id\tcorpus-id\tscore\nq1\t9\t1\n", "not in the collection"),
        ("query-id\tcorpus-id\tscore\nq1\t1\thigh\n", "line 2"),
        ("1 0 1 1\n1 0 2 1\n", "expected columns"),
        ("query-id\tcorpus-id\tscore\nq1\t1\t0\n", "no query has a relevant"),
    ],
)
def test_bad_judgements(folder: Path, qrels: str, says: str) -> None:
    (folder / "qrels" / "test.tsv").write_text(qrels)
    with pytest.raises(InvalidRequest, match=says):
        beir.load(folder)
