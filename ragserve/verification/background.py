"""A server's own verification: of answers in use, and of what nothing is known of yet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ragserve.answering.in_flight import Idleness
from ragserve.profiles.gate import Gate, set_of
from ragserve.profiles.in_use import InUseRecord
from ragserve.verification.answer_watch import AnswerWatch
from ragserve.verification.dropped import forget_or_log
from ragserve.verification.idle_tuner import IdleTuner
from ragserve.verification.idle_worker import IdleWorker

_SHOWN = 200  # strategies and namespaces in `/info`
_FIGURES = (
    *("score", "score_vs_full", "margin", "different", "unsupported"),
    *("kept", "recomputed", "ttft_ms", "full_ttft_ms", "retriever"),
)


@dataclass(frozen=True, slots=True)
class BackgroundVerification:
    """``tuner``: None where nothing is to be tuned in idle time."""

    gate: Gate
    in_use: InUseRecord
    watch: AnswerWatch
    tuner: IdleTuner | None

    def progress(self, namespace: str) -> str | None:
        """Say how far the idle server is with what ``auto`` lacks in a namespace; None if it does nothing."""
        return None if self.tuner is None else self.tuner.progress(namespace)

    def info(self, visible: Callable[[str], bool] = lambda namespace: True) -> dict[str, Any]:
        """Describe both for `/info`; of the estimates the latest. ``visible`` tells of a namespace whether
        the caller may know of it."""
        every = [
            {"namespace": namespace, "strategy": label, **found.figures}
            for namespace, own in self.in_use.entries().items()
            if visible(namespace)
            for label, found in own.items()
        ]
        tuning = {"state": "off"} if self.tuner is None else self.tuner.info()
        if not visible(tuning.get("namespace", "")):
            tuning = {"state": tuning["state"]}
        return {
            "measured": list(islice(self._measured(visible), _SHOWN)),
            "in_use": list(islice(reversed(every), _SHOWN)),
            "waiting": self.watch.waiting,
            "dropped": self.watch.dropped,
            "idle_tuning": tuning,
        }

    def _measured(self, visible: Callable[[str], bool]) -> Iterator[dict[str, Any]]:
        """What was measured on namespaces' own questions: the map of quality over time, as far as it is
        decided."""
        for namespace in filter(visible, self.gate.namespaces()):
            verified = self.gate.verified(namespace)
            for label, entry in self.gate.entries(namespace).items():
                figures = entry.sets.get(set_of(namespace))
                if figures is not None:
                    yield {
                        "namespace": namespace,
                        "strategy": label,
                        "verified": label in verified,
                        "questions": figures.references or figures.n,
                        **{name: getattr(figures, name) for name in _FIGURES},
                    }

    async def dropped(self, data_dir: Path, namespace: str) -> None:
        """Forget what was measured in a namespace that was dropped. What cannot be removed is logged."""
        await asyncio.to_thread(forget_or_log, data_dir, namespace)

    @asynccontextmanager
    async def running(self, idleness: Idleness) -> AsyncIterator[None]:
        """Work while the block lasts and no request is being answered; answers in use come first."""
        sources = [self.watch.work] if self.tuner is None else [self.watch.work, self.tuner.work]
        async with IdleWorker(idleness, sources).running():
            yield
