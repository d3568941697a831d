"""Strategy `auto`: pick the exact or verified composed strategy with the lowest expected TTFT."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ragserve.answering.chosen_passages import ChosenPassages
from ragserve.answering.prompt import Prompt
from ragserve.answering.query import Query
from ragserve.best_passages import PASSAGES, PassagesOptions, choice_of
from ragserve.engine.base import Engine
from ragserve.engine.document_cache import CachingEngine, answering, fastest_tiers, most_cached
from ragserve.errors import RagserveError
from ragserve.profiles.costs import ABSENT, Costs, costs_here
from ragserve.profiles.file import changed_at
from ragserve.profiles.gate import Gate
from ragserve.profiles.in_use import InUseRecord
from ragserve.strategy_spec import StrategySpec, keeps_whole, parse, reads_as_many, without_passages
from sglang_ext.wire.joint_names import names_of
from sglang_ext.wire.protocol import pieces_of

AUTO = "auto"
MIN_GAIN = 0.05  # what is chosen is not what was asked for: a smaller gain is not worth it
_EXACT = StrategySpec("prefix")
ChoosePassages = Callable[[PassagesOptions], Awaitable[ChosenPassages]]
"""Chooses among the passages that were found for the question."""


@dataclass(frozen=True, slots=True)
class StrategyChoice:
    """The chosen strategy, and the reason; ``passages``: those that it reads, None for all."""

    spec: StrategySpec
    reason: str
    passages: ChosenPassages | None = None


@dataclass(frozen=True, slots=True)
class Candidates:
    """What a namespace's requests may be answered by beside ``prefix``; of several, what is verified in each.
    Without ``labels``, ``reason`` says why there are none."""

    labels: tuple[str, ...] = ()
    costs: Costs | None = None
    reason: str = ""
    bases: Mapping[str, str] = field(default_factory=dict)  # what each is verified by, in words

    def include(self, strategy: str) -> bool:
        """Return whether a strategy, with any options, is among them."""
        return any(parse(label)[0].name == strategy for label in self.labels)


class Chooser:
    """Chooses for one engine.

    The only exact candidate is ``prefix``: like ``full``, but it reuses the cache."""

    def __init__(
        self,
        engine: Engine,
        gate: Gate,
        costs_file: Path,
        in_use: InUseRecord | None = None,
        idle_tuning: Callable[[str], str | None] = lambda namespace: None,
    ) -> None:
        """``costs_file`` is written by `ragserve tune` or `calibrate` and read again when it changes.
        ``in_use``: what answered requests have shown. ``idle_tuning`` says how far the idle server is with
        what a namespace lacks; None if it does nothing about it."""
        self._in_use = in_use
        self._idle_tuning = idle_tuning
        self._engine = engine
        self._gate = gate
        self._costs_file = costs_file
        self._stamp = 0
        self._costs: Costs | None = None

    def _profile(self) -> Costs | None:
        stamp = changed_at(self._costs_file)
        if stamp != self._stamp:
            info = self._engine.info
            self._costs = costs_here(self._costs_file, info.fingerprint, info.device)
            self._stamp = stamp
        return self._costs

    def candidates(self, namespace: str, query: Query | None = None) -> Candidates:
        """Find what may answer a query in a namespace: what was verified by such a search. Without a query,
        what is verified by the namespace's usual one. Asks nothing of the engine."""
        try:
            return self._candidates(namespace, query)
        except RagserveError as error:  # a broken profile
            return Candidates(reason=str(error))

    async def choose(
        self,
        prompt: Prompt,
        namespace: str,
        candidates: Candidates | None = None,
        *,
        whole: bool = False,
        shared: bool = True,
        choose: ChoosePassages | None = None,
    ) -> StrategyChoice:
        """Choose for one prompt of all passages, among ``candidates`` if they are known already; with
        ``whole`` only among strategies that keep whole documents, and without ``choose`` among those that
        read all. ``shared``: the prompt uses the prefix cache of its namespace.

        The choice is exact, and the reason says what to do, where nothing is verified or measured, or the
        engine cannot be asked; and where the prompt is offloaded because the KV pool cannot take it."""
        if len(prompt.input_ids) > self._engine.info.max_prompt_tokens:
            return StrategyChoice(_EXACT, "the prompt is larger than the KV pool: it is prefilled")
        found = self.candidates(namespace) if candidates is None else candidates
        if found.costs is None or not isinstance(self._engine, CachingEngine):
            return StrategyChoice(_EXACT, found.reason)
        labels = [label for label in found.labels if not whole or keeps_whole(parse(label)[0])]
        if not labels:
            why = "no verified strategy keeps documents whole, as sessions and given documents need"
            return StrategyChoice(_EXACT, why)
        if choose is None:
            labels = [label for label in labels if not parse(label)[0].chooses_passages]
        try:
            return await self._soonest(
                prompt, namespace, self._engine, found, found.costs, labels, choose, shared=shared
            )
        except RagserveError as error:  # a cache that does not answer
            return StrategyChoice(_EXACT, str(error))

    def _candidates(self, namespace: str, query: Query | None) -> Candidates:
        if not isinstance(self._engine, CachingEngine):
            return Candidates(reason="the engine does not report its cache")
        names = names_of(namespace)
        each = [self._candidates_in(name, query) for name in names]
        lacking = next((one for one in each if not one.labels), None)
        if lacking is not None:
            return lacking
        labels = [label for label in each[0].labels if all(label in one.labels for one in each)]
        if not labels:
            return Candidates(reason="no strategy is verified in all of these namespaces")
        if len(names) == 1:
            return each[0]
        bases = {
            label: "; ".join(f"{name}: {one.bases[label]}" for name, one in zip(names, each, strict=True))
            for label in labels
        }
        return Candidates(tuple(labels), each[0].costs, bases=bases)

    def _candidates_in(self, namespace: str, query: Query | None) -> Candidates:
        """Those of one namespace."""
        info, usual = self._engine.info, None if query is None else query.usual
        gate = self._gate if usual is None else self._gate.searched_by(usual.retriever)
        run = f"run ragserve tune --namespace {namespace}"
        progress = self._idle_tuning(namespace)
        tune = run if progress is None else f"{run}, or wait: {progress}"
        known = gate.verified(namespace)
        verified = [label for label in known if parse(label)[0].name in (*info.strategies, PASSAGES)]
        if not verified:
            return Candidates(reason=info.only_exact or f"no strategy is verified here: {tune}")
        if query is not None and usual is not None and not query.is_usual:
            fewer, entries = usual.is_like(query.search), gate.entries(namespace)
            alike = [
                label
                for label in verified
                if not entries[label].retrievers or (fewer and reads_as_many(parse(label)[0]))
            ]
            if not alike:
                names = "; ".join(verified)
                return Candidates(reason=f"{names} verified here by another search: {usual.retriever}")
            verified = alike
        by = None if usual is None else usual.retriever
        out = set() if self._in_use is None else self._in_use.taken_out(namespace, by)
        left = gate.good([label for label in verified if label not in out], namespace)
        if not left:
            names = "; ".join(verified)
            return Candidates(reason=f"{names} differed too often from full prefill in use: {run}")
        costs = self._profile()
        if costs is None:
            return Candidates(reason=f"no cost profile of this machine: {tune}")
        calibrated = tuple(label for label in left if _priced(label, costs))
        if not calibrated:
            return Candidates(reason=f"calibrated is none of the verified {'; '.join(left)}: {tune}")
        return Candidates(calibrated, costs, bases={name: gate.basis(name, namespace) for name in calibrated})

    async def _soonest(
        self,
        prompt: Prompt,
        namespace: str,
        engine: CachingEngine,
        found: Candidates,
        costs: Costs,
        labels: Sequence[str],
        choose: ChoosePassages | None,
        *,
        shared: bool,
    ) -> StrategyChoice:
        """The strategy with the lowest expected TTFT, by where the prompt and its documents are cached."""
        pieces = pieces_of(prompt.input_ids, prompt.spans)
        owners = prompt.owners(namespace)
        engine = answering(engine, namespace, pieces, owners)
        specs = [parse(label)[0] for label in labels]

        async def places() -> list[str]:
            if all(spec.name == PASSAGES for spec in specs):  # prefilled, wherever its KV is
                return [ABSENT] * len(pieces)
            return await fastest_tiers(engine, namespace, pieces, owners)

        ids = prompt.input_ids
        most = most_cached(engine, namespace, ids) if shared else 0

        async def prefix() -> int:
            return most if most < len(ids) else await engine.prefix(namespace, ids)

        async def passages() -> list[ChosenPassages | None]:
            options = [choice_of(spec.name, spec.options)[0] for spec in specs]
            return [None if each is None or choose is None else await choose(each) for each in options]

        tiers, cached, every = await asyncio.gather(
            places(), prefix(), passages()
        )  # chosen while it is asked
        documents = [(len(piece), tier) for piece, tier in zip(pieces, tiers, strict=True)]
        expected: list[tuple[float, StrategySpec, ChosenPassages | None]] = []
        for spec, chosen in zip(specs, every, strict=True):
            read = documents
            if chosen is not None:  # the system text is the first piece
                read = [
                    documents[0],
                    *(documents[n + 1] for n in chosen.order[: chosen.kept] if n + 1 < len(documents)),
                ]
            if spec.name == PASSAGES:
                left = sum(tokens for tokens, _ in documents) - sum(tokens for tokens, _ in read)
                ms = costs.exact_ms(len(ids) - left)
            else:
                ms = costs.composed_ms(without_passages(spec).label, read)
            expected.append((ms, spec, chosen))
        if not expected:
            return StrategyChoice(_EXACT, "no verified strategy reads all passages")
        ms, spec, chosen = min(expected, key=lambda each: each[0])
        exact, bound = costs.exact_ms(len(ids), cached), "at most " if 0 < most < len(ids) else ""
        if bound and ms > (1 - MIN_GAIN) * exact:
            cached, bound = await engine.prefix(namespace, ids), ""
            exact = costs.exact_ms(len(ids), cached)
        missing = tiers.count(ABSENT)
        uncached = f", {missing} of {len(documents)} documents cached nowhere: ragserve docs warm"
        facts = (
            f"{spec.label} {ms:.0f} ms, prefix {exact:.0f} ms ({bound}{cached} of {len(ids)} tokens "
            f"in the prefix cache{uncached if missing and spec.name != PASSAGES else ''})"
        )
        if ms > (1 - MIN_GAIN) * exact:
            return StrategyChoice(_EXACT, f"expected {facts}: exact unless another is {MIN_GAIN:.0%} faster")
        kept = f"all {len(documents) - 1}"  # beside the system text
        if chosen is not None:
            kept = f"the best {chosen.kept} of {len(chosen.order)}"
        return StrategyChoice(spec, f"expected {facts}; {kept} passages; {found.bases[spec.label]}", chosen)


def _priced(label: str, costs: Costs) -> bool:
    spec = parse(label)[0]
    return spec.name == PASSAGES or without_passages(spec).label in costs.composed
