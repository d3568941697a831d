"""Question sets without the passages that answer: what a model should refuse.

    python -m benchmarks.written_questions.without_gold SETS OUT NAME [NAME ...]

Writes OUT/NAME_none.jsonl.gz: the set's questions and answers, with the passages that do not hold the answer.
Column ``refused`` of `ragserve eval` is then what is refused rightly, and over the set itself what is refused
wrongly."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from benchmarks.written_questions.passages import write_lines
from ragserve.eval.data import Question, find, load
from ragserve.verification.metrics import contains_answer


def without_gold(questions: list[Question]) -> Iterator[str]:
    """Lines of a set. A question whose other passages hold an answer is left out."""
    for each in questions:
        others = [one for one in each.documents if one not in each.gold]
        if others and not any(contains_answer(one.text, each.answers) for one in others):
            contexts = [{"title": one.title, "text": one.text, "gold": False} for one in others]
            row = {"id": each.id, "question": each.question, "answers": each.answers, "ctxs": contexts}
            yield json.dumps(row, ensure_ascii=False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sets", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="+")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for name in given.names:
        lines = list(without_gold(load(find(name, given.sets))))
        write_lines(given.out / f"{name}_none.jsonl.gz", lines)
        print(f"{name}: {len(lines)} questions")


if __name__ == "__main__":
    main()
