"""Say which training data repeats an evaluation set: by question, and by runs of 13 words.

    python -m benchmarks.model_recipe.overlap PACKED EVAL_DIR [--out FILE]

EVAL_DIR holds a folder for each set; files with "train" in their name and the folders in `NOT_SETS` are no
evaluation sets. The example corpus with its questions counts as a set. The data command leaves out what this
finds, so the report should show none; it exits with 1 otherwise."""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import zlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.places import CORPUS

RUN = 13
NOT_SETS = {"wiki", "retrieval_traces_psirag"}
QUESTION_KEYS = {"question", "query"}
_POWERS = np.array([pow(6364136223846793005, i, 2**64) for i in range(RUN)], dtype=np.uint64)


@lru_cache(maxsize=500_000)
def _hash(word: str) -> int:
    return zlib.crc32(word.encode()) * 0x9E3779B97F4A7C15 % 2**64


def words(text: str) -> list[str]:
    """Lower-case words of letters and digits."""
    return "".join(c if c.isalnum() else " " for c in text.lower()).split()


def runs(text: str) -> np.ndarray:
    """Hashes (uint64) of all runs of 13 words."""
    hashes = np.array([_hash(word) for word in words(text)], dtype=np.uint64)
    if len(hashes) < RUN:
        return np.empty(0, dtype=np.uint64)
    return np.lib.stride_tricks.sliding_window_view(hashes, RUN) @ _POWERS


class Evaluated:
    """Questions and runs of words of evaluation sets."""

    def __init__(self, sets: Iterable[tuple[str, Iterable[Any]]]) -> None:
        self.questions: dict[str, str] = {}
        self.sizes: dict[str, dict[str, int]] = {}
        found = []
        for name, records in sets:
            texts: list[str] = []
            questions = {" ".join(words(q)) for record in records for q in _walk(record, texts)}
            hashes = np.unique(np.concatenate([np.empty(0, np.uint64), *map(runs, texts)]))
            self.questions.update(dict.fromkeys(questions, name))
            self.sizes[name] = {"questions": len(questions), "runs": len(hashes)}
            found.append((name, hashes))
        self._names = [name for name, _ in found]
        self._by_set = [hashes for _, hashes in found]
        self._all = np.unique(np.concatenate([np.empty(0, np.uint64), *self._by_set]))

    def asked(self, question: str) -> str | None:
        """Return the set that has this question, or None."""
        return self.questions.get(" ".join(words(question)))

    def repeats(self, text: str) -> bool:
        """Tell whether the text shares a run of words with any set."""
        hashes = runs(text)
        at = np.searchsorted(self._all, hashes)
        return (
            bool((self._all[np.minimum(at, len(self._all) - 1)] == hashes).any()) if len(self._all) else False
        )

    def repeated_sets(self, text: str) -> list[str]:
        """Return the sets that share a run of words with the text."""
        if not self.repeats(text):  # most; to look into each set takes thousands of times as long
            return []
        hashes = runs(text)
        return [n for n, own in zip(self._names, self._by_set, strict=True) if np.isin(hashes, own).any()]


def _walk(value: Any, texts: list[str], key: str = "") -> Iterator[str]:
    """Yield the questions of a record, and collect all its strings in ``texts``."""
    if isinstance(value, str):
        texts.append(value)
        if key in QUESTION_KEYS:
            yield value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _walk(inner, texts, name)
    elif isinstance(value, list):
        if all(isinstance(x, str) for x in value):
            texts.append(" ".join(value))
        for inner in value:
            yield from _walk(inner, texts, key)


def evaluation_sets(folder: Path) -> Iterator[tuple[str, list[Any]]]:
    """Names and records of all sets, and of the example corpus."""
    for place in sorted(p for p in folder.iterdir() if p.is_dir() and p.name not in NOT_SETS):
        for path in sorted(place.rglob("*")):
            if "train" in path.name or "corpus" in path.name or not path.is_file():
                continue
            records = _records(path)
            if records:
                yield f"{place.name}/{path.name.split('.')[0]}", records
    profiles = [p.read_text(encoding="utf-8", errors="ignore") for p in sorted((CORPUS / "files").iterdir())]
    asked = [json.loads(line) for line in (CORPUS / "questions.jsonl").read_text("utf-8").splitlines()]
    yield "example corpus", [*profiles, *asked]


def _records(path: Path) -> list[Any]:
    suffixes = path.suffixes
    if not {".json", ".jsonl"} & set(suffixes):
        return []
    raw = gzip.decompress(path.read_bytes()) if suffixes[-1] == ".gz" else path.read_bytes()
    lines = raw.decode("utf-8").splitlines()
    return [json.loads(raw)] if ".json" in suffixes else [json.loads(line) for line in lines if line.strip()]


def report(packed: Path, evaluated: Evaluated) -> dict[str, Any]:
    """Count the questions and texts of each training file that are in a set, with examples."""
    from benchmarks.model_recipe.corpus import TEXTS, rows_of_all

    out: dict[str, Any] = {}
    for name, texts_of in TEXTS.items():
        questions = same = texts = repeated = 0
        where: dict[str, int] = {}
        for row in rows_of_all(packed, name):
            asked, passages = texts_of(row)
            questions, texts = questions + len(asked), texts + len(passages)
            same += sum(evaluated.asked(q) is not None for q in asked)
            for text in passages:
                sets = evaluated.repeated_sets(text) if evaluated.repeats(text) else []
                repeated += bool(sets)
                for each in sets:
                    where[each] = where.get(each, 0) + 1
        out[name] = {"questions": questions, "in a set": same, "texts": texts, "with a common run": repeated}
        if where:
            out[name]["sets"] = where
    return out


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("packed", type=Path)
    parser.add_argument("sets", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "overlap.json")
    options = parser.parse_args()
    evaluated = Evaluated(evaluation_sets(options.sets))
    training = report(options.packed, evaluated)
    result = {"words in a run": RUN, "training": training, "evaluation": evaluated.sizes}
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result["training"], indent=1))
    return int(any(each["in a set"] or each["with a common run"] for each in training.values()))


if __name__ == "__main__":
    sys.exit(main())
