"""Ask an engine, without the product around it, every question of some sets under every strategy, on the same
prompts.

Each question is asked with `full` first. Then all its documents are cached, and each strategy is led along
the answer of `full` (`ragserve.verification.distribution`), so that its distributions are compared token by
token; where it would have said something else, it is asked again for its own answer. So no row depends on
another, and a strategy's time to the first token is measured with its documents on the device or, where that
is wanted, on the host, copies included."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ragserve.answering.accounting import context_use
from ragserve.answering.prompt import Prompt, PromptBuilder, PromptDocument
from ragserve.best_passages import NOT_COMPOSED, PASSAGES, choice_of
from ragserve.engine.base import GenerateRequest, Sampling, WarmEngine
from ragserve.engine.document_cache import CachingEngine
from ragserve.errors import EngineError, RagserveError
from ragserve.eval.data import Question
from ragserve.strategy_spec import FULL, StrategySpec
from ragserve.verification.distribution import Closeness, ReferenceAnswer, answer_of, forced_along
from ragserve.verification.engine_run import TimedAnswer, first_token, in_tier
from ragserve.verification.given_scores import GivenScores
from ragserve.verification.metrics import contains_answer, exact_match, is_refusal, token_f1
from ragserve.verification.rows import Key, Row
from sglang_ext.wire.protocol import document_key, pieces_of

if TYPE_CHECKING:
    from ragserve.retrieval.embedder import AnyEmbedder

NAMESPACE = "eval"
Tier = Literal["device", "host"]


@dataclass(frozen=True, slots=True)
class Ask:
    """How to ask: ``in_flight`` questions at a time. ``sentence_bytes``: the setting. ``compare``: lead
    strategies along the answer of `full`; otherwise they are asked for their own answers only. ``tier``: of
    the documents when a composed strategy is asked."""

    max_new_tokens: int = 24
    in_flight: int = 4
    sentence_bytes: int = 0
    compare: bool = True
    tier: Tier = "device"


async def evaluate(
    engine: WarmEngine,
    builder: PromptBuilder,
    questions: Iterable[tuple[str, Question]],
    specs: Sequence[StrategySpec],
    ask: Ask,
    *,
    finished: Container[Key],
    write: Callable[[Row], object],
    embedder: AnyEmbedder | None = None,
) -> None:
    """Hand ``write`` a row for each (set, question) and strategy that is not ``finished``, as soon as it is
    known. Failures become rows too. With an ``embedder`` composed requests have the scores that a retriever
    would give their documents, and passages are chosen by them; without one, by their order.

    `passages` is asked as `full` is, with nothing cached."""
    waiting = iter(questions)

    async def worker() -> None:
        for name, question in waiting:
            open_specs = [spec for spec in specs if (name, question.id, spec.label) not in finished]
            if open_specs:
                await _Asking(engine, builder, ask, name, question, embedder).run(open_specs, write)

    async with asyncio.TaskGroup() as group:
        for _ in range(ask.in_flight):
            group.create_task(worker())


class _Asking:
    """Asks one question under all strategies."""

    def __init__(
        self,
        engine: WarmEngine,
        builder: PromptBuilder,
        ask: Ask,
        name: str,
        question: Question,
        embedder: AnyEmbedder | None,
    ) -> None:
        self._engine = engine
        self._ask = ask
        self._name = name
        self._question = question
        documents = [PromptDocument(str(i), d.title, d.text) for i, d in enumerate(question.documents)]
        room = engine.info.max_prompt_tokens - ask.max_new_tokens
        self._builder, self._documents, self._room = builder, documents, room
        self._prompt: Prompt = builder.build(question.question, documents, max_prompt_tokens=room)
        self._given = None
        if embedder is not None:
            self._given = GivenScores(builder, embedder, question.documents, ask.sentence_bytes)
        self._reference: ReferenceAnswer | None = None

    async def run(self, specs: Sequence[StrategySpec], write: Callable[[Row], object]) -> None:
        others = [spec for spec in specs if spec.label != FULL.label]
        if self._ask.compare or len(others) < len(specs):  # even if it is not wanted
            row = await self._row(FULL)
            if len(others) < len(specs):
                write(row)
        if composed := [spec for spec in others if spec.name not in NOT_COMPOSED]:
            try:
                whole = range(len(self._documents))
                await self._engine.warm(self._request(composed[0], self._prompt, whole))
                if self._ask.tier != "device":
                    await self._control("flush")
            except RagserveError as error:
                for spec in others:
                    write(self._failed(spec, error))
                return
        for spec in others:
            write(await self._row(spec))

    def _laid_out(self, spec: StrategySpec) -> tuple[Prompt, list[int]]:
        """The prompt, and the numbers of the documents that it is to have."""
        question, every = self._question.question, self._documents
        best, _ = choice_of(spec.name, spec.options)
        if best is None:
            return self._prompt, list(range(len(every)))
        order, scores = list(range(len(every))), None
        if self._given is not None:
            order = self._given.nearest(question, len(every))
            scores = self._given.cosines(question, order)
        texts = [(every[number].title, every[number].text) for number in order]
        sizes = [len(self._builder.document_ids(*text)) for text in texts]
        shown = sorted(order[place] for place in best.chosen(question, texts, sizes, scores))
        documents = [every[number] for number in shown]
        prompt = self._builder.build(question, documents, max_prompt_tokens=self._room)
        return replace(prompt, tokens_retrieved=sum(sizes), left_out=len(sizes) - len(shown)), shown

    def _request(self, spec: StrategySpec, prompt: Prompt, shown: Sequence[int]) -> GenerateRequest:
        sampling = Sampling(max_new_tokens=self._ask.max_new_tokens, stop=prompt.stop)
        rid, ids, spans = f"{self._name}-{self._question.id}", prompt.input_ids, prompt.spans
        if spec.name == PASSAGES:
            return GenerateRequest(rid, ids, NAMESPACE, FULL.name, sampling, spans)
        scores = None if self._given is None else self._given.of(self._question.question, prompt, shown)
        _, options = choice_of(spec.name, spec.options)
        return GenerateRequest(rid, ids, NAMESPACE, spec.name, sampling, spans, options, scores=scores)

    async def _row(self, spec: StrategySpec) -> Row:
        try:
            return await self._asked(spec)
        except RagserveError as error:
            return self._failed(spec, error)

    async def _asked(self, spec: StrategySpec) -> Row:
        prompt, shown = self._laid_out(spec)
        request = self._request(spec, prompt, shown)
        if self._ask.tier != "device" and spec.name not in NOT_COMPOSED:
            await self._to_tier(request)
        if spec.label == FULL.label and self._ask.compare:
            self._reference = await answer_of(self._engine, request)
            tokens = len(self._reference.ids)
            same = Closeness.none(tokens)
            return self._measured(spec, prompt, self._reference.timed, self._reference.timed.text, same)
        if self._reference is None:  # `full` failed, or nothing is compared
            answer = await first_token(self._engine, request)
            return self._measured(spec, prompt, answer, answer.text, None)
        close, timed = await forced_along(self._engine, request, self._reference)
        own = self._reference.timed if close.same_answer else await first_token(self._engine, request)
        return self._measured(spec, prompt, timed, own.text, close)

    async def _to_tier(self, request: GenerateRequest) -> None:
        fingerprint = (await self._control("info"))["fingerprint"]
        pieces = pieces_of(request.input_ids, request.spans)
        keys = [document_key(NAMESPACE, fingerprint, piece) for piece in pieces]
        await in_tier(self._engine, self._ask.tier, keys)

    async def _control(self, operation: str) -> dict[str, Any]:
        if not isinstance(self._engine, CachingEngine):
            raise EngineError("This engine does not say in which tier its documents are.")
        return await self._engine.control(operation)

    def _measured(
        self,
        spec: StrategySpec,
        prompt: Prompt,
        answer: TimedAnswer,
        text: str,
        close: Closeness | None,
    ) -> Row:
        last = answer.last
        answers = self._question.answers
        use = context_use(spec.name, prompt, last, len(self._question.documents))
        return self._head(spec) | {
            "answer": text.strip(),
            "em": exact_match(text, answers),
            "f1": round(token_f1(text, answers), 4),
            "contains": contains_answer(text, answers),
            "refused": is_refusal(text, answers),
            "kl": None if close is None else _shown(close.kl[0]),
            "agrees": None if close is None else close.agrees[0],
            "answer_kl": None if close is None else _shown(close.mean_kl),
            "answer_agrees": None if close is None else round(close.agreement, 4),
            "answer_regret": None if close is None else _shown(close.mean_regret),
            "answer_tokens": None if close is None else len(close.kl),
            "ttft_ms": round(answer.ttft_ms, 3),
            "tiers": dict(use.tokens_by_tier),
            "prompt_tokens": len(prompt.input_ids),
            "document_tokens": use.tokens_retrieved,
            "kept": use.tokens_kept,
            "recomputed": use.tokens_recomputed,
            "documents_dropped": use.documents_retrieved - use.documents_kept - prompt.left_out,
            "fallback": last.fallback,
            "error": None,
        }

    def _failed(self, spec: StrategySpec, error: RagserveError) -> Row:
        failure = f"{error.code}: {error.message}"
        return self._head(spec) | {"answer": "", "em": 0.0, "f1": 0.0, "contains": False, "error": failure}

    def _head(self, spec: StrategySpec) -> dict[str, Any]:
        question = self._question
        return {"set": self._name, "id": question.id, "kind": question.kind, "strategy": spec.label}


def _shown(nats: float) -> float:
    return float(f"{nats:.4g}")
