"""Is strategy `auto` ever slower than `full`? It chooses for short contexts with a cost model fitted to what
the same run measured.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ragserve.answering.auto import Chooser
from ragserve.answering.prompt import Prompt, Segment
from ragserve.engine.base import GenerateRequest
from ragserve.profiles.costs import COSTS, FILE_NAME, CostSample, fit
from ragserve.profiles.gate import Gate


class _Forced(Gate):
    """Lets these strategies pass as verified: with random weights there is no quality to verify."""

    def __init__(self, labels: Sequence[str]) -> None:
        super().__init__((), "", model="", dtype="")
        self._labels = labels

    def verified(self) -> list[str]:
        return list(self._labels)


@contextlib.contextmanager
def chooser(engine: Any, samples: Sequence[CostSample]) -> Iterator[Chooser]:
    """What `auto` asks where it is calibrated by ``samples`` and all strategies in them are verified.

    Raises InvalidRequest where there are too few of exact prefill.
    """
    with tempfile.TemporaryDirectory(prefix="ragserve-auto-") as folder:
        place = Path(folder) / FILE_NAME
        COSTS.save(
            place,
            engine.info.fingerprint,
            fit(samples, model="", hardware="", date=time.strftime("%Y-%m-%d")),
        )
        yield Chooser(
            engine, _Forced(list({sample.strategy for sample in samples if sample.strategy})), place
        )


def prompt_of(request: GenerateRequest, question: Sequence[int]) -> Prompt:
    """The prompt of a benchmark's request with this question behind it."""
    segments = [
        Segment("document" if number else "system", span.start, span.end)
        for number, span in enumerate(request.spans)
    ]
    whole = [*request.input_ids, *question]
    segments.append(Segment("question", len(request.input_ids), len(whole)))
    return Prompt(whole, tuple(segments), len(request.spans) - 1, 0, 0)
