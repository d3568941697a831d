"""Strategy `auto` as the context benchmark measures it: calibrated by the samples of the same run."""

from __future__ import annotations

import contextlib
import logging
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ragserve.answering.auto import Chooser
from ragserve.answering.prompt import Prompt, Segment
from ragserve.engine.base import GenerateRequest
from ragserve.profiles.costs import COSTS, FILE_NAME, CostSample, costs_here, fit
from ragserve.profiles.gate import Gate
from ragserve.strategy_spec import StrategySpec
from ragserve.verification.costs import CostSchedule, measure
from ragserve.verification.report import measured_on

log = logging.getLogger(__name__)


class _Forced(Gate):
    """A gate that takes some strategies for verified: with random weights there is no quality to verify."""

    def __init__(self, labels: Sequence[str]) -> None:
        super().__init__((), "", model="", dtype="")
        self._labels = labels

    def verified(self, namespace: str | None = None) -> list[str]:
        return list(self._labels)


async def measured_chooser(engine: Any, place: Path, spec: StrategySpec, schedule: CostSchedule) -> Chooser:
    """A chooser by the costs in the file ``place``, which are measured now if it has none. ``spec`` counts as
    verified."""
    if costs_here(place, engine.info.fingerprint, engine.info.device) is None:
        samples = await measure(engine, [spec], schedule, log.info)
        costs = fit(samples, **measured_on(engine.info.model))
        COSTS.save(place, engine.info.fingerprint, costs)
    return Chooser(engine, _Forced([spec.label]), place)


@contextlib.contextmanager
def chooser(engine: Any, samples: Sequence[CostSample]) -> Iterator[Chooser]:
    """Yield a chooser calibrated by ``samples``, with all their strategies verified. Raises InvalidRequest if
    too few samples are of exact prefill."""
    with tempfile.TemporaryDirectory(prefix="ragserve-auto-") as folder:
        place = Path(folder) / FILE_NAME
        costs = fit(samples, model="", hardware="", date=time.strftime("%Y-%m-%d"))
        COSTS.save(place, engine.info.fingerprint, costs)
        yield Chooser(engine, _Forced(list(costs.composed)), place)


def prompt_of(request: GenerateRequest, question: Sequence[int]) -> Prompt:
    """The prompt of a benchmark's request followed by a question."""
    segments = [
        Segment("document" if number else "system", span.start, span.end)
        for number, span in enumerate(request.spans)
    ]
    whole = [*request.input_ids, *question]
    segments.append(Segment("question", len(request.input_ids), len(whole)))
    return Prompt(whole, tuple(segments), len(request.spans) - 1, 0, 0)
