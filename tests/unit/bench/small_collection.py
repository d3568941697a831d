"""A collection in BEIR's layout, small enough that figures can be worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

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


def write_collection(folder: Path) -> Path:
    """Write it to ``folder``, and return that."""
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
