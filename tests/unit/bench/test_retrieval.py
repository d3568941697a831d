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

from ragserve.bench import long_chunks, retrieval, typing_errors
from ragserve.commands import bench
from ragserve.errors import InvalidRequest

DOCUMENTS = {
    "cats": ("Cats", "Cats purr when they are content and sleep most of the day."),
    "rivers": ("Rivers", "Rivers carry water from the mountains to the sea."),
    "bread": ("Bread", "Bread is baked from flour, water, salt and yeast."),
    "engines": ("Engines", "A petrol engine burns fuel in its cylinders to turn a crankshaft."),
}
QUERIES = {
    "q1": ("what does a purring animal feel", {"cats": 1}),
    "q2": ("how is bread baked", {"bread": 2}),
    "q3": ("which machine turns a crankshaft", {"engines": 1}),
}


@pytest.fixture
def collection(tmp_path: Path) -> Path:
    folder = tmp_path / "small"
    (folder / "qrels").mkdir(parents=True)
    rows = [{"_id": name, "title": title, "text": text} for name, (title, text) in DOCUMENTS.items()]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "queries.jsonl").write_text(
        "".join(json.dumps({"_id": q, "text": text}) + "\n" for q, (text, _) in QUERIES.items())
    )
    judged = "".join(
        f"{q}\t{doc}\t{gain}\n" for q, (_, gains) in QUERIES.items() for doc, gain in gains.items()
    )
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + judged)
    return folder


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
