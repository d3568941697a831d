"""The benchmark of lexical search over a small collection among a few articles."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ragserve.bench import lexical
from ragserve.errors import InvalidRequest


def test_the_passages_are_found_among_the_articles(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    (folder / "qrels").mkdir(parents=True)
    passages = {f"p{i}": f"The keeper of lighthouse number{i} was born in village{i}." for i in range(5)}
    (folder / "corpus.jsonl").write_text(
        "".join(
            json.dumps({"_id": name, "title": "", "text": text}) + "\n" for name, text in passages.items()
        )
    )
    (folder / "queries.jsonl").write_text(
        "".join(json.dumps({"_id": f"q{i}", "text": f"Who kept number{i}?"}) + "\n" for i in range(5))
    )
    judged = "".join(f"q{i}\tp{i}\t1\n" for i in range(5))
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + judged)
    articles = tmp_path / "articles.jsonl"
    articles.write_text(json.dumps({"title": "Sea", "text": "the sea is who it was " * 60}) + "\n")
    found = lexical.run(tmp_path / "out", quick=True, data=[folder, articles])
    assert [(row["system"], row["chunks"], row["ndcg@10"]) for row in found["rows"]] == [
        ("ragserve", 1005, 1.0),
        ("all words, FTS5", 1005, 1.0),
    ]
    assert json.loads((tmp_path / "out" / "lexical.json").read_text())["rows"] == found["rows"]
    for given in ([], [folder], [articles]):
        with pytest.raises(InvalidRequest, match="one collection and articles"):
            lexical.run(None, data=given)
