"""The retrieval benchmark over a small collection, with the real embedder and index; the figures can be
worked out by hand.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from ragserve.bench import retrieval
from ragserve.commands import bench
from ragserve.errors import InvalidRequest
from tests.unit.bench.small_collection import write_collection


@pytest.fixture
def collection(tmp_path: Path) -> Path:
    return write_collection(tmp_path / "small")


def test_our_index_and_its_rival_are_measured_on_the_same_queries(collection: Path, tmp_path: Path) -> None:
    found = retrieval.run(tmp_path / "out", data=[collection], index_types=["flat", "hnsw"])
    assert [row["system"] for row in found["rows"]] == [
        "bm25s",
        *("dense flat", "lexical", "hybrid flat"),
        *("dense hnsw", "lexical", "hybrid hnsw"),
    ]
    bm25, *ours = found["rows"]
    # no word of q1 is in the collection, so BM25 finds nothing; q2 and q3 share words with one document alone
    assert bm25["ndcg@10"] == pytest.approx(2 / 3, abs=1e-4)
    # q1 shares only "a" with a document, the wrong one: hybrid has that one first and the right one second
    second = round((1 / math.log2(3) + 2) / 3, 4)
    assert [row["ndcg@10"] for row in ours] == [1.0, 0.6667, second] * 2
    assert [row["recall@10"] for row in ours] == [1.0, 0.6667, 1.0] * 2
    assert {row["queries"] for row in found["rows"]} == {3}
    assert json.loads((tmp_path / "out" / "retrieval.json").read_text())["rows"] == found["rows"]


def test_the_command(collection: Path, tmp_path: Path) -> None:
    app = typer.Typer()
    bench.register(app)
    app.command("other")(lambda: None)  # a Typer app with one command takes no command name
    runner = CliRunner()
    done = runner.invoke(
        app, ["bench", "retrieval", "--quick", "--data", str(collection), "--out", str(tmp_path / "out")]
    )
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "retrieval.json").exists()
    for wrong, says in (
        (["bench", "retrieval"], "--data DIR"),
        (["bench", "retrieval", "--data", "x", "--index-types", "flat,round"], "'round'"),
        (["bench", "retrieval", "--data", str(tmp_path)], r"corpus.jsonl does not exist"),
    ):
        error = runner.invoke(app, wrong).exception
        assert isinstance(error, InvalidRequest)
        assert says in str(error)
