"""What written questions share with evaluation sets: questions, and runs of 13 words.

    python -m benchmarks.written_questions.shared PASSAGES ROWS.jsonl.gz DATA [--out FILE]

DATA holds a folder for each set; the example corpus with its questions is one, too. Compared are the
questions, with and without their answers, and all passages of the rows. Exits with 1 if anything is
shared."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.places import RESULTS
from benchmarks.model_recipe.overlap import RUN, Evaluated, evaluation_sets
from benchmarks.written_questions.passages import Passage, read_passages
from benchmarks.written_questions.rows import read_rows
from ragserve.files import write_json

OUT = RESULTS / "written-questions-shared.json"


def shared(
    rows: Sequence[Mapping[str, Any]], passages: Iterable[Passage], evaluated: Evaluated
) -> dict[str, Any]:
    """Counts of what is shared, and with which sets."""
    used = {each for row in rows for each in row["passages"]}
    texts = [f"{each.title}\n{each.text}" for each in passages if each.id in used]
    asked = [f"{row['question']} {row['answer'] or ''}" for row in rows]
    where = Counter(each for text in (*texts, *asked) for each in evaluated.repeated_sets(text))
    same = Counter(name for row in rows if (name := evaluated.asked(row["question"])))
    return {
        "words in a run": RUN,
        "questions": len(rows),
        "questions of a set": sum(same.values()),
        "passages": len(texts),
        "texts with a common run": sum(bool(evaluated.repeated_sets(text)) for text in (*texts, *asked)),
        "sets": dict((where + same).most_common()),
        "evaluation": evaluated.sizes,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("passages", type=Path)
    parser.add_argument("rows", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    passages = read_passages(given.passages / "passages.jsonl.gz")
    found = shared(read_rows(given.rows), passages, Evaluated(evaluation_sets(given.data)))
    write_json(given.out, found)
    print(json.dumps({name: value for name, value in found.items() if name != "evaluation"}, indent=1))
    return int(bool(found["questions of a set"] or found["texts with a common run"]))


if __name__ == "__main__":
    sys.exit(main())
