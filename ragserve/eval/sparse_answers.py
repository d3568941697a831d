"""Ask an engine with sparse attention the same questions densely and under many settings, and compare.

Every prompt is prefilled exactly once: settings that differ in decode steps alone read the same KV."""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ragserve.answering.messages import Message
from ragserve.answering.prompt import Prompt, PromptBuilder, PromptDocument
from ragserve.best_passages import NOT_COMPOSED
from ragserve.engine.base import GenerateRequest, Sampling, WarmEngine
from ragserve.errors import RagserveError
from ragserve.eval.data import Question
from ragserve.profiles.bounds import upper_bound
from ragserve.profiles.sparse_attention import SparseEntry, SparseFigures
from ragserve.strategy_spec import StrategySpec
from ragserve.verification.engine_run import TimedAnswer, first_token
from ragserve.verification.metrics import contains_answer, exact_match, token_f1
from ragserve.verification.rows import Key, Row

NAMESPACE = "sparse"
DENSE = "dense"
EXACT = StrategySpec("prefix")
Score = Literal["f1", "contains"]
_NO_OPTIONS: Mapping[str, Any] = {"mode": DENSE}


@dataclass(frozen=True, slots=True)
class SparseSetting:
    """How a request is answered: fields of `GenerateRequest.decode` and `.prefill`, and its strategy."""

    label: str
    decode: Mapping[str, Any] = field(default_factory=lambda: _NO_OPTIONS)
    prefill: Mapping[str, Any] = field(default_factory=dict)
    strategy: StrategySpec = EXACT

    @property
    def server(self) -> dict[str, Any] | None:
        """The settings of a server whose requests are answered so; None if it has none for some option."""
        decode = {name: value for name, value in self.decode.items() if name != "dense_below"}
        prefill = {name: value for name, value in self.prefill.items() if name != "dense_below"}
        if (
            self.strategy != EXACT
            or decode.keys() - {"mode", "budget", "scores"}
            or prefill.keys() - {"mode", "alpha"}
        ):
            return None
        found = {} if decode == _NO_OPTIONS else {f"decode_{name}": value for name, value in decode.items()}
        return found | {f"prefill_{name}": value for name, value in prefill.items()}

    @property
    def prefilled(self) -> str:
        """What the KV of its prompts depends on."""
        return json.dumps([self.strategy.label, dict(self.prefill)], sort_keys=True)


@dataclass(frozen=True, slots=True)
class SparseTask:
    """A question of a set, with the most tokens of its answer and what an answer is scored by."""

    set: str
    question: Question
    max_new_tokens: int = 24
    score: Score = "f1"
    history: tuple[Message, ...] = ()
    system: str | None = None


async def ask_all(
    engine: WarmEngine,
    builder: PromptBuilder,
    tasks: Iterable[SparseTask],
    settings: Sequence[SparseSetting],
    *,
    in_flight: int,
    prompts: int | None = None,
    finished: Collection[Key],
    write: Callable[[Row], object],
    named: Callable[[SparseSetting], str] = lambda setting: setting.label,
    until: float = float("inf"),
) -> None:
    """Hand ``write`` a row for each task and setting that is not ``finished``; failures are rows too.

    ``in_flight``: requests that are answered at once, ``prompts``: how many prompts these may be of; the
    settings of a prompt share its KV. ``named``: a setting's name among the rows.
    ``until``: no question is begun after that time of `time.monotonic`."""
    waiting = iter(tasks)
    places = asyncio.Semaphore(in_flight)

    async def one(task: SparseTask, setting: SparseSetting) -> None:
        async with places:
            row = await _row(engine, builder, task, setting)
        write({"set": task.set, "id": task.question.id, "strategy": named(setting)} | row)

    async def worker() -> None:
        for task in waiting:
            if time.monotonic() >= until:
                return
            wanted = [s for s in settings if (task.set, task.question.id, named(s)) not in finished]
            ordered = sorted(wanted, key=lambda setting: setting.prefilled)
            for _, group in itertools.groupby(ordered, key=lambda setting: setting.prefilled):
                first, *others = group
                await one(task, first)  # leaves the prompt's KV in the cache
                await asyncio.gather(*(one(task, setting) for setting in others))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(in_flight, prompts or in_flight)):
            group.create_task(worker())


async def _row(engine: WarmEngine, builder: PromptBuilder, task: SparseTask, setting: SparseSetting) -> Row:
    try:
        prompt = _prompt(engine, builder, task)
        request = GenerateRequest(
            f"{task.set}-{task.question.id}",
            prompt.input_ids,
            NAMESPACE,
            setting.strategy.name,
            Sampling(task.max_new_tokens, stop=prompt.stop),
            decode=setting.decode,
            prefill=setting.prefill,
        )
        if setting.strategy.name not in NOT_COMPOSED:
            request = replace(request, spans=prompt.spans, options=setting.strategy.options)
            await engine.warm(request)
        answer = await first_token(engine, request)
    except RagserveError as error:
        return {"error": f"{error.code}: {error.message}"}
    return _measured(task, prompt, answer)


def _prompt(engine: WarmEngine, builder: PromptBuilder, task: SparseTask) -> Prompt:
    documents = [
        PromptDocument(str(number), each.title, each.text)
        for number, each in enumerate(task.question.documents)
    ]
    room = engine.info.max_prompt_tokens - task.max_new_tokens
    return builder.build(
        task.question.question,
        documents,
        max_prompt_tokens=room,
        history=task.history,
        system=task.system,
        cut=True,
    )


def _measured(task: SparseTask, prompt: Prompt, answer: TimedAnswer) -> Row:
    text, answers = answer.text.strip(), task.question.answers
    f1, contains = token_f1(text, answers), contains_answer(text, answers)
    last = answer.last
    return {
        "answer": text,
        "f1": round(f1, 4),
        "em": exact_match(text, answers),
        "contains": contains,
        "score": round(f1, 4) if task.score == "f1" else float(contains),
        "tokens": last.usage.completion,
        "prompt_tokens": len(prompt.input_ids),
        "read": 1.0 if last.decode is None else last.decode.share,
        "blocks": 1.0 if last.prefill is None else last.prefill.share,
        "ttft_ms": round(answer.ttft_ms, 1),
        "fallback": last.fallback,
        "error": None,
    }


def recorded(
    settings: Sequence[SparseSetting],
    rows: Sequence[Row],
    named: Callable[[SparseSetting], str] = lambda setting: setting.label,
    *,
    among: int,
) -> tuple[SparseEntry, ...]:
    """An entry of the record for each setting that a server can have by its settings and that was asked.
    ``among``: candidates that one is chosen of by these rows."""
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(row["strategy"], []).append(row)
    dense = by_name.get(named(SparseSetting(DENSE)), [])
    found = [
        (setting.server, figures(by_name.get(named(setting), []), dense, among=among)) for setting in settings
    ]
    return tuple(SparseEntry(server, sets) for server, sets in found if server and sets)


def figures(rows: Sequence[Row], dense: Sequence[Row], *, among: int = 1) -> dict[str, SparseFigures]:
    """Compare the rows of a setting with those of dense attention, by set. Questions that were asked in one
    way only, or failed with dense attention, are left out; those that failed under the setting alone are
    counted. ``among``: see `upper_bound`."""
    reference = {(row["set"], row["id"]): row for row in dense if not row["error"]}
    pairs: dict[str, list[tuple[Row, Row]]] = {}
    for row in rows:
        other = reference.get((row["set"], row["id"]))
        if other is not None:
            pairs.setdefault(row["set"], []).append((row, other))
    return {name: _figures(own, among) for name, own in sorted(pairs.items())}


def _figures(pairs: Sequence[tuple[Row, Row]], among: int) -> SparseFigures:
    failed = sum(bool(row["error"]) for row, _ in pairs)
    pairs = [(row, other) for row, other in pairs if not row["error"]]
    if not pairs:
        return SparseFigures(0, 0.0, 0.0, 100.0, 0, 1.0, failed)
    losses = [other["score"] - row["score"] for row, other in pairs]
    return SparseFigures(
        n=len(pairs),
        dense=_percent(other["score"] for _, other in pairs),
        score=_percent(row["score"] for row, _ in pairs),
        loss_bound=round(100 * upper_bound(losses, 1.0, among=among), 2),
        prompt_tokens=round(statistics.fmean(row["prompt_tokens"] for row, _ in pairs)),
        read=round(statistics.fmean(min(row["read"], row["blocks"]) for row, _ in pairs), 4),
        failed=failed,
    )


def _percent(values: Iterable[float]) -> float:
    return round(100 * statistics.fmean(values), 2)
