"""Retrieval of questions as they are and with one typing error, with and without correction.

    python -m benchmarks.typing_errors COLLECTION ... [--questions N] [--out FOLDER] [--quick]

Searched are collections in BEIR's layout, or question sets as for `ragserve eval`. Each is asked the
questions of the others, too: what is corrected in them was no error. A file .txt has a text a line, without
labels: the odd lines are the namespace, the even ones are searched for, to count what is changed in other
languages."""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import statistics
import string
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from benchmarks.lib.places import RESULTS
from ragserve.bench import beir
from ragserve.bench.rerank import read
from ragserve.bench.retrieval import document_of
from ragserve.eval.ir_metrics import ndcg, recall
from ragserve.retrieval.spelling import Corrected, SpellingCorrector
from ragserve.setting_groups.answering import Retrieval
from ragserve.verification import report

if TYPE_CHECKING:
    from ragserve.retrieval.embedder import Embedder
    from ragserve_index import IndexStore
    from ragserve_index.types import Hit

_K, _DEPTH = 5, 10
_BATCH = 256
_LARGE, _A_CHUNK, _ASKED = 1_000_000, 100, 300  # words, words of a chunk, questions
_WORD = re.compile(r"[^\W\d_]{4,}")


@dataclass(frozen=True, slots=True)
class _Form:
    """Questions as they are typed and as they are corrected, by name, and milliseconds."""

    typed: Mapping[str, str]
    found: Mapping[str, Corrected]
    ms: list[float]

    @property
    def corrected(self) -> dict[str, str]:
        """The questions as they are searched for."""
        return {name: found.texts[0] for name, found in self.found.items()}

    @property
    def changed(self) -> int:
        return sum(bool(found.corrections) for found in self.found.values())


def run(
    out_dir: Path | None, *, quick: bool = False, data: Sequence[Path], questions: int = 0
) -> dict[str, Any]:
    """Measure nDCG@10 and recall@5 by collection, form and search. ``questions``: spread over each
    collection; 0: all, or 20 with ``quick``."""
    from ragserve.retrieval.embedder import Embedder
    from ragserve_index import IndexStore

    count = questions or (20 if quick else 0)
    embedder = Embedder()
    rows: list[dict[str, Any]] = []
    collections = [
        _lines(path, count) if path.suffix == ".txt" else read(path, count).collection for path in data
    ]
    for collection in collections:
        others = {
            f"{other.name} {name}": text
            for other in collections
            if other is not collection and other.judged
            for name, text in other.queries.items()
        }
        with (
            tempfile.TemporaryDirectory(prefix="ragserve-bench-") as folder,
            IndexStore(Path(folder)) as store,
        ):
            _ingest(collection, embedder, store)
            rows += asyncio.run(_measured(collection, embedder, store, others))
    rows.append(asyncio.run(_large(embedder, 10_000 if quick else _LARGE)))
    return report.write(
        "typing-errors",
        {"depth": _DEPTH, "embedder": embedder.name, "questions": count or "all"},
        rows,
        out=out_dir / "typing-errors.json" if out_dir else None,
        note="typo: one random error (a letter dropped, doubled, replaced, or two exchanged; not the first) "
        "in one random word of four letters or more; others': questions of the other collections. "
        "changed: questions that correction changes; restored: those that become what they were before the "
        "error; read, read_restored: the same of what the model reads, whose words are in the first "
        f"{_K} passages. ms: correction alone; read_s: CPU seconds for reading the namespace's words. nDCG: "
        "linear gain.",
    )


async def _large(embedder: Embedder, n_words: int) -> dict[str, Any]:
    """Correct questions about a namespace of many words, each of random letters."""
    from ragserve_index import IndexStore

    rng = random.Random(1)
    words = ["".join(rng.choices(string.ascii_lowercase, k=rng.randrange(5, 13))) for _ in range(n_words)]
    texts = [" ".join(words[start : start + _A_CHUNK]) for start in range(0, n_words, _A_CHUNK)]
    collection = beir.Collection(
        f"{n_words:,} words", {str(i): ("", text) for i, text in enumerate(texts)}, {}, {}
    )
    wrong = {str(i): f"what is the name of {typing_error(rng.choice(words), rng)}" for i in range(_ASKED)}
    with tempfile.TemporaryDirectory(prefix="ragserve-bench-") as folder, IndexStore(Path(folder)) as store:
        _ingest(collection, embedder, store)
        spelling = SpellingCorrector(store, embedder.words)
        try:
            started = time.process_time()
            await spelling.read("bench")
            read_s = time.process_time() - started
            form = await _form(wrong, spelling)
        finally:
            await spelling.close()
    return {
        "collection": collection.name,
        "documents": len(texts),
        "questions": _ASKED,
        "typed": "typo",
        "spelling": "on",
        "changed": form.changed,
        "ms_p50": round(report.percentile(form.ms, 50), 2),
        "ms_p90": round(report.percentile(form.ms, 90), 2),
        "read_s": round(read_s, 1),
    }


def typing_error(text: str, rng: random.Random) -> str:
    """Make one error in one word of four letters or more, not in its first letter."""
    words = list(_WORD.finditer(text))
    if not words:
        return text
    found = rng.choice(words)
    word = found.group()
    at = rng.randrange(1, len(word))
    wrong = [
        word[:at] + word[at + 1 :],
        word[:at] + word[at] + word[at:],
        word[:at] + rng.choice(string.ascii_lowercase.replace(word[at].lower(), "")) + word[at + 1 :],
    ]
    if at + 1 < len(word) and word[at] != word[at + 1]:
        wrong.append(word[:at] + word[at + 1] + word[at] + word[at + 2 :])
    return text[: found.start()] + rng.choice(wrong) + text[found.end() :]


def _lines(path: Path, count: int) -> beir.Collection:
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    documents = {str(number): ("", line) for number, line in enumerate(lines[::2])}
    queries = {str(number): line for number, line in enumerate(lines[1::2][: count or None])}
    return beir.Collection(path.stem, documents, queries, {})


def _ingest(collection: beir.Collection, embedder: Embedder, store: IndexStore) -> None:
    store.ensure_namespace("bench", embedder=embedder.name, dim=embedder.dim)
    names = list(collection.documents)
    for start in range(0, len(names), _BATCH):
        texts = [collection.passage(name) for name in names[start : start + _BATCH]]
        # nothing is searched for in a set without judgements
        vectors = embedder.encode(texts if collection.judged else texts[:1])
        documents = [document_of(*each) for each in zip(names[start : start + _BATCH], texts, strict=True)]
        store.replace_documents(
            "bench",
            [(*each, vectors[[i if collection.judged else 0]]) for i, each in enumerate(documents)],
        )


async def _measured(
    collection: beir.Collection, embedder: Embedder, store: IndexStore, others: Mapping[str, str]
) -> list[dict[str, Any]]:
    spelling = SpellingCorrector(store, embedder.words)
    try:
        await spelling.read("bench")
        plain = collection.queries
        wrong = {name: typing_error(text, random.Random(f"1 {name}")) for name, text in plain.items()}
        forms = {"plain": await _form(plain, spelling), "typo": await _form(wrong, spelling)}
        if collection.judged and others:
            forms["others'"] = await _form(others, spelling)
    finally:
        await spelling.close()
    rows = []
    for name, form in forms.items():
        about = {"collection": collection.name, "documents": len(collection.documents)}
        about |= {"questions": len(form.typed), "typed": name}
        corrected = form.corrected
        counted = {
            "changed": form.changed,
            "restored": sum(corrected[q] == plain.get(q) != form.typed[q] for q in corrected),
            "ms_p50": round(report.percentile(form.ms, 50), 2),
            "ms_p90": round(report.percentile(form.ms, 90), 2),
        }
        if not collection.judged:
            rows.append(about | {"spelling": "on"} | counted)
            continue
        for switch, asked in {"off": form.typed, "on": corrected}.items():
            if form.typed is others and switch == "off":
                continue
            vectors = embedder.encode_queries(list(asked.values()))
            for retrieval in get_args(Retrieval):
                hits = _hits(store, asked, vectors, retrieval)
                row: dict[str, Any] = about | {"retrieval": retrieval, "spelling": switch}
                if form.typed is not others:
                    row |= _scores(collection, hits)
                if switch == "on":
                    row |= counted | _read(form, plain, hits)
                rows.append(row)
    return rows


def _read(form: _Form, plain: Mapping[str, str], hits: Mapping[str, Sequence[Hit]]) -> dict[str, int]:
    """How many questions the model reads as others than were typed, and how many of them as they were before
    the error."""
    read: dict[str, str] = {}
    for name, found in form.found.items():
        passages = [f"{hit.chunk.title} {hit.chunk.text}" for hit in hits[name][:_K]]
        read[name] = found.found_in(passages).texts[0]
    changed = [name for name, text in read.items() if text != form.typed[name]]
    return {"read": len(changed), "read_restored": sum(read[name] == plain.get(name) for name in changed)}


async def _form(typed: Mapping[str, str], spelling: SpellingCorrector) -> _Form:
    found, ms = {}, []
    for name, text in typed.items():
        started = time.perf_counter()
        found[name] = await spelling.correct("bench", [text])
        ms.append((time.perf_counter() - started) * 1e3)
    return _Form(typed, found, ms)


def _hits(
    store: IndexStore, asked: Mapping[str, str], vectors: Any, retrieval: Retrieval
) -> dict[str, Sequence[Hit]]:
    """What is found for each question, best first."""
    hits: dict[str, Sequence[Hit]] = {}
    for row, (name, text) in enumerate(asked.items()):
        if retrieval == "dense":
            result = store.search("bench", vectors[row : row + 1], _DEPTH)
        else:
            vector = vectors[row] if retrieval == "hybrid" else None
            result = store.search_text("bench", text, _DEPTH, vector=vector)
        hits[name] = result.hits[0]
    return hits


def _scores(collection: beir.Collection, hits: Mapping[str, Sequence[Hit]]) -> dict[str, float]:
    found: list[tuple[float, float]] = []
    for name, some in hits.items():
        ranking = [hit.chunk.source for hit in some]
        judged = collection.judged[name]
        found.append((ndcg(ranking, judged, _DEPTH), recall(ranking, judged, _K)))
    return {
        "ndcg@10": round(statistics.fmean(n for n, _ in found), 4),
        "recall@5": round(statistics.fmean(r for _, r in found), 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "data", type=Path, nargs="+", help="a folder in BEIR's layout, a question set, or lines (.txt)"
    )
    parser.add_argument("--questions", type=int, default=0, help="spread over each collection; 0: all")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON")
    parser.add_argument("--quick", action="store_true", help="small sizes; the figures prove nothing")
    given = parser.parse_args()
    run(given.out, quick=given.quick, data=given.data, questions=given.questions)
    return 0


if __name__ == "__main__":
    sys.exit(main())
