"""Compare strategies with full prefill on a namespace's own documents: retrieve as a query does, let `full`
and every strategy answer, and score their answers against a reference; those that read the same prompt are
also led along the answer of `full`."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, get_args

from ragserve.answering.accounting import context_use
from ragserve.answering.chosen_passages import choose
from ragserve.answering.follow_ups import passages
from ragserve.answering.prompt import Prompt, PromptBuilder, PromptDocument
from ragserve.answering.results import RetrievedPassage
from ragserve.answering.scores import retrieval_scores
from ragserve.best_passages import NOT_COMPOSED, choice_of
from ragserve.engine.base import GenerateRequest, Sampling, WarmEngine
from ragserve.errors import ModelUnavailable, RagserveError, RequestTimeout, TooManyRequests
from ragserve.profiles.figures import MAX_ANSWER_KL
from ragserve.retrieval.retriever import SentenceScores
from ragserve.strategy_spec import FULL, StrategySpec
from ragserve.verification.course import Course, Part
from ragserve.verification.distribution import ReferenceAnswer, answer_of, forced_along
from ragserve.verification.engine_run import TimedAnswer, first_token
from ragserve.verification.metrics import normalise
from ragserve.verification.question_probes import SHORT, Probes, Search, differ, scored
from ragserve.verification.questions import DrawnQuestion, Kind
from ragserve.verification.rows import Key, Row
from ragserve.verification.tuned_queries import TunedQueries
from ragserve.verification.unsupported import unsupported
from ragserve_index.types import Chunk

ALONE = 10  # usable questions that are asked one at a time, for times of an idle engine
_LED = 20  # answers, after which a strategy that is far from full is led along no more
_FAR = 3 * MAX_ANSWER_KL
_AWAY = (RequestTimeout.status, TooManyRequests.status)
_MISSED = 3  # questions in a row that find the engine or the search away, of as many as are asked at once
_TWO = 4  # of so many chunks one is asked about together with another


@dataclass(frozen=True, slots=True)
class Laid:
    """A question under one strategy: its prompt, and the passages that it was laid out of."""

    prompt: Prompt
    shown: list[RetrievedPassage]
    sentences: list[SentenceScores]


@dataclass(frozen=True, slots=True)
class FullAnswered:
    """A question that full has answered. ``led``: its answer with distributions, if it has them; ``exact``:
    answers of exact prefills by their prompts, of which some candidates have the same; ``alone`` as in
    `Comparison.ask`."""

    question: DrawnQuestion
    whole: Laid
    request: GenerateRequest
    led: ReferenceAnswer | None
    full: TimedAnswer
    alone: bool
    exact: dict[tuple[int, ...], TimedAnswer]


class Comparison:
    """Asks questions, of which several may be asked at a time.

    Every question has a row of strategy `full` with its text and whether it is ``usable``, and one of each
    strategy if it is. Those about chunks, and those with labels, are probes and have scores. A user's
    question may have none, and then only shows how close strategies are to `full`. The rows of users'
    questions are written without texts, which would outlive those of the query log."""

    def __init__(
        self,
        engine: WarmEngine,
        search: Search,
        builder: PromptBuilder,
        queries: TunedQueries,
        specs: Sequence[StrategySpec],
        *,
        known: Mapping[Key, Row],
        write: Callable[[Row], object],
        out_at: Mapping[str, float | None] | None = None,
    ) -> None:
        """``known``: the rows of earlier runs, which are not asked again; ``write`` gets each new row. Of the
        known ones do not count: failures, which may have passed, and rows of samkv with another profile,
        of a strategy that use has taken out since (``out_at``: `InUseRecord.out_at`), and of a namespace that
        was made again since."""
        self._engine = engine
        self._search = search
        self._builder = builder
        self._queries = queries
        self._every = {spec.label: spec for spec in specs}
        self._course = Course("pick", list(self._every))
        self._out_at = out_at or {}
        self._rows = {key: row for key, row in known.items() if self._counts(row)}
        self._write = write
        self._chunks = 0
        self.away_in_a_row = 0
        """Questions that found the engine, or a part of the search, away since full answered last."""
        self._doubtful: list[Key] = []  # failures of strategies since then: of an outage, if full fails, too
        room = engine.info.max_prompt_tokens
        self.probes = Probes(engine, search, builder, queries.namespace, room)
        for row in self._rows.values():
            if (kind := row.get("kind")) in ("written", "pair"):
                self.probes.note(kind, usable=bool(row["usable"]))

    @property
    def rows(self) -> list[Row]:
        """All rows, those of earlier runs first."""
        return list(self._rows.values())

    @property
    def compared(self) -> int:
        """Usable questions that every strategy of their part has been asked that is still compared."""
        usable = [row["id"] for row in self._rows.values() if row.get("usable")]
        return sum(not any(self._open(id_, spec) for spec in self._specs(id_)) for id_ in usable)

    @property
    def kinds(self) -> dict[str, int]:
        """Numbers of usable questions by kind, those of users first."""
        usable = [row["kind"] for row in self._rows.values() if row.get("usable")]
        return {kind: count for kind in get_args(Kind) if (count := usable.count(kind))}

    @property
    def course(self) -> Course:
        """What is asked next."""
        return self._course

    def steer(self, course: Course) -> None:
        """Ask new questions for this part, under these strategies. Rows of others stay."""
        self._course = course

    def rows_of(self, kind: Kind) -> list[Row]:
        """The rows of questions of a kind, under all strategies."""
        ids = {row["id"] for row in self._rows.values() if row.get("kind") == kind}
        return [row for row in self._rows.values() if row["id"] in ids]

    def settled(self, kind: Kind) -> set[str]:
        """The ids of questions of a kind of which nothing is left to ask."""
        ids = {row["id"] for row in self._rows.values() if row.get("kind") == kind}
        return {id_ for id_ in ids if self._settled(id_)}

    @property
    def failures(self) -> Counter[str]:
        """What failed in this run, of questions and strategies, and how often."""
        return Counter(row["error"] for row in self._rows.values() if row["error"])

    async def ask_or_make(self, drawn: DrawnQuestion | Chunk, *, alone: bool) -> RagserveError | None:
        """`ask` a question, or one `about` a chunk."""
        if isinstance(drawn, DrawnQuestion):
            return await self.ask(drawn, alone=alone)
        return await self.about(drawn, alone=alone)

    async def about(self, chunk: Chunk, *, alone: bool = True) -> RagserveError | None:
        """Make a probe about a chunk, which counts once, and ask it, as `ask`."""
        id_, number = str(chunk.chunk_id), self._chunks
        self._chunks += 1
        if self._settled(id_):
            return None
        row = self._rows.get(self._key(id_, FULL.label)) or {}
        if row.get("question") and row.get("references"):
            question = DrawnQuestion(id_, row["kind"], row["question"], tuple(row["references"]))
        else:
            try:
                found = await self.probes.about(chunk, two=number % _TWO == _TWO - 1)
            except RagserveError as error:
                return self._fail(DrawnQuestion(id_, "written", ""), FULL, self._course.part, error)
            question = found or DrawnQuestion(id_, "cloze", "")
        return await self.ask(question, alone=alone)

    def _settled(self, id_: str) -> bool:
        """Whether nothing is left to ask of a question; a question without a usable answer is one."""
        first = self._rows.get(self._key(id_, FULL.label))
        if not first or first["error"]:
            return False
        return not first["usable"] or not any(self._open(id_, spec) for spec in self._specs(id_))

    def _specs(self, id_: str) -> list[StrategySpec]:
        """The strategies that a question is asked under, by its part."""
        first = self._rows.get(self._key(id_, FULL.label)) or {}
        if first.get("part", self._course.part) != self._course.part:
            return []
        return [self._every[label] for label in self._course.labels]

    async def ask(self, question: DrawnQuestion, *, alone: bool = True) -> RagserveError | None:
        """Ask a question under `full` and all strategies that have no row of it yet. Failures become rows.
        Return why it was not asked, where the engine, or a part of the search, was away: it may be asked
        again. ``alone``: nothing else is asked meanwhile, and times to the first token are kept. Otherwise
        exact prefills begin with what is in the prefix cache: most candidates read what `full` has read."""
        if self._settled(question.id):
            return None
        left = [spec for spec in self._specs(question.id) if self._open(question.id, spec)]
        part = self._course.part
        if not question.text:
            self._full(question, part, usable=False)
            return None
        try:
            if question.kind in ("asked", "given") and not question.references:
                question = await self.probes.of_user(question) or question
            found, sentences = await self._found(question.text)
            whole = self._laid_out(question.text, found, sentences)
            request = self._request(whole.prompt, FULL, shared=not alone)
            led: ReferenceAnswer | None = None
            if any(self._may_be_close(spec) for spec in left):
                led = await answer_of(self._engine, request)
                answer = led.timed
            else:
                answer = await first_token(self._engine, request)
        except RagserveError as error:
            return self._fail(question, FULL, part, error)
        self._doubtful, self.away_in_a_row = [], 0
        usable = bool(question.references or normalise(answer.text))
        self._full(
            question,
            part,
            answer=answer.text.strip(),
            usable=usable,
            score=scored(answer.text, question) if question.references else None,
            ttft_ms=round(answer.ttft_ms, 3) if alone else None,
            prompt_tokens=len(whole.prompt.input_ids),
        )
        asked = FullAnswered(question, whole, request, led, answer, alone, {tuple(request.input_ids): answer})
        for spec in left if usable else ():
            try:
                row = await self._answered(spec, asked)
            except RagserveError as error:
                self._fail(question, spec, part, error)
                continue
            self._doubtful = []
            ttft = row.pop("ttft_ms")
            self._add(question.id, spec, part=part, ttft_ms=ttft if alone else None, error=None, **row)
        return None

    async def _answered(self, spec: StrategySpec, asked: FullAnswered) -> Row:
        """The row of one strategy."""
        question, whole, led, full = asked.question, asked.whole, asked.led, asked.full
        best, options = choice_of(spec.name, spec.options)
        laid, row = whole, Row()
        if best is not None:
            chosen = await choose(self._builder, question.text, whole.shown, best)
            numbers = chosen.order[: chosen.kept]
            sentences = [whole.sentences[number] for number in numbers] if whole.sentences else []
            laid = self._laid_out(question.text, [whole.shown[number] for number in numbers], sentences)
        composed = spec.name not in NOT_COMPOSED
        request = self._request(laid.prompt, spec, options, shared=not asked.alone)
        if composed:
            scores = retrieval_scores(self._builder, laid.prompt, laid.shown, laid.sentences)
            request = replace(request, scores=scores)
            await self._engine.warm(request)
        if composed and best is None and led is not None and self._may_be_close(spec):
            close, timed = await forced_along(self._engine, request, led)
            row |= {
                "kl": close.kl[0],
                "answer_kl": close.mean_kl,
                "answer_agrees": close.agreement,
                "answer_regret": close.mean_regret,
                "answer_tokens": len(close.kl),
            }
            own = full if close.same_answer else await first_token(self._engine, request)
        elif composed:
            own = timed = await first_token(self._engine, request)
        else:
            ids = tuple(request.input_ids)
            if ids not in asked.exact:
                asked.exact[ids] = await first_token(self._engine, request)
            own = timed = asked.exact[ids]
        lost = await asyncio.to_thread(unsupported, self._builder.words, asked.request, full.text, own.text)
        use = context_use(spec.name, laid.prompt, timed.last, laid.prompt.documents_kept)
        return row | {
            "answer": own.text.strip(),
            "score": scored(own.text, question) if question.references else None,
            "full_score": scored(full.text, question) if question.references else None,
            "different": differ(own.text, full.text),
            "unsupported": lost,
            "ttft_ms": round(timed.ttft_ms, 3),
            "document_tokens": whole.prompt.tokens_kept,
            "kept": use.tokens_kept,
            "recomputed": use.tokens_recomputed if composed else use.tokens_kept,
            "documents": laid.prompt.documents_kept,
            "fallback": timed.last.fallback,
            "samkv": self._engine.info.samkv if _is_samkv(spec.label) else "",
        }

    def _may_be_close(self, spec: StrategySpec) -> bool:
        """Whether its distributions may be as near to those of full as verifies it without references."""
        if spec.name in NOT_COMPOSED or spec.chooses_passages:
            return False
        kls = [
            row["answer_kl"]
            for (_, _, label), row in self._rows.items()
            if label == spec.label and row.get("answer_kl") is not None
        ]
        return len(kls) < _LED or math.fsum(kls) / len(kls) < _FAR

    async def _found(self, text: str) -> tuple[list[RetrievedPassage], list[SentenceScores]]:
        queries = self._queries
        found = await self._search.search(queries.namespace, text, queries.search, sentences=True)
        if (missing := found.by_words_alone or found.not_reranked) is not None:
            raise ModelUnavailable(missing)  # the verdict is of the whole search
        return passages(found.passages), found.sentences

    def _laid_out(self, text: str, found: list[RetrievedPassage], sentences: list[SentenceScores]) -> Laid:
        documents = [PromptDocument("", each.title, each.text) for each in found]
        room = self._engine.info.max_prompt_tokens - self._queries.max_new_tokens
        prompt = self._builder.build(text, documents, max_prompt_tokens=room, system=SHORT)
        return Laid(prompt, found[: prompt.documents_kept], sentences[: prompt.documents_kept])

    def _request(
        self,
        prompt: Prompt,
        spec: StrategySpec,
        options: Mapping[str, Any] | None = None,
        *,
        shared: bool = False,
    ) -> GenerateRequest:
        """``shared``: exact prefills may find their beginning in the prefix cache."""
        sampling = Sampling(max_new_tokens=self._queries.max_new_tokens, stop=prompt.stop)
        name = ("prefix" if shared else FULL.name) if spec.name in NOT_COMPOSED else spec.name
        spans = prompt.spans
        return GenerateRequest(
            "tune", prompt.input_ids, self._queries.namespace, name, sampling, spans, options or {}
        )

    def _key(self, id_: str, label: str) -> Key:
        return self._queries.set_name, id_, label

    def _open(self, id_: str, spec: StrategySpec) -> bool:
        return self._key(id_, spec.label) not in self._rows

    def _counts(self, row: Row) -> bool:
        """Whether a row of an earlier run says something of what is compared now."""
        if row["error"]:
            return False
        made_at, at = self._queries.made_at, row.get("at", 0.0)
        out_at = self._out_at.get(row["strategy"], 0.0)
        # None: by an earlier version, whose rows have no time
        is_older = not at if out_at is None else at < out_at
        if 0.0 < at < made_at or is_older:
            return False
        return not _is_samkv(row["strategy"]) or row.get("samkv") == self._engine.info.samkv

    def _full(self, question: DrawnQuestion, part: Part, **figures: Any) -> None:
        about = {"kind": question.kind, "question": question.text, "references": list(question.references)}
        before = self._rows.get(self._key(question.id, FULL.label)) or {}
        self._add(question.id, FULL, **about, part=before.get("part", part), **({"error": None} | figures))

    def _fail(
        self, question: DrawnQuestion, spec: StrategySpec, part: Part, error: RagserveError
    ) -> RagserveError | None:
        """Add the row of a failure, and return the error of a question that may be asked again."""
        failure = f"{error.code}: {error.message}"
        away = error.status in _AWAY or error.status >= 500
        if spec is not FULL:
            self._add(question.id, spec, part=part, error=failure)
            self._doubtful += [self._key(question.id, spec.label)] if away else []
            return None
        self._full(question, part, usable=False, error=failure)
        if not away:
            return None
        self.away_in_a_row += 1
        for key in self._doubtful:
            self._rows.pop(key, None)
        self._doubtful = []
        return error

    def _add(self, id_: str, spec: StrategySpec, **figures: Any) -> None:
        about = {"set": self._queries.set_name, "id": id_, "strategy": spec.label}
        row = {**about, "at": round(time.time(), 3), **figures}
        kind = row.get("kind") or self._rows.get(self._key(id_, FULL.label), {}).get("kind")
        self._rows[self._key(id_, spec.label)] = row
        self._write(without_texts(row) if kind == "asked" else row)


def _is_samkv(label: str) -> bool:
    return label.partition(":")[0] == "samkv"


def without_texts(row: Row) -> Row:
    """The row without question, reference and answer. An empty question stays: it says that none could be
    made."""
    texts = ("answer", "question", "references")
    return {name: value for name, value in row.items() if name not in texts or not value}


async def compare_all(
    comparison: Comparison,
    chunks: Iterable[Chunk],
    questions: Iterable[DrawnQuestion],
    *,
    time_left: Callable[[], bool],
    most: int,
    at_once: int = 1,
    course: Callable[[], Course] | None = None,
) -> bool:
    """Ask ``questions``, then about ``chunks``, until the time is up, ``most`` are compared, or the
    ``course``, which is called after each question, has no strategy left that is to be compared. Questions
    are asked ``at_once``, the first `ALONE` usable ones one at a time. Return whether all have been asked.
    Raises what drawing and writing raise, and why several questions in a row could not be asked."""
    left: Iterator[DrawnQuestion | Chunk] = chain(questions, chunks)
    finished = False

    def may_go_on() -> bool:
        labels = comparison.course.labels
        return not finished and bool(labels) and time_left() and comparison.compared < most

    async def one(*, alone: bool) -> None:
        nonlocal finished
        drawn = next(left, None)
        if drawn is None:
            finished = True
        else:
            away = await comparison.ask_or_make(drawn, alone=alone)
            if away is not None and comparison.away_in_a_row >= _MISSED * (1 if alone else at_once):
                raise away
        if course is not None:
            comparison.steer(course())

    async def several() -> None:
        while may_go_on():
            await one(alone=False)

    if course is not None:
        comparison.steer(course())
    while may_go_on() and (at_once == 1 or comparison.compared < ALONE):
        await one(alone=True)
    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(at_once if at_once > 1 else 0):
                tasks.create_task(several())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return finished
