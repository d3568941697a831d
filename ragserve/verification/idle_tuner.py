"""Tune a server while it is idle: measure what verified strategies cost, and verify strategies in namespaces
that have none, with the comparison and the measurement of `ragserve tune`.

A step is one question under every candidate, or one case of the costs. A step that a request stops is done
again; what was compared before is kept in the data folder, as numbers without texts, and shared with
`ragserve tune`.

A namespace in which nothing could be verified is opened again when its users have asked as many new questions
as the last verdicts rest on (`EndedRun`). Their questions alone decide then."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ragserve.answering.in_flight import QueryLimiter
from ragserve.answering.prompt import PromptBuilder
from ragserve.answering.query_log import LoggedQuestions
from ragserve.best_passages import PASSAGES
from ragserve.config import Settings
from ragserve.engine.base import EngineInfo
from ragserve.errors import NotFound, RagserveError
from ragserve.metrics import metrics
from ragserve.profiles.gate import Gate
from ragserve.profiles.in_use import InUseRecord
from ragserve.profiles.retriever_name import retriever_of
from ragserve.retrieval.passage_search import PassageSearch
from ragserve.setting_groups.per_namespace import NamespaceSettings
from ragserve.strategy_spec import candidates, parse
from ragserve.verification import MAX_TOKENS, MOST_QUESTIONS, rows
from ragserve.verification.comparison import Comparison
from ragserve.verification.costs import CostEngine
from ragserve.verification.course import course
from ragserve.verification.dropped import forget_or_log
from ragserve.verification.giving_way import Gently, GivingWay
from ragserve.verification.idle_costs import IdleCosts
from ragserve.verification.namespace_run import EndedRun, NamespaceRun
from ragserve.verification.questions import drawn
from ragserve.verification.tuned_queries import TunedQueries
from ragserve.verification.verdicts import (
    FOLDER,
    Verdict,
    record_verdicts,
    state_name,
    verdict,
    verdicts,
)
from ragserve_index import IndexStore

log = logging.getLogger(__name__)
MOST_S = 1800.0  # of computing for a namespace, by one server
LAST_MARGIN = 2.0  # points that a strategy may lose, to which it goes on
_PICKING = 1 / 3  # share of the time for the first part of the probes
_NEARER = 0.5  # points
_PROJECTED = 10  # questions, at each of which it is found out how many a verdict takes
_REST_S = 10.0  # between two looks for something to do
_AFTER_ERROR_S = 60.0
_TRIES = 3  # of a question while the engine or the search is away, and such questions in a row
_ASIDE_S = 3600.0  # until a namespace is tried again after these
_JOBS = "ingestions and warm-ups that run or wait"
_ASKED = 100  # namespaces remembered, which come first


class IdleTuner:
    """Gives an `IdleWorker` its next step. Belongs to one event loop."""

    def __init__(
        self,
        settings: Settings,
        engine: CostEngine,
        store: IndexStore,
        search: PassageSearch,
        prompts: PromptBuilder,
        gate: Gate,
        in_use: InUseRecord,
        limiter: QueryLimiter,
        *,
        jobs: Callable[[bool], bool],
        timing: asyncio.Lock,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``jobs``: an ingestion or a warm-up of a server is waiting, or one is running, for which tuning
        waits; given False, without warm-ups in the background. Those wait for the first costs: ``timing`` is
        held while a case is measured."""
        self._settings = settings
        self._engine: Any = Gently(engine)
        self._store = store
        self._search = search
        self._prompts = prompts
        self._gate = gate
        self._in_use = in_use
        self._limiter = limiter
        self._jobs = jobs
        self._timing = timing
        self._waits_for_jobs = False
        self._clock = clock
        self._rest_until = -1.0
        self._run: NamespaceRun | None = None
        self._costs = IdleCosts(settings, self._engine, gate, clock)
        self._asked: dict[str, None] = {}
        self._ended: dict[str, EndedRun] = {}  # namespaces of which nothing more is to be found
        self._spent: dict[str, float] = {}  # seconds by namespace
        self._set_aside: dict[str, float] = {}  # namespaces where nothing is answered, and until when
        self._made_at: dict[str, float] = {}  # of namespaces, when it was looked last

    def progress(self, namespace: str) -> str | None:
        """Say how far it is with a namespace, which then comes first; None where nothing more is done."""
        self._asked.pop(namespace, None)
        self._asked[namespace] = None
        if len(self._asked) > _ASKED:
            del self._asked[next(iter(self._asked))]
        if self._waits_for_jobs:
            return f"the server tunes itself while it is idle, after {_JOBS}"
        if self._costs.measuring is not None:
            return "the server measures costs while it is idle"
        if self._run is not None and self._run.namespace == namespace:
            done = self._run.comparison.compared
            left = max(0.0, MOST_S - self._spent.get(namespace, 0.0)) / 60
            return (
                f"the server verifies strategies while it is idle ({done} questions compared, at most "
                f"{left:.0f} minutes of computing left)"
            )
        if namespace in self._ended:
            return None
        return "the server tunes itself while it is idle"

    def info(self) -> dict[str, Any]:
        """Describe the state for `/info`."""
        if self._waits_for_jobs:
            return {"state": "waiting", "for": _JOBS}
        if self._costs.measuring is not None:
            return {"state": "measuring costs", "strategies": [self._costs.measuring]}
        if self._run is not None:
            return {
                "state": "verifying",
                "namespace": self._run.namespace,
                "compared": self._run.comparison.compared,
                "questions": self._run.comparison.kinds,
                "phase": self._run.comparison.course.part,
                "strategies": self._run.comparison.course.labels,
                "seconds_left": round(max(0.0, MOST_S - self._spent.get(self._run.namespace, 0.0))),
                "margins": self._run.margins,
                "decided": self._run.decided,
            }
        return {"state": "waiting"}

    def work(self) -> Coroutine[Any, Any, None] | None:
        """The next step; None while there is nothing to do."""
        return None if self._clock() < self._rest_until else self._step()

    async def _step(self) -> None:
        try:
            await self._forget_dropped()
            label = await asyncio.to_thread(self._costs.next)
            warm_ups_first = label is None or not self._costs.first
            self._waits_for_jobs = await asyncio.to_thread(self._jobs, warm_ups_first)
            if self._waits_for_jobs:
                self._rest(_REST_S)
            elif label is not None:
                async with self._timing:
                    await self._costs.step(label)
            elif self._run is not None:
                await self._ask(self._run)
            elif (run := await self._next_run()) is not None:
                self._run = run
            else:
                self._rest(_REST_S)
        except RagserveError as error:  # a foreign file, or an engine that fails
            log.warning("Tuning of the idle server rests for %g s: %s", _AFTER_ERROR_S, error)
            self._rest(_AFTER_ERROR_S)

    async def _forget_dropped(self) -> None:
        """Forget what is known of namespaces that are gone, or were made again: one by one, as a request may
        stop it."""
        made_at = await asyncio.to_thread(self._store.made_at)
        for name in [name for name, before in self._made_at.items() if made_at.get(name) != before]:
            if self._run is not None and self._run.namespace == name:
                self._run = None
            self._ended.pop(name, None)
            self._spent.pop(name, None)
            self._set_aside.pop(name, None)
            await asyncio.to_thread(forget_or_log, self._settings.data_dir, name)
            del self._made_at[name]
        self._made_at = made_at

    def _rest(self, seconds: float) -> None:
        self._rest_until = self._clock() + seconds

    @property
    def _info(self) -> EngineInfo:
        info: EngineInfo = self._engine.info
        return info

    async def _next_run(self) -> NamespaceRun | None:
        """The next namespace with documents that is not settled: what was asked last comes first. Then come
        those whose users have asked new questions, and those that ended and whose documents or own settings
        have changed since, which have their time again."""
        versions = {n.name: n.version for n in await asyncio.to_thread(self._store.namespaces) if n.n_chunks}
        self._ended = {name: ended for name, ended in self._ended.items() if name in versions}
        self._spent = {name: seconds for name, seconds in self._spent.items() if name in versions}
        asked = [name for name in reversed(self._asked) if name in versions]
        looked_again = False
        for name in sorted(dict.fromkeys([*asked, *versions]), key=lambda name: name in self._ended):
            ended = self._ended.get(name)
            if ended and not looked_again:
                looked_again = True
                if (run := await self._next_opened_again()) is not None:
                    return run
                ended = self._ended[name]
            retriever = retriever_of(await asyncio.to_thread(self._usual, name))
            if ended and (ended.version, ended.retriever) == (versions[name], retriever):
                continue
            if self._is_aside(name) or await asyncio.to_thread(self._is_settled, name):
                continue
            if ended and not await asyncio.to_thread(self._gate.verified, name):
                self._spent[name] = 0.0
            run = await asyncio.to_thread(self._made, name, versions[name])
            if run is not None and self._spent.get(name, 0.0) < MOST_S:
                return run
            usable = ended.usable if ended else 0
            self._ended[name] = EndedRun(versions[name], retriever, usable, run.logged if run else None)
        return None if looked_again else await self._next_opened_again()

    def _usual(self, namespace: str) -> Settings:
        """The settings of a namespace's queries that give none."""
        return NamespaceSettings.usual(self._settings, self._store, namespace)

    def _is_settled(self, namespace: str) -> bool:
        """Something is verified there, and what was by references is at the last margin."""
        margins = self._gate.margins(namespace)
        return bool(self._gate.verified(namespace)) and min(margins, default=0.0) <= LAST_MARGIN

    def _is_aside(self, namespace: str) -> bool:
        """Whether it was set aside, and is not to be tried again yet."""
        return self._set_aside.get(namespace, 0.0) > self._clock()

    async def _next_opened_again(self) -> NamespaceRun | None:
        """Look at one ended namespace in which nothing is verified, another one each time, whether its users
        have asked enough."""

        def open_() -> str | None:
            each = (name for name in self._ended if not self._is_aside(name))
            return next((name for name in each if not self._gate.verified(name)), None)

        name = await asyncio.to_thread(open_)
        if name is None:
            return None
        ended = self._ended[name] = self._ended.pop(name)  # the last one now
        if not await asyncio.to_thread(ended.opens_again):
            return None
        run = await asyncio.to_thread(self._made, name, ended.version, users_only=True)
        if run is None:
            self._ended[name] = replace(ended, logged=None)
            return None
        log.info("Namespace %s is verified again: its users have asked new questions", name)
        run.least = ended.least
        self._spent[name] = 0.0
        del self._ended[name]
        return run

    def _made(self, namespace: str, version: int, *, users_only: bool = False) -> NamespaceRun | None:
        """Prepare a namespace; None without candidates."""
        info, settings = self._info, self._usual(namespace)
        out = self._in_use.taken_out(namespace)
        specs = [
            spec
            for spec in parse(candidates(settings.top_k))
            if spec.name in (*info.strategies, PASSAGES) and spec.label not in out
        ]
        if not specs:
            return None
        made_at = self._made_at.get(namespace, 0.0)
        queries = TunedQueries.of(settings, namespace, MAX_TOKENS, made_at, version)
        state = settings.data_dir / FOLDER / state_name(info, queries, None)
        engine = GivingWay(self._engine)
        comparison = Comparison(
            engine,
            self._search,
            self._prompts,
            queries,
            specs,
            known=rows.read(state),
            write=lambda row: _keep(state, row),
            out_at=self._in_use.out_at(namespace),
            present=lambda ids: self._store.chunks_around(namespace, ids, 0),
        )
        comparison.steer(
            course(
                [spec.label for spec in specs],
                comparison.rows,
                margin=settings.verify_margin,
                open_=lambda label: True,
            )
        )
        known = comparison.settled("asked")
        logged = LoggedQuestions(settings.data_dir, self._store, namespace, MOST_QUESTIONS, known)
        labels = [spec.label for spec in specs]
        chunks = None if users_only else partial(drawn, self._store, namespace)
        margin = settings.verify_margin
        return NamespaceRun(namespace, version, engine, comparison, queries, labels, margin, logged, chunks)

    async def _ask(self, run: NamespaceRun) -> None:
        """Ask one question, and record what is decided by then."""
        began, compared = self._clock(), run.comparison.compared
        try:
            if run.drawn is None:
                run.drawn = asyncio.create_task(asyncio.to_thread(run.draw))
            try:
                question = await asyncio.shield(run.drawn)
            except Exception:
                run.drawn = None  # drawn again
                raise
            if question is not None:
                with self._limiter.background(run.namespace):
                    error = await run.ask(question)
                if error is not None and run.tries < _TRIES - 1:
                    run.tries += 1
                    raise error  # it rests, and asks the same question again
                run.failed = run.failed + 1 if error is not None else 0
            run.drawn, run.tries = None, 0
            run.asked += 1
            over = question is None or run.over
        except NotFound:
            self._end(run, "it is gone")
            return
        finally:
            took = self._clock() - began
            self._spent[run.namespace] = self._spent.get(run.namespace, 0.0) + took
        if run.failed >= _TRIES:  # others may be answered meanwhile
            self._set_aside[run.namespace] = self._clock() + _ASIDE_S
            self._run = None
            return
        if run.comparison.compared > compared:
            run.took(took)
        metrics().tuning_compared.labels(run.namespace).set(run.comparison.compared)
        over = over or self._spent[run.namespace] >= MOST_S
        decided = (over or run.asked >= run.least) and await asyncio.to_thread(self._decide, run, over)
        if decided or over:
            what = [f"{label} {decision}" for label, decision in run.decided.items()]
            self._end(run, "; ".join(what) or "nothing is decided")

    def _decide(self, run: NamespaceRun, ended: bool) -> bool:
        """Record new verdicts and margins, and return whether nothing can still change: all that was picked
        is refused or at the last margin, or will not be there in time. ``ended``: nothing more is asked.

        Raises NotFound where the namespace is gone."""
        version = self._store.namespace(run.namespace).version
        if version != run.checked:
            run.comparison.leave_out_gone()
            run.checked = version
        found = {one.label: one for one in self._verdicts(run, ended)}
        new = [
            one
            for one in found.values()
            if one.decision in ("verified", "refused")
            and (one.decision != run.decided.get(one.label) or self._nearer(run, one))
        ]
        if new:
            # users' questions alone decide anew, however many of others decided before
            replaces = run.labels if run.chunks is None else ()
            record_verdicts(self._settings, self._info, run.queries, new, replaces=replaces)
        for one in new:
            run.decided[one.label] = one.decision
            if one.figures.margin is not None:
                run.margins[one.label] = one.figures.margin

        def open_(label: str) -> bool:
            one = found.get(label)
            if one is None or one.decision == "passed over":
                return True
            if one.decision == "undecided":
                return self._can_finish(run, one)
            return one.decision == "verified" and self._may_go_on(run, one)

        spent = self._spent.get(run.namespace, 0.0)
        following = course(
            run.labels,
            run.comparison.rows,
            margin=run.margin,
            open_=open_,
            verified=lambda label: run.decided.get(label) == "verified",
            pick_time=lambda: spent < _PICKING * MOST_S,
        )
        run.comparison.steer(following)
        return not following.labels

    @staticmethod
    def _verdicts(run: NamespaceRun, ended: bool) -> list[Verdict]:
        return verdicts(run.labels, run.rows, margin=run.margin, project=False, ended=ended)

    @staticmethod
    def _nearer(run: NamespaceRun, one: Verdict) -> bool:
        """Whether a verified strategy's margin is a good deal smaller than what is recorded."""
        margin = one.figures.margin
        return margin is not None and margin <= run.margins.get(one.label, math.inf) - _NEARER

    def _can_finish(self, run: NamespaceRun, one: Verdict) -> bool:
        """Whether there is time for as many questions as a verdict would take, as far as that is known."""
        figures, left = one.figures, MOST_S - self._spent.get(run.namespace, 0.0)
        if figures.references < _PROJECTED or figures.references % _PROJECTED:
            return True
        label = one.label
        projected = verdict(label, run.rows, margin=run.margin, ended=False)
        count = None if projected is None else projected.needed
        hours = 0.0 if count is None else run.pace * (count - figures.n) / 3600
        if count is not None and 3600 * hours > left:
            run.decided[label] = f"not finished: about {count} questions, {hours:.1f} hours here"
        return count is None or 3600 * hours <= left

    def _may_go_on(self, run: NamespaceRun, one: Verdict) -> bool:
        """Whether a verified strategy may reach `LAST_MARGIN` in the time that is left: as far as a margin
        falls with the square of the questions."""
        figures, spent = one.figures, self._spent.get(run.namespace, 0.0)
        if figures.margin is None or figures.margin <= LAST_MARGIN or not figures.references:
            return False
        gap = max(LAST_MARGIN + (figures.score_vs_full or 0.0), 0.1)
        reached = max(figures.margin + (figures.score_vs_full or 0.0), gap)
        return spent * (reached / gap) ** 2 <= MOST_S

    def _end(self, run: NamespaceRun, what: str) -> None:
        kinds = ", ".join(f"{count} {kind}" for kind, count in run.comparison.kinds.items()) or "none"
        log.info("Namespace %s, questions compared: %s: %s", run.namespace, kinds, what)
        self._ended[run.namespace] = EndedRun(run.version, run.queries.retriever, run.usable, run.logged)
        self._run = None


def _keep(state: Path, row: rows.Row) -> None:
    """Append a row without texts, which would outlive their documents."""
    with rows.appending(state / "rows-idle.jsonl") as append:
        append(rows.without_texts(row))
