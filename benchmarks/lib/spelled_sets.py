"""Copies of question sets with their questions in lower case, in upper case and with one typing error.

    python -m benchmarks.lib.spelled_sets OUT_DIR SETS_DIR [--only qed10,squad10,2wikimqa] [--limit 100]

Writes OUT_DIR/SET_SPELLING.jsonl, for `ragserve eval` and `benchmarks/gpu_eval.py`: SPELLING is lower, upper
or typo, as in `ragserve bench selection`. Every copy has the same questions, those that eval asks of SET with
the same limit."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ragserve.bench.selection import SPELLINGS
from ragserve.eval.data import find, set_name, spread
from ragserve.json_lines import json_lines

NAMES = {"lower case": "lower", "upper case": "upper", "one typo": "typo"}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("sets", type=Path)
    parser.add_argument("--only", default="qed10,squad10,2wikimqa")
    parser.add_argument("--limit", type=int, default=100)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for path in [find(name, given.sets) for name in given.only.split(",")]:
        rows = spread([row for _, row in json_lines(path)], given.limit)
        for spelling, name in NAMES.items():
            spell = SPELLINGS[spelling]
            lines = [json.dumps({**row, "question": spell(row["question"])}) + "\n" for row in rows]
            place = given.out / f"{set_name(path)}_{name}.jsonl"
            place.write_text("".join(lines), encoding="utf-8")
            print(place)
    return 0


if __name__ == "__main__":
    sys.exit(main())
