"""Compare strategies with full prefill on a namespace's own documents: retrieve as a query does, let `full`
answer, and lead every strategy along that answer."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, get_args

from ragserve.answering.accounting import context_use
from ragserve.answering.follow_ups import passages
from ragserve.answering.prompt import Prompt, PromptBuilder, PromptDocument
from ragserve.answering.scores import retrieval_scores
from ragserve.engine.base import GenerateRequest, Sampling, WarmEngine
from ragserve.errors import RagserveError
from ragserve.profiles.gate import set_of
from ragserve.retrieval.retriever import Retriever
from ragserve.setting_groups.answering import Retrieval
from ragserve.strategy_spec import FULL, StrategySpec
from ragserve.verification.distribution import ReferenceAnswer, answer_of, forced_along
from ragserve.verification.engine_run import first_token
from ragserve.verification.metrics import contains_answer, normalise
from ragserve.verification.questions import WRITE, DrawnQuestion, Kind, cloze, written
from ragserve.verification.rows import Key, Row
from ragserve_index.types import Chunk
from sglang_ext.wire.protocol import RetrievalScores

ALONE = 10  # usable questions that are asked one at a time, for times of an idle engine
TRIED, USABLE = 10, 3  # chunks for which the model may write questions before so many must be usable
_WRITTEN_TOKENS = 48


@dataclass(frozen=True, slots=True)
class TunedQueries:
    """How questions are asked: as ``/rag/query`` does with these values."""

    namespace: str
    k: int
    retrieval: Retrieval
    max_new_tokens: int

    @property
    def set_name(self) -> str:
        """The name of the questions in rows and in the gate's record."""
        return set_of(self.namespace)


class Comparison:
    """Asks questions, of which several may be asked at a time.

    Every question has a row of strategy `full` with its text and whether it is ``usable``, and one of each
    strategy if it is. A question about a chunk is usable if `full` answers it with words of that chunk. The
    rows of users' questions are written without texts, which would outlive those of the query log."""

    def __init__(
        self,
        engine: WarmEngine,
        retriever: Retriever,
        builder: PromptBuilder,
        queries: TunedQueries,
        specs: Sequence[StrategySpec],
        *,
        known: Mapping[Key, Row],
        write: Callable[[Row], object],
    ) -> None:
        """``known``: the rows of earlier runs, which are not asked again; ``write`` gets each new row."""
        self._engine = engine
        self._retriever = retriever
        self._builder = builder
        self._queries = queries
        self._specs = list(specs)
        self._rows = dict(known)
        self._rounds: Counter[int] = Counter()  # of questions about a chunk
        self._write = write

    @property
    def rows(self) -> list[Row]:
        """All rows, those of earlier runs first."""
        return list(self._rows.values())

    @property
    def compared(self) -> int:
        """Usable questions that every strategy has been asked that is still compared."""
        usable = [row["id"] for row in self._rows.values() if row.get("usable")]
        return sum(all(self._key(id_, label) in self._rows for label in self.labels) for id_ in usable)

    @property
    def kinds(self) -> dict[str, int]:
        """Numbers of usable questions by kind, those of users first."""
        usable = [row["kind"] for row in self._rows.values() if row.get("usable")]
        return {kind: count for kind in get_args(Kind) if (count := usable.count(kind))}

    @property
    def labels(self) -> list[str]:
        """The strategies that are still compared."""
        return [spec.label for spec in self._specs]

    def leave_out(self, labels: Container[str]) -> None:
        """Compare strategies no further. Their rows stay."""
        self._specs = [spec for spec in self._specs if spec.label not in labels]

    def rows_of(self, kind: Kind) -> list[Row]:
        """The rows of questions of a kind, under all strategies."""
        ids = {row["id"] for row in self._rows.values() if row.get("kind") == kind}
        return [row for row in self._rows.values() if row["id"] in ids]

    def settled(self, kind: Kind) -> set[str]:
        """The ids of questions of a kind of which nothing is left to ask."""
        ids = {row["id"] for row in self._rows.values() if row.get("kind") == kind}
        return {id_ for id_ in ids if self._settled(id_)}

    async def about(self, chunk: Chunk, *, alone: bool = True) -> None:
        """Ask a question about a chunk: one that the model writes or, where it cannot and where the chunk
        comes again, a sentence with a gap, another one each time. ``alone`` as in `ask`."""
        earlier = self._rounds[chunk.chunk_id]
        await self._about(chunk, earlier, alone=alone)
        self._rounds[chunk.chunk_id] = earlier + 1  # not if it was stopped: then it is asked again

    async def _about(self, chunk: Chunk, earlier: int, *, alone: bool) -> None:
        kind: Kind = "written" if not earlier and self._model_writes() else "cloze"
        id_ = f"{chunk.chunk_id}-{kind}" + (f"-{earlier + 1}" if earlier else "")
        if self._settled(id_):
            return
        row = self._rows.get(self._key(id_, FULL.label))
        text = row.get("question") if row and not row["error"] else None
        if text is None:  # not asked yet, or its row is kept without texts
            if kind == "written":
                text = await self._written(chunk)
            else:
                text = cloze(chunk.text, random.Random(chunk.chunk_id), earlier)
        await self.ask(DrawnQuestion(id_, kind, text or "", chunk.text), alone=alone)

    def _settled(self, id_: str) -> bool:
        """Whether nothing is left to ask of a question; a question without a usable answer is one."""
        first = self._rows.get(self._key(id_, FULL.label))
        if not first or first["error"]:
            return False
        return not first["usable"] or not any(self._open(id_, spec) for spec in self._specs)

    async def ask(self, question: DrawnQuestion, *, alone: bool = True) -> None:
        """Ask a question under `full` and all strategies that have no row of it yet. Failures become rows.
        ``alone``: nothing else is asked meanwhile, and times to the first token are kept."""
        if self._settled(question.id):
            return
        left = [spec for spec in self._specs if self._open(question.id, spec)]
        if not question.text:
            self._add(question.id, FULL, kind=question.kind, question="", usable=False, error=None)
            return
        try:
            prompt, scores = await self._prompt(question.text)
            reference = await answer_of(self._engine, self._request(prompt, FULL))
        except RagserveError as error:
            self._fail(question, FULL, error)
            return
        usable = _usable(question, reference)
        answer = reference.timed
        self._add(
            question.id,
            FULL,
            kind=question.kind,
            question=question.text,
            answer=answer.text.strip(),
            usable=usable,
            ttft_ms=round(answer.ttft_ms, 3) if alone else None,
            error=None,
            prompt_tokens=len(prompt.input_ids),
        )
        if usable and left:
            await self._compare(question, prompt, scores, reference, left, alone=alone)

    async def _compare(
        self,
        question: DrawnQuestion,
        prompt: Prompt,
        scores: RetrievalScores | None,
        reference: ReferenceAnswer,
        specs: Sequence[StrategySpec],
        *,
        alone: bool,
    ) -> None:
        for spec in specs:
            request = replace(self._request(prompt, spec), scores=scores)
            try:
                if spec is specs[0]:
                    await self._engine.warm(request)
                close, timed = await forced_along(self._engine, request, reference)
            except RagserveError as error:
                self._fail(question, spec, error)
                continue
            use = context_use(spec.name, prompt, timed.last, prompt.documents_kept)
            self._add(
                question.id,
                spec,
                kl=close.kl[0],
                answer_kl=close.mean_kl,
                answer_agrees=close.agreement,
                answer_regret=close.mean_regret,
                answer_tokens=len(close.kl),
                ttft_ms=round(timed.ttft_ms, 3) if alone else None,
                error=None,
                document_tokens=prompt.tokens_kept,
                kept=use.tokens_kept,
                recomputed=use.tokens_recomputed,
                fallback=timed.last.fallback,
            )

    def _model_writes(self) -> bool:
        tried = [row for row in self._rows.values() if row.get("kind") == "written"]
        return len(tried) < TRIED or sum(row["usable"] for row in tried) >= USABLE

    async def _written(self, chunk: Chunk) -> str | None:
        document = PromptDocument("", chunk.title, chunk.text)
        room = self._engine.info.max_prompt_tokens - _WRITTEN_TOKENS
        try:
            prompt = self._builder.build(WRITE, [document], max_prompt_tokens=room)
            request = self._request(prompt, FULL)
            sampling = replace(request.sampling, max_new_tokens=_WRITTEN_TOKENS)
            return written((await first_token(self._engine, replace(request, sampling=sampling))).text)
        except RagserveError:  # the question is not asked; an engine that is gone fails the next request, too
            return None

    async def _prompt(self, text: str) -> tuple[Prompt, RetrievalScores | None]:
        queries = self._queries
        found = await self._retriever.retrieve(
            queries.namespace, text, queries.k, retrieval=queries.retrieval, sentences=True
        )
        shown = passages(found.hits)
        documents = [PromptDocument("", each.title, each.text) for each in shown]
        room = self._engine.info.max_prompt_tokens - queries.max_new_tokens
        prompt = self._builder.build(text, documents, max_prompt_tokens=room)
        return prompt, retrieval_scores(self._builder, prompt, shown, found.sentences)

    def _request(self, prompt: Prompt, spec: StrategySpec) -> GenerateRequest:
        sampling = Sampling(max_new_tokens=self._queries.max_new_tokens, stop=prompt.stop)
        return GenerateRequest(
            "tune", prompt.input_ids, self._queries.namespace, spec.name, sampling, prompt.spans, spec.options
        )

    def _key(self, id_: str, label: str) -> Key:
        return self._queries.set_name, id_, label

    def _open(self, id_: str, spec: StrategySpec) -> bool:
        row = self._rows.get(self._key(id_, spec.label))
        return row is None or bool(row["error"])

    def _fail(self, question: DrawnQuestion, spec: StrategySpec, error: RagserveError) -> None:
        about: dict[str, Any] = {}
        if spec is FULL:
            about = {"kind": question.kind, "question": question.text, "usable": False}
        self._add(question.id, spec, **about, error=f"{error.code}: {error.message}")

    def _add(self, id_: str, spec: StrategySpec, **figures: Any) -> None:
        row = {"set": self._queries.set_name, "id": id_, "strategy": spec.label, **figures}
        self._rows[self._key(id_, spec.label)] = row
        self._write(without_texts(row) if row.get("kind") == "asked" else row)


def without_texts(row: Row) -> Row:
    """The row without question and answer. An empty question stays: it says that none could be made."""
    return {name: value for name, value in row.items() if name not in ("answer", "question") or not value}


def _usable(question: DrawnQuestion, reference: ReferenceAnswer) -> bool:
    answer = reference.timed.text
    if not normalise(answer):
        return False
    return question.kind in ("asked", "given") or contains_answer(question.source, [answer])


async def compare_all(
    comparison: Comparison,
    chunks: Iterable[Chunk],
    questions: Iterable[DrawnQuestion],
    *,
    time_left: Callable[[], bool],
    most: int,
    at_once: int = 1,
    decided: Callable[[], Container[str]] = frozenset,
) -> bool:
    """Ask ``questions``, then about ``chunks``, until the time is up, ``most`` are compared, or every
    strategy is ``decided``, which is called after each question and gives those to compare no further.
    Questions are asked ``at_once``, the first `ALONE` usable ones one at a time. Return whether all have been
    asked."""
    left: Iterator[DrawnQuestion | Chunk] = chain(questions, chunks)
    finished = False

    def may_go_on() -> bool:
        return not finished and bool(comparison.labels) and time_left() and comparison.compared < most

    async def one(*, alone: bool) -> None:
        nonlocal finished
        drawn = next(left, None)
        if drawn is None:
            finished = True
        elif isinstance(drawn, DrawnQuestion):
            await comparison.ask(drawn, alone=alone)
        else:
            await comparison.about(drawn, alone=alone)
        comparison.leave_out(decided())

    async def several() -> None:
        while may_go_on():
            await one(alone=False)

    comparison.leave_out(decided())
    while may_go_on() and (at_once == 1 or comparison.compared < ALONE):
        await one(alone=True)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(at_once - 1 if at_once > 1 else 0):
            tasks.create_task(several())
        if at_once > 1:
            await several()
    return finished
