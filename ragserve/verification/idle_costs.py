"""Measure in an idle server what verified strategies cost, one after the other and case by case."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ragserve.config import Settings
from ragserve.errors import RagserveError
from ragserve.profiles.costs import FILE_NAME, Costs, add_costs, costs_here, fit
from ragserve.profiles.gate import EXACT, Gate
from ragserve.strategy_spec import parse
from ragserve.verification.costs import CostEngine, CostMeasurement, CostSchedule
from ragserve.verification.report import measured_on

log = logging.getLogger(__name__)
_AFTER_ERROR_S = 60.0  # before a strategy is tried again; twice as long after each failure
_ENOUGH = 4096  # tokens: longest context that is measured


class IdleCosts:
    """Writes the cost profile. Belongs to one event loop."""

    def __init__(
        self, settings: Settings, engine: CostEngine, gate: Gate, clock: Callable[[], float]
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._gate = gate
        self._place = settings.data_dir / FILE_NAME
        self._measurement: CostMeasurement | None = None
        self._clock = clock
        self._failures: dict[str, tuple[int, float]] = {}  # how many, and until when to wait, by strategy
        self.measuring: str | None = None
        """The strategy that is being measured."""
        self.first = False
        """No composed strategy's costs were known when it was chosen: until then `auto` can take none."""

    def next(self) -> str | None:
        """The strategy to measure: the one that is being measured, else of those verified whose costs are
        unknown the one that recomputes least, so that users have the fastest one soonest. What failed waits.
        None if there is none. Reads files."""
        if self.measuring is not None:
            return self.measuring
        known = self._known()
        self.first = known is None or not known.composed
        unknown = set(self._gate.to_price()) - ({EXACT, *known.composed} if known else set())
        left = [label for label in unknown if self._failures.get(label, (0, 0.0))[1] <= self._clock()]
        return min(left, key=lambda label: (_recomputed(label), label), default=None)

    async def step(self, label: str) -> None:
        """Measure a case of a strategy, and write what it costs after the last one. A step that is cancelled
        is done again. Raises RagserveError, and OSError where the profile cannot be written."""
        try:
            if self._measurement is None:
                self._measurement, self.measuring = self._begun(label), label
            if not self._measurement.finished:
                await self._measurement.step()
            if not self._measurement.finished:
                return
            found = await asyncio.to_thread(
                fit, self._measurement.samples, **measured_on(self._settings.model)
            )
        except RagserveError:
            before, _ = self._failures.get(label, (0, 0.0))
            self._failures[label] = before + 1, self._clock() + _AFTER_ERROR_S * 2 ** (before + 1)
            self._measurement = self.measuring = None
            raise
        info = self._engine.info
        await asyncio.to_thread(add_costs, self._place, info.fingerprint, info.device, found)
        self._measurement = self.measuring = None
        self._failures.pop(label, None)
        log.info("Costs of %s were measured: strategy auto may take it", label)

    def _known(self) -> Costs | None:
        info = self._engine.info
        return costs_here(self._place, info.fingerprint, info.device)

    def _begun(self, label: str) -> CostMeasurement:
        settings = self._settings
        longest = min(_ENOUGH, max(1024, 2 * settings.top_k * settings.chunk_tokens))
        schedule = CostSchedule(max_tokens=longest, repeats=1)
        specs = [] if label == EXACT else parse(label)
        return CostMeasurement(self._engine, specs, schedule, log.debug)


def _recomputed(label: str) -> float:
    """The share of the tokens that a strategy recomputes, as far as its options say."""
    options = parse(label)[0].options
    return float(options.get("share", 1.0)) * float(options.get("keep", 1.0))
