"""Retrieval of questions as they are and with one typing error, with and without correction.

Searched are collections in BEIR's layout, or question sets as for `ragserve eval`. A file .txt has a text a
line, without labels: the odd lines are the namespace, the even ones are searched for, to count what is
changed in other languages."""

from __future__ import annotations

import asyncio
import random
import re
import statistics
import string
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from ragserve.bench import beir
from ragserve.bench.rerank import read
from ragserve.bench.retrieval import document_of
from ragserve.errors import InvalidRequest
from ragserve.measuring import report
from ragserve.measuring.ir_metrics import ndcg, recall
from ragserve.retrieval.spelling import SpellingCorrector
from ragserve.setting_groups.answering import Retrieval

if TYPE_CHECKING:
    from ragserve.retrieval.embedder import Embedder
    from ragserve_index import IndexStore

_K, _DEPTH = 5, 10
_BATCH = 256
_LARGE, _A_CHUNK, _ASKED = 1_000_000, 100, 300  # words, words of a chunk, questions
_WORD = re.compile(r"[^\W\d_]{4,}")


@dataclass(frozen=True, slots=True)
class _Form:
    """Questions as they are typed, and as they are searched for with correction."""

    typed: Mapping[str, str]
    corrected: Mapping[str, str]
    ms: list[float]

    @property
    def changed(self) -> int:
        return sum(self.typed[name] != self.corrected[name] for name in self.typed)


def run(
    out_dir: Path | None, *, quick: bool = False, data: Sequence[Path] = (), questions: int = 0
) -> dict[str, Any]:
    """Measure nDCG@10 and recall@5 by collection, form and search. ``questions``: spread over each
    collection; 0: all, or 20 with ``quick``. Raises InvalidRequest without ``data``."""
    from ragserve.retrieval.embedder import Embedder
    from ragserve_index import IndexStore

    if not data:
        raise InvalidRequest(
            "bench typing-errors needs collections to search.",
            hint="Give --data DIR, a folder in BEIR's layout, or --data FILE, a question set or lines.",
        )
    count = questions or (20 if quick else 0)
    embedder = Embedder()
    rows: list[dict[str, Any]] = []
    for path in data:
        collection = _lines(path, count) if path.suffix == ".txt" else read(path, count).collection
        with (
            tempfile.TemporaryDirectory(prefix="ragserve-bench-") as folder,
            IndexStore(Path(folder)) as store,
        ):
            _ingest(collection, embedder, store)
            rows += asyncio.run(_measured(collection, embedder, store))
    rows.append(asyncio.run(_large(embedder, 10_000 if quick else _LARGE)))
    return report.write(
        "typing-errors",
        {"depth": _DEPTH, "embedder": embedder.name, "questions": count or "all"},
        rows,
        out=out_dir / "typing-errors.json" if out_dir else None,
        note="typo: one random error (a letter dropped, doubled, replaced, or two exchanged; not the first) "
        "in one random word of four letters or more. changed: questions that correction changes; restored: "
        "those that become what they were before the error. ms: correction alone; read_s: CPU seconds for "
        "reading the namespace's words. nDCG: linear gain.",
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
    collection: beir.Collection, embedder: Embedder, store: IndexStore
) -> list[dict[str, Any]]:
    spelling = SpellingCorrector(store, embedder.words)
    try:
        await spelling.read("bench")
        plain = collection.queries
        wrong = {name: typing_error(text, random.Random(f"1 {name}")) for name, text in plain.items()}
        forms = {"plain": await _form(plain, spelling), "typo": await _form(wrong, spelling)}
    finally:
        await spelling.close()
    rows = []
    for name, form in forms.items():
        about = {"collection": collection.name, "documents": len(collection.documents)}
        about |= {"questions": len(plain), "typed": name}
        counted = {
            "changed": form.changed,
            "restored": sum(form.corrected[q] == plain[q] != form.typed[q] for q in plain),
            "ms_p50": round(report.percentile(form.ms, 50), 2),
            "ms_p90": round(report.percentile(form.ms, 90), 2),
        }
        if not collection.judged:
            rows.append(about | {"spelling": "on"} | counted)
            continue
        for switch, asked in {"off": form.typed, "on": form.corrected}.items():
            vectors = embedder.encode_queries(list(asked.values()))
            for retrieval in get_args(Retrieval):
                scores = _scores(collection, store, asked, vectors, retrieval)
                rows.append(
                    about
                    | {"retrieval": retrieval, "spelling": switch}
                    | scores
                    | (counted if switch == "on" else {})
                )
    return rows


async def _form(typed: Mapping[str, str], spelling: SpellingCorrector) -> _Form:
    corrected, ms = {}, []
    for name, text in typed.items():
        started = time.perf_counter()
        corrected[name] = (await spelling.correct("bench", [text])).texts[0]
        ms.append((time.perf_counter() - started) * 1e3)
    return _Form(typed, corrected, ms)


def _scores(
    collection: beir.Collection,
    store: IndexStore,
    asked: Mapping[str, str],
    vectors: Any,
    retrieval: Retrieval,
) -> dict[str, float]:
    found: list[tuple[float, float]] = []
    for row, (name, text) in enumerate(asked.items()):
        if retrieval == "dense":
            result = store.search("bench", vectors[row : row + 1], _DEPTH)
        else:
            vector = vectors[row] if retrieval == "hybrid" else None
            result = store.search_text("bench", text, _DEPTH, vector=vector)
        ranking = [hit.chunk.source for hit in result.hits[0]]
        judged = collection.judged[name]
        found.append((ndcg(ranking, judged, _DEPTH), recall(ranking, judged, _K)))
    return {
        "ndcg@10": round(statistics.fmean(n for n, _ in found), 4),
        "recall@5": round(statistics.fmean(r for _, r in found), 4),
    }
