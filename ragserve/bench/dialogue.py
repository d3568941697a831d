"""Retrieval for the last question of a dialogue: alone, with the turn before, and by ragserve's earlier rule.

The sets are the follow-ups over the example corpus, ingested as `ragserve ingest` does, and files in MTRAG's
layout, whose passages are one chunk each, a namespace for each collection. The rival is the earlier rule:
a question of fewer than six words is joined with the user's previous turn, others are searched for alone.
Rewriting is not measured: it depends on the serving model."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from ragserve.answering.follow_ups import variants
from ragserve.answering.prompt import Message
from ragserve.bench.retrieval import document_of
from ragserve.config import Settings, load
from ragserve.errors import InvalidRequest
from ragserve.eval.data import by_name
from ragserve.eval.ir_metrics import ndcg, recall
from ragserve.json_lines import json_lines
from ragserve.retrieval.retriever import Retriever
from ragserve.setting_groups.answering import Retrieval
from ragserve.verification import report

if TYPE_CHECKING:
    from ragserve_index import IndexStore
    from ragserve_index.types import Hit

_CORPUS = Path(__file__).resolve().parents[2] / "examples" / "corpus"
_DEPTH = 5
_QUICK = 3
_SHORT_WORDS = 6


@dataclass(frozen=True, slots=True)
class FollowUp:
    """The last question of a dialogue; ``judged``: passages that answer it, by the set's names."""

    namespace: str
    question: str
    history: tuple[Message, ...]
    judged: dict[str, int]
    standalone: str | None = None  # the question as a person would rewrite it


@dataclass(frozen=True, slots=True)
class DialogueSet:
    """Follow-ups with their passages in the store."""

    name: str
    follow_ups: list[FollowUp]
    name_of: Callable[[Hit], str]


Asked = tuple[str, Sequence[str]]
"""A question and its variants."""


def run(out_dir: Path | None, *, quick: bool = False, data: Sequence[Path] = ()) -> dict[str, Any]:
    """Measure recall@5 and nDCG@5. ``quick``: the first 3 dialogues of each set, over their own passages."""
    from ragserve.retrieval.embedder import Embedder
    from ragserve_index import IndexStore

    limit = _QUICK if quick else None
    given = {path: list(itertools.islice(_mtrag_rows(path), limit)) for path in by_name(data).values()}
    settings = load()
    embedder = Embedder.of(settings)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="ragserve-bench-") as folder:
        for place, path in enumerate([None, *data]):
            with IndexStore(Path(folder) / str(place)) as store:
                if path is None:
                    measured = _example_corpus(settings, store, embedder, limit)
                else:
                    measured = _mtrag(path, given[path], store, embedder)
                rows += asyncio.run(_rows(measured, Retriever(store, embedder)))
    return report.write(
        "dialogue",
        {"depth": _DEPTH, "embedder": embedder.name, "dialogues": f"first {limit}" if limit else "all"},
        rows,
        out=out_dir / "dialogue.json" if out_dir else None,
        note="joined if short: ragserve's earlier rule. context: the question, after the user's turn before "
        "it, and after the beginning of the answer to that. standalone: rewritten by hand.",
    )


async def _rows(measured: DialogueSet, retriever: Retriever) -> list[dict[str, Any]]:
    systems: dict[str, Callable[[FollowUp], Asked]] = {
        "alone": lambda one: (one.question, ()),
        "joined if short": _joined_if_short,
        "context": lambda one: (one.question, variants(one.question, one.history)),
    }
    if all(one.standalone for one in measured.follow_ups):
        systems["standalone"] = lambda one: (one.standalone or one.question, ())
    rows = []
    try:
        for retrieval in get_args(Retrieval):
            for system, ask in systems.items():
                scores = [
                    await _score(measured, retriever, one, ask(one), retrieval) for one in measured.follow_ups
                ]
                rows.append(
                    {
                        "set": measured.name,
                        "dialogues": len(scores),
                        "retrieval": retrieval,
                        "searched for": system,
                        "recall@5": round(statistics.fmean(r for r, _ in scores), 4),
                        "ndcg@5": round(statistics.fmean(n for _, n in scores), 4),
                    }
                )
    finally:
        await retriever.close()
    return rows


async def _score(
    measured: DialogueSet, retriever: Retriever, one: FollowUp, asked: Asked, retrieval: Retrieval
) -> tuple[float, float]:
    question, others = asked
    found = await retriever.retrieve(one.namespace, question, _DEPTH, variants=others, retrieval=retrieval)
    ranking = [measured.name_of(hit) for hit in found.hits]
    return recall(ranking, one.judged, _DEPTH), ndcg(ranking, one.judged, _DEPTH)


def _joined_if_short(one: FollowUp) -> Asked:
    before = [message.content for message in one.history if message.role == "user"]
    if before and len(one.question.split()) < _SHORT_WORDS:
        return f"{before[-1]}\n{one.question}", ()
    return one.question, ()


def _example_corpus(settings: Settings, store: IndexStore, embedder: Any, limit: int | None) -> DialogueSet:
    """Ingest the corpus; a passage is judged right if it is of the country and has an answer."""
    from ragserve.ingest.ingestor import Ingestor, PathOptions
    from ragserve.ingest.prune import every_document

    rows = [row for _, row in itertools.islice(json_lines(_CORPUS / "follow_ups.jsonl"), limit)]
    asked = {_stem(row["country"]) for row in rows}
    files = [str(path) for path in sorted((_CORPUS / "files").iterdir()) if not limit or path.stem in asked]
    ingestor = Ingestor(settings.model_copy(update={"data_dir": store.data_dir}), store, embedder)
    job = ingestor.submit_paths("corpus", files, PathOptions())
    ingestor.run(job.job_id)
    chunks = {
        Path(document.source).stem: store.document_chunks("corpus", document.doc_id)
        for document in every_document(store, "corpus")
    }
    follow_ups = []
    for row in rows:
        judged = {
            str(chunk.chunk_id): 1
            for chunk in chunks[_stem(row["country"])]
            if any(answer.casefold() in chunk.text.casefold() for answer in row["answers"])
        }
        history = tuple(Message(turn["role"], turn["content"]) for turn in row["history"])
        follow_ups.append(FollowUp("corpus", row["question"], history, judged, row["standalone"]))
    return DialogueSet("examples/corpus", follow_ups, lambda hit: str(hit.chunk.chunk_id))


def _stem(country: str) -> str:
    return country.lower().replace(" ", "-")


def _mtrag(path: Path, rows: list[dict[str, Any]], store: IndexStore, embedder: Any) -> DialogueSet:
    """Index the passages of all dialogues, and take the dialogues whose question has an earlier one and
    passages."""
    for namespace in sorted({str(row["Collection"]) for row in rows}):
        passages = {
            str(passage["document_id"]): str(passage["text"])
            for row in rows
            if row["Collection"] == namespace
            for passage in row["contexts"]
        }
        vectors = embedder.encode(list(passages.values()))
        store.ensure_namespace(namespace, embedder=embedder.name, dim=embedder.dim)
        store.replace_documents(
            namespace,
            [(*document_of(*item), vectors[i : i + 1]) for i, item in enumerate(passages.items())],
        )
    follow_ups = []
    for row in rows:
        *before, last = row["input"]
        history = tuple(Message("user" if m["speaker"] == "user" else "assistant", m["text"]) for m in before)
        judged = {str(passage["document_id"]): 1 for passage in row["contexts"]}
        if history and judged:
            follow_ups.append(FollowUp(str(row["Collection"]), last["text"], history, judged))
    if not follow_ups:
        raise InvalidRequest(f"{path}: no dialogue has an earlier turn and passages.")
    return DialogueSet(path.name.split(".")[0], follow_ups, lambda hit: hit.chunk.source)


def _mtrag_rows(path: Path) -> Iterator[dict[str, Any]]:
    for number, row in json_lines(path):
        if not {"Collection", "contexts", "input"} <= row.keys():
            raise InvalidRequest(
                f"{path}, line {number}: no dialogue in MTRAG's layout.",
                hint="A line has Collection, contexts ({document_id, text}) and input ({speaker, text}).",
            )
        yield row
