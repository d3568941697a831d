"""The dialogue benchmark over three dialogues of the example corpus and a set in MTRAG's layout."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from ragserve.bench import dialogue
from ragserve.errors import InvalidRequest

ROWS = [
    {
        "Collection": "birds",
        "contexts": [{"document_id": "owl", "text": "Owls hunt at night and eat mice."}],
        "input": [
            {"speaker": "user", "text": "Tell me about owls."},
            {"speaker": "agent", "text": "Owls are birds."},
            {"speaker": "user", "text": "So what exactly do they like to eat the most?"},
        ],
    },
    {
        "Collection": "birds",
        "contexts": [{"document_id": "puffin", "text": "Puffins like to eat small fish most of all."}],
        "input": [{"speaker": "user", "text": "What do puffins eat?"}],
    },
]


def test_both_kinds_of_dialogues_are_measured_with_the_rival(tmp_path: Path) -> None:
    path = tmp_path / "small.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in ROWS)
    found = dialogue.run(tmp_path / "out", quick=True, data=[path])
    assert json.loads((tmp_path / "out" / "dialogue.json").read_text())["rows"] == found["rows"]
    rows = {(row["set"], row["retrieval"], row["searched for"]): row for row in found["rows"]}
    corpus = [key for key in rows if key[0] == "examples/corpus"]
    assert {key[2] for key in corpus} == {"alone", "joined if short", "context", "standalone"}
    assert {rows[key]["dialogues"] for key in corpus} == {3}
    assert rows["examples/corpus", "dense", "standalone"]["recall@5"] > 0
    for retrieval in ("dense", "lexical", "hybrid"):
        # the question has more than six words, so the rival searches for it alone and prefers the puffins
        assert (
            rows["small", retrieval, "joined if short"] | {"searched for": "alone"}
            == rows["small", retrieval, "alone"]
        )
        assert rows["small", retrieval, "context"]["dialogues"] == 1, "the puffins' dialogue has one turn"
    assert rows["small", "dense", "alone"]["ndcg@5"] < 1
    assert rows["small", "dense", "context"]["ndcg@5"] == 1


def test_a_file_of_another_layout_is_named(tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text('{"question": "x"}\n')
    with pytest.raises(InvalidRequest, match=r"other\.jsonl, line 1: no dialogue"):
        dialogue.run(None, quick=True, data=[path])
