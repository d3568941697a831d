"""Ask a running server every question of a set and score the answers.

``given`` sends each row's documents in order, which measures reading. ``retrieved`` ingests all documents of
the set into a fresh namespace and asks against it, which adds retrieval; each lost answer is then attributed
to retrieval or to reading."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, cast

from ragserve.answering.auto import AUTO
from ragserve.answering.results import Answer, RetrievedPassage
from ragserve.best_passages import NOT_COMPOSED
from ragserve.client import Client, QueryArguments, TextDocument
from ragserve.config import StrategyName
from ragserve.errors import NotFound, RagserveError
from ragserve.eval.data import GivenPassage, Question, distinct_passages
from ragserve.strategy_spec import FORCE, StrategySpec
from ragserve.verification.metrics import contains_answer, exact_match, is_refusal, token_f1

_SEED = 0
_INGEST_CHARS = 1_000_000  # per request, below every sensible body limit
_INGEST_TEXTS = 200
Progress = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a question. ``strategy`` and ``system`` None: the server's defaults; ``k`` matters only
    if passages are retrieved."""

    strategy: str | None = None
    k: int | None = 5
    max_new_tokens: int | None = 24
    concurrency: int = 4
    strategy_options: Mapping[str, Any] = field(default_factory=dict)
    decode: Mapping[str, Any] | None = None
    name: str | None = None
    session_budget: int | None = None
    system: str | None = None

    @property
    def label(self) -> str | None:
        """``name``, or the strategy with its options, as written on the command line."""
        return self.name or (self.strategy and StrategySpec(self.strategy, self.strategy_options).label)

    @property
    def sent(self) -> dict[str, Any] | None:
        """The options to send: composed strategies are forced, because what is being evaluated is not
        verified yet."""
        if self.is_composed:
            return {**self.strategy_options, FORCE: True}
        return dict(self.strategy_options) or None

    @property
    def is_composed(self) -> bool:
        """Whether the strategy composes contexts from cached documents."""
        return self.strategy is not None and self.strategy not in (*NOT_COMPOSED, AUTO)

    @property
    def fields(self) -> QueryArguments:
        """The fields of a query, decoded greedily; the server chooses what is None."""
        return {
            "strategy": cast(StrategyName | None, self.strategy),
            "strategy_options": self.sent,
            "max_new_tokens": self.max_new_tokens,
            "temperature": 0.0,
            "seed": _SEED,
            "system": self.system,
        }


@dataclass(frozen=True, slots=True)
class AnswerOutcome:
    """The answer to one question, or its failure. ``found``: a retrieved passage of a gold document holds the
    answer; None without retrieval."""

    question: Question
    answer: str
    em: float = 0.0
    f1: float = 0.0
    contains: bool = False
    refused: bool = False
    ttft_ms: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    completion_tokens: int = 0
    documents_kept: int = 0
    documents: int = 0
    error: str = ""
    found: bool | None = None
    gold_recall: float | None = None
    passages: tuple[RetrievedPassage, ...] = field(default=(), repr=False)

    def record(self) -> dict[str, Any]:
        """Convert to a line of the per-question file."""
        return {
            "id": self.question.id,
            "kind": self.question.kind,
            "question": self.question.question,
            "answers": list(self.question.answers),
            "answer": self.answer,
            "em": self.em,
            "f1": round(self.f1, 4),
            "contains": self.contains,
            "refused": self.refused,
            "ttft_ms": self.ttft_ms,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "computed_tokens": self.computed_tokens,
            "documents_kept": self.documents_kept,
            "found": self.found,
            "gold_recall": self.gold_recall,
            "retrieved": [passage.source for passage in self.passages] or None,
            "error": self.error or None,
        }


def ask_given(
    client: Client, questions: Sequence[Question], options: Options, *, gold: bool = False, progress: Progress
) -> list[AnswerOutcome]:
    """Ask each question with its own documents in order; with ``gold``, only with those that hold the
    answer."""

    def ask(question: Question) -> AnswerOutcome:
        given = question.gold if gold else question.documents
        documents = [{"title": each.title, "text": each.text} for each in given]
        return _ask(client, question, options, documents=documents, documents_overflow="drop")

    return _each(questions, ask, options, progress)


def ask_retrieved(
    client: Client, namespace: str, questions: Sequence[Question], options: Options, *, progress: Progress
) -> list[AnswerOutcome]:
    """Ask each question against a namespace that :func:`ingested` filled."""

    def ask(question: Question) -> AnswerOutcome:
        try:
            passages = tuple(client.retrieve(question.question, namespace=namespace, k=options.k).results)
        except RagserveError as error:
            return failed(question, error)
        return _ask(client, question, options, passages=passages, namespace=namespace, k=options.k)

    return _each(questions, ask, options, progress)


@contextmanager
def ingested(
    client: Client, questions: Sequence[Question], *, on_progress: Callable[[int, int], None]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Ingest all documents of the questions into a fresh namespace, dropped at the end of the block. Yields
    its name and the ingestion's figures.

    Raises whatever made ingestion fail: a set that is not wholly indexed is not measured."""
    namespace = f"eval-{uuid.uuid4().hex[:12]}"
    passages = distinct_passages(questions)
    started = time.perf_counter()
    done = 0
    try:
        for batch in _batches(passages):
            texts: list[TextDocument] = [{"name": p.key, "title": p.title, "text": p.text} for p in batch]
            job = client.wait(client.ingest_texts(texts, namespace=namespace), timeout_s=math.inf)
            if failed := job.counts.get("failed"):
                raise RagserveError(
                    f"{failed} of {len(batch)} documents were not indexed: job {job.job_id}.",
                    hint="See ragserve's log and the job.",
                )
            done += len(batch)
            on_progress(done, len(passages))
        yield namespace, {"documents": len(passages), "ingest_s": round(time.perf_counter() - started, 1)}
    finally:
        with suppress(NotFound):  # if nothing was indexed
            client.drop_namespace(namespace)


def summary(outcomes: Sequence[AnswerOutcome]) -> dict[str, Any]:
    """Average over a set: exact match, F1, answers that contain an accepted one and refusals in percent,
    tokens and milliseconds per question. Failures count as wrong."""
    from ragserve.verification.report import percentile

    n = len(outcomes)
    answered = [o for o in outcomes if not o.error]
    ttft = [o.ttft_ms for o in answered if o.ttft_ms is not None]
    tokens = ("prompt_tokens", "cached_tokens", "computed_tokens", "completion_tokens")
    return {
        "n": n,
        "em": round(100 * sum(o.em for o in outcomes) / n, 2),
        "f1": round(100 * sum(o.f1 for o in outcomes) / n, 2),
        "contains": round(100 * sum(o.contains for o in outcomes) / n, 2),
        "refused": round(100 * sum(o.refused for o in outcomes) / n, 2),
        "failed": n - len(answered),
        "ttft_ms_mean": round(sum(ttft) / len(ttft), 1) if ttft else None,
        "ttft_ms_p50": round(percentile(ttft, 50), 1) if ttft else None,
        **{name: _mean([getattr(o, name) for o in answered]) for name in tokens},
        "documents_dropped": sum(o.documents - o.documents_kept for o in answered),
    }


def losses(retrieved: Sequence[AnswerOutcome], ceiling: Sequence[AnswerOutcome]) -> dict[str, Any]:
    """Attribute every question's outcome, in percent; the six shares from ``right`` on sum to 100.

    ``found``: of the questions whose search did not fail, those for which a retrieved passage of a gold
    document holds the answer; ``gold_recall`` is of these questions, too, and ``em_where_found`` of those
    that were answered. ``lost_reading_context``: right with the gold documents alone, so the other passages
    misled the model. ``lost_reading``: wrong even then. ``failed``: not answered, or wrong and not answered
    with the gold documents alone."""
    n = len(retrieved)
    kinds = ("right", "right_by_chance", "lost_retrieval", "lost_reading_context", "lost_reading", "failed")
    counts = dict.fromkeys(kinds, 0)
    for outcome, best in zip(retrieved, ceiling, strict=True):
        if outcome.error:
            counts["failed"] += 1
        elif outcome.em:
            counts["right" if outcome.found else "right_by_chance"] += 1
        elif not outcome.found:
            counts["lost_retrieval"] += 1
        elif best.error:
            counts["failed"] += 1
        else:
            counts["lost_reading_context" if best.em else "lost_reading"] += 1
    searched = [o for o in retrieved if o.passages or not o.error]
    recalls = [o.gold_recall or 0.0 for o in searched]
    read = [o.em for o in searched if o.found and not o.error]
    return {
        "found": round(100 * sum(bool(o.found) for o in searched) / len(searched), 2) if searched else None,
        "gold_recall": round(100 * sum(recalls) / len(searched), 2) if searched else None,
        "em_where_found": round(100 * sum(read) / len(read), 2) if read else None,
        **{name: round(100 * count / n, 2) for name, count in counts.items()},
    }


def _ask(
    client: Client,
    question: Question,
    options: Options,
    passages: tuple[RetrievedPassage, ...] = (),
    **fields: Any,
) -> AnswerOutcome:
    try:
        answer = client.query(question.question, **options.fields, **fields)
    except RagserveError as error:
        return failed(question, error, passages)
    return outcome_of(question, answer, passages)


def outcome_of(
    question: Question, answer: Answer, passages: tuple[RetrievedPassage, ...] = ()
) -> AnswerOutcome:
    """Score an answer; ``passages``: those that were retrieved for it."""
    return AnswerOutcome(
        question=question,
        answer=answer.answer,
        em=exact_match(answer.answer, question.answers),
        f1=token_f1(answer.answer, question.answers),
        contains=contains_answer(answer.answer, question.answers),
        refused=is_refusal(answer.answer, question.answers),
        ttft_ms=answer.timings.ttft_ms,
        prompt_tokens=answer.usage.prompt,
        cached_tokens=answer.usage.cached,
        computed_tokens=answer.context.tokens_by_tier.get("computed", 0),
        completion_tokens=answer.usage.completion,
        documents_kept=answer.context.documents_kept,
        documents=answer.context.documents_retrieved,
        **_found(question, passages),
    )


def failed(
    question: Question, error: RagserveError, passages: tuple[RetrievedPassage, ...] = ()
) -> AnswerOutcome:
    """The outcome of a question that was not answered; ``passages``: those that were retrieved for it."""
    failure = f"{error.code}: {error.message}"
    return AnswerOutcome(question, "", error=failure, **_found(question, passages))


def _found(question: Question, passages: tuple[RetrievedPassage, ...]) -> dict[str, Any]:
    """The fields of an outcome that say what a search found; of none without passages."""
    if not passages:
        return {}
    gold = {p.key for p in question.gold}
    from_gold = [p for p in passages if p.source in gold]
    # Answers such as "yes" are not in the text: then any passage of a gold document counts as found.
    literal = any(contains_answer(p.text, question.answers) for p in question.gold)
    found = any(contains_answer(p.text, question.answers) for p in from_gold) if literal else bool(from_gold)
    recall = len({p.source for p in from_gold}) / len(gold) if gold else None
    return {"found": found, "gold_recall": recall, "passages": passages}


def _each(
    questions: Sequence[Question],
    ask: Callable[[Question], AnswerOutcome],
    options: Options,
    progress: Progress,
) -> list[AnswerOutcome]:
    outcomes = []
    with ThreadPoolExecutor(options.concurrency) as pool:
        for outcome in pool.map(ask, questions):
            progress()
            outcomes.append(outcome)
    return outcomes


def _batches(passages: Sequence[GivenPassage]) -> Iterator[list[GivenPassage]]:
    batch: list[GivenPassage] = []
    chars = 0
    for passage in passages:
        size = len(passage.title) + len(passage.text)
        if batch and (len(batch) >= _INGEST_TEXTS or chars + size > _INGEST_CHARS):
            yield batch
            batch, chars = [], 0
        batch.append(passage)
        chars += size
    if batch:
        yield batch


def _mean(values: Sequence[int]) -> float | None:
    return round(sum(values) / len(values), 1) if values else None
