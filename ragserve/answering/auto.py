"""Strategy `auto`: pick the exact or verified composed strategy with the lowest expected TTFT."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ragserve.answering.prompt import Prompt
from ragserve.engine.base import Engine
from ragserve.engine.document_cache import CachingEngine, answering
from ragserve.errors import RagserveError
from ragserve.profiles.costs import ABSENT, COSTS, Costs
from ragserve.profiles.gate import Gate
from ragserve.profiles.in_use import InUseRecord
from ragserve.strategy_spec import StrategySpec, keeps_whole, parse
from sglang_ext.wire.protocol import EXACT_STRATEGIES, pieces_of

AUTO = "auto"
MIN_GAIN = 0.05  # composed contexts are approximate: a smaller gain is not worth it
_EXACT = StrategySpec("prefix")


@dataclass(frozen=True, slots=True)
class StrategyChoice:
    """The chosen strategy, and the reason."""

    spec: StrategySpec
    reason: str


@dataclass(frozen=True, slots=True)
class Candidates:
    """What a namespace's requests may be answered by beside ``prefix``. Without ``labels``, ``reason`` says
    why there are none."""

    labels: tuple[str, ...] = ()
    costs: Costs | None = None
    reason: str = ""

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
        stamp = self._costs_file.stat().st_mtime_ns if self._costs_file.exists() else 0
        if stamp != self._stamp:
            self._costs, self._stamp = COSTS.load(self._costs_file, self._engine.info.fingerprint), stamp
        return self._costs

    def candidates(self, namespace: str) -> Candidates:
        """Find what may answer in a namespace. Asks nothing of the engine."""
        try:
            return self._candidates(namespace)
        except RagserveError as error:  # a broken profile
            return Candidates(reason=str(error))

    async def choose(
        self, prompt: Prompt, namespace: str, candidates: Candidates | None = None, *, whole: bool = False
    ) -> StrategyChoice:
        """Choose for one prompt, among ``candidates`` if they are known already; with ``whole`` only among
        strategies that keep whole documents. The choice is exact, and the reason says what to do, where
        nothing is verified or measured, or the engine cannot be asked; and where the prompt is offloaded
        because the KV pool cannot take it."""
        if len(prompt.input_ids) > self._engine.info.max_prompt_tokens:
            return StrategyChoice(_EXACT, "the prompt is larger than the KV pool: it is prefilled")
        found = self.candidates(namespace) if candidates is None else candidates
        if found.costs is None or not isinstance(self._engine, CachingEngine):
            return StrategyChoice(_EXACT, found.reason)
        labels = [label for label in found.labels if not whole or keeps_whole(parse(label)[0])]
        if not labels:
            return StrategyChoice(_EXACT, "no verified strategy keeps documents whole, as a session needs")
        try:
            return await self._sooner(prompt, namespace, self._engine, found.costs, labels, shared=not whole)
        except RagserveError as error:  # a cache that does not answer
            return StrategyChoice(_EXACT, str(error))

    def _candidates(self, namespace: str) -> Candidates:
        info = self._engine.info
        if set(info.strategies) <= set(EXACT_STRATEGIES):
            return Candidates(reason=info.only_exact or "the engine serves exact strategies only")
        if not isinstance(self._engine, CachingEngine):
            return Candidates(reason="the engine does not report its cache")
        run = f"run ragserve tune --namespace {namespace}"
        progress = self._idle_tuning(namespace)
        tune = run if progress is None else f"{run}, or wait: {progress}"
        known = self._gate.verified(namespace)
        specs = {label: parse(label)[0] for label in known}
        verified = [
            label
            for label, spec in specs.items()
            if spec.name in info.strategies and not spec.chooses_passages  # the prompt has them all
        ]
        if not verified:
            return Candidates(reason=f"no composed strategy is verified here: {tune}")
        out = set() if self._in_use is None else self._in_use.taken_out(namespace)
        left = [label for label in verified if label not in out]
        if not left:
            names = "; ".join(verified)
            return Candidates(reason=f"{names} differed too much from full prefill in use: {run}")
        costs = self._profile()
        if costs is None:
            return Candidates(reason=f"no cost profile of this machine: {tune}")
        calibrated = tuple(label for label in left if label in costs.composed)
        if not calibrated:
            return Candidates(reason=f"calibrated is none of the verified {'; '.join(left)}: {tune}")
        return Candidates(calibrated, costs)

    async def _sooner(
        self,
        prompt: Prompt,
        namespace: str,
        engine: CachingEngine,
        costs: Costs,
        labels: Sequence[str],
        *,
        shared: bool,
    ) -> StrategyChoice:
        """The strategy with the lowest expected TTFT, by where the prompt and its documents are cached. A
        session does not use the ``shared`` prefix cache of its namespace."""
        pieces = pieces_of(prompt.input_ids, prompt.spans)
        engine = answering(engine, namespace, pieces)
        tiers = (await engine.where(namespace, pieces)).fastest()
        cached = await engine.prefix(namespace, prompt.input_ids) if shared else 0
        exact = costs.exact_ms(len(prompt.input_ids), cached)
        documents = [(len(piece), tier) for piece, tier in zip(pieces, tiers, strict=True)]
        label, composed = min(
            ((label, costs.composed_ms(label, documents)) for label in labels), key=lambda pair: pair[1]
        )
        missing = tiers.count(ABSENT)
        uncached = f", {missing} of {len(documents)} documents cached nowhere: ragserve docs warm"
        facts = (
            f"{label} {composed:.0f} ms, prefix {exact:.0f} ms ({cached} of {len(prompt.input_ids)} tokens "
            f"in the prefix cache{uncached if missing else ''})"
        )
        if composed <= (1 - MIN_GAIN) * exact:
            return StrategyChoice(parse(label)[0], f"expected {facts}")
        return StrategyChoice(_EXACT, f"expected {facts}: exact unless composed is {MIN_GAIN:.0%} faster")
