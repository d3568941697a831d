"""Search by words where words are not separated: how Chinese, Japanese and Thai texts are best cut.

Each paragraph of a question-answering set is a chunk, and each question looks for its own one by BM25 (FTS5,
as small namespaces are searched). The cutters:

* ``runs``: what stands between blanks and punctuation is a word, as before;
* ``1``, ``2``, ``3``, ``1+2``, ``2+3``: overlapping characters, pairs, triples;
* ``jieba`` (rjieba), ``unidic`` (fugashi, unidic-lite), ``newmm`` (pythainlp), ``icu`` (icu4py):
  dictionaries, where they are installed;
* ``ragserve``: `ragserve_index.word_cutting` as it is.

    python -m benchmarks.unspaced_search zh=xquad.zh.json ja=jsquad.json th=iapp.jsonl --out found.json

A file has SQuAD's format, or a line for each question with ``question`` and ``context``. Takes 3 minutes for
1,000 paragraphs, 1,200 questions and all cutters."""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import sqlite3
import time
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from ragserve.verification import report
from ragserve_index.lexical_search import MAX_TERMS
from ragserve_index.word_cutting import SIGNS, _folded, words

NOTE = "Shares in %, with 95 % intervals (Wilson; of nDCG by the normal distribution); one core."
Cut = Callable[[str], list[str]]
_RUN = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]+"
)
_DEPTH = 10
_LANGUAGE = {"jieba": "zh", "unidic": "ja", "newmm": "th"}


def grams(n: int, run: str) -> list[str]:
    return [run[at : at + n] for at in range(max(1, len(run) - n + 1))]


def of_runs(cut: Cut, *, fold_first: bool) -> Cut:
    """Cut runs by ``cut``, and all else as before."""

    def cut_all(text: str) -> list[str]:
        plain = unicodedata.normalize("NFKC", text)
        if fold_first:
            plain = _folded(plain)
        found = words(_RUN.sub("\n", plain))
        for run in _RUN.findall(plain):
            found += [word for part in cut(run) for word in _folded(part).split()]
        return found

    return cut_all


def cutters(language: str) -> dict[str, Cut]:
    found: dict[str, Cut] = {
        "runs": of_runs(lambda run: [run[:64]], fold_first=True),
        **{str(n): of_runs(partial(grams, n), fold_first=True) for n in (1, 2, 3)},
        "1+2": of_runs(lambda run: [*run, *grams(2, run)], fold_first=True),
        "2+3": of_runs(lambda run: [*grams(2, run), *grams(3, run)], fold_first=True),
    }
    for name, make in (("jieba", _jieba), ("unidic", _unidic), ("newmm", _newmm), ("icu", _icu)):
        if _LANGUAGE.get(name, language) != language:
            continue
        try:
            found[name] = of_runs(make(), fold_first=False)
        except ImportError:
            print(f"{name} is not installed")
    return {**found, "ragserve": words}


def _jieba() -> Cut:
    import rjieba

    return lambda run: list(rjieba.cut_for_search(run))


def _unidic() -> Cut:
    import fugashi

    tagger = fugashi.Tagger()
    return lambda run: [word.surface for word in tagger(run)]


def _newmm() -> Cut:
    from pythainlp.tokenize import word_tokenize

    return lambda run: word_tokenize(run, engine="newmm", keep_whitespace=False)


def _icu() -> Cut:
    from icu4py.breakers import WordBreaker

    return lambda run: list(WordBreaker(run, "th"))


def questions_of(path: Path) -> tuple[list[str], list[tuple[str, int]]]:
    """Paragraphs, and questions with the place of theirs."""
    places: dict[str, int] = {}
    asked: list[tuple[str, int]] = []
    text = path.read_text(encoding="utf-8-sig")
    rows: Iterable[tuple[str, str]]
    if path.suffix == ".jsonl":
        rows = ((row["context"], row["question"]) for row in map(json.loads, text.splitlines()))
    else:
        rows = (
            (paragraph["context"], question["question"])
            for article in json.loads(text)["data"]
            for paragraph in article["paragraphs"]
            for question in paragraph["qas"]
        )
    for context, question in rows:
        asked.append((question, places.setdefault(context.strip("\ufeff"), len(places))))
    return list(places), asked


def index_of(cut: Cut, paragraphs: Sequence[str]) -> sqlite3.Connection:
    index = sqlite3.connect(":memory:")
    index.execute(
        f"CREATE VIRTUAL TABLE t USING fts5(text, content='', tokenize=\"ascii tokenchars '{SIGNS}'\")"
    )
    index.executemany(
        "INSERT INTO t (rowid, text) VALUES (?, ?)",
        ((at, " ".join(cut(text))) for at, text in enumerate(paragraphs)),
    )
    index.execute("CREATE VIRTUAL TABLE v USING fts5vocab(t, row)")
    return index


def ranks(cut: Cut, index: sqlite3.Connection, asked: Sequence[tuple[str, int]]) -> list[int]:
    """Rank of each question's paragraph from 0; `_DEPTH` where it is not among the best."""
    counts = dict(index.execute("SELECT term, doc FROM v"))
    found = []
    for question, right in asked:
        known = sorted((counts[word], word) for word in dict.fromkeys(cut(question)) if word in counts)[
            :MAX_TERMS
        ]
        match = " OR ".join(f'"{word}"' for _, word in known)
        query = "SELECT rowid FROM t WHERE t MATCH ? ORDER BY rank LIMIT ?"
        best = index.execute(query, (match, _DEPTH)).fetchall() if match else []
        found.append(next((rank for rank, (row,) in enumerate(best) if row == right), _DEPTH))
    return found


def summary(found: Sequence[int]) -> dict[str, Any]:
    gains = [1 / math.log2(rank + 2) if rank < _DEPTH else 0.0 for rank in found]
    return {
        "recall_at_1": _share([rank < 1 for rank in found]),
        "recall_at_5": _share([rank < 5 for rank in found]),
        "recall_at_10": _share([rank < _DEPTH for rank in found]),
        "ndcg_at_10": _mean(gains),
    }


def _share(values: Sequence[bool]) -> list[float]:
    """A share with its 95 % interval (Wilson)."""
    n, z = len(values), 1.96
    share = sum(values) / n
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return [round(value, 4) for value in (share, middle - half, middle + half)]


def _mean(values: Sequence[float]) -> list[float]:
    n = len(values)
    mean = sum(values) / n
    half = 1.96 * math.sqrt(sum((value - mean) ** 2 for value in values) / max(1, n - 1) / n)
    return [round(value, 4) for value in (mean, mean - half, mean + half)]


def measured(language: str, path: Path, limit: int) -> dict[str, Any]:
    paragraphs, asked = questions_of(path)
    asked = random.Random(0).sample(asked, min(limit, len(asked)))
    characters = sum(map(len, paragraphs))
    out: dict[str, Any] = {"paragraphs": len(paragraphs), "questions": len(asked), "characters": characters}
    for name, cut in cutters(language).items():
        cut(paragraphs[0])
        started = time.process_time()
        n_words = sum(len(cut(text)) for text in paragraphs)
        seconds = time.process_time() - started
        index = index_of(cut, paragraphs)
        pages = index.execute("SELECT sum(length(block)) FROM t_data").fetchone()[0]
        started = time.process_time()
        found = ranks(cut, index, asked)
        search = time.process_time() - started
        out[name] = {
            **summary(found),
            "words": n_words,
            "characters_per_s": round(characters / seconds),
            "index_bytes_per_character": round(pages / characters, 2),
            "ms_per_search": round(1000 * search / len(asked), 3),
        }
        shown = " ".join(f"{key}={value[0]:.3f}" for key, value in islice(out[name].items(), 4))
        print(
            f"{language} {path.name} {name}: {shown} {out[name]['characters_per_s']:,} characters/s",
            flush=True,
        )
    return out


def rows_of(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each set and cutter; shares in %, with their 95 % intervals."""
    return [
        {
            "set": name,
            "paragraphs": measured["paragraphs"],
            "questions": measured["questions"],
            "cut into": cutter,
            "recall at 1": _percent(measured[cutter]["recall_at_1"]),
            "recall at 10": _percent(measured[cutter]["recall_at_10"]),
            "nDCG at 10": _percent(measured[cutter]["ndcg_at_10"]),
            "index bytes a character": measured[cutter]["index_bytes_per_character"],
            "ms a search": measured[cutter]["ms_per_search"],
        }
        for name, measured in found.items()
        for cutter in measured
        if isinstance(measured[cutter], dict)
    ]


def _percent(value: Sequence[float]) -> str:
    share, low, high = (100 * each for each in value)
    return f"{share:.1f} ({low:.1f} to {high:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sets", nargs="+", metavar="LANGUAGE=FILE")
    parser.add_argument("--limit", type=int, default=1200, help="most questions of a set, drawn with a seed")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = {}
    for each in args.sets:
        language, _, path = each.partition("=")
        found[f"{language}, {Path(path).stem}"] = measured(language, Path(path), args.limit)
    workload = {"sets": ", ".join(found), "most questions of a set": args.limit}
    report.write("unspaced-search", workload, rows_of(found), out=args.out, note=NOTE)


if __name__ == "__main__":
    main()
