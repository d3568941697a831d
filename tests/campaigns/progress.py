"""The progress of a campaign, in a state file: a campaign that was killed goes on at the next operation."""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from ragserve.errors import RagserveError
from ragserve.files import write_json

_SAVE_S = 1.0
_SHOWN_VIOLATIONS = 50  # texts that the state keeps; all are counted


class Progress:
    """Counts of one campaign, saved to ``folder / "state.json"``.

    A state of another seed, of another target or of a finished run is begun anew. ``data`` is the campaign's
    own and must be JSON. ``folder`` is its working folder."""

    def __init__(
        self, folder: Path, name: str, *, seed: int, target: int | None, minutes: float | None = None
    ) -> None:
        self.folder, self.name, self.seed, self.target, self.minutes = folder, name, seed, target, minutes
        self.operations = self.n_violations = 0
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []
        self.data: dict[str, Any] = {}
        self._before = 0.0
        self._began = self._saved = time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "state.json"
        self.resumed = self._load()

    def _load(self) -> bool:
        try:
            state = json.loads(self._file.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return False
        if state["finished"] or (state["seed"], state["target"]) != (self.seed, self.target):
            return False
        self.operations, self.n_violations = state["operations"], state["n_violations"]
        self.counts, self.violations = Counter(state["counts"]), state["violations"]
        self._before, self.data = state["seconds"], state["data"]
        return True

    @property
    def seconds(self) -> float:
        """Time spent, that of earlier processes included."""
        return self._before + time.monotonic() - self._began

    def goes_on(self) -> bool:
        """Return whether there is an operation left, and time for it."""
        if self.target is not None and self.operations >= self.target:
            return False
        return self.minutes is None or self.seconds < 60 * self.minutes

    def random(self) -> random.Random:
        """The randomness of the operation at hand: it depends on seed and number alone."""
        return random.Random(f"{self.name} {self.seed} {self.operations}")

    @contextmanager
    def operation(self, kind: str, n: int = 1) -> Iterator[None]:
        """Count ``n`` operations of a kind. A failed assertion, a failed request or an error that users would
        see inside the block is a violation, and the campaign goes on."""
        try:
            yield
        except (AssertionError, httpx.HTTPError, RagserveError) as error:
            self.violation(f"{kind}: {type(error).__name__}: {error}")
        self.counts[kind] += n
        self.operations += n
        if time.monotonic() - self._saved > _SAVE_S:
            self.save()

    def violation(self, text: str) -> None:
        self.n_violations += 1
        said = f"operation {self.operations}, {text}"
        print(said, file=sys.stderr, flush=True)
        if len(self.violations) < _SHOWN_VIOLATIONS:
            self.violations.append(said[:1000])

    def save(self, *, finished: bool = False) -> None:
        self._saved = time.monotonic()
        state = {
            "campaign": self.name,
            "seed": self.seed,
            "target": self.target,
            "operations": self.operations,
            "seconds": self.seconds,
            "counts": dict(self.counts),
            "n_violations": self.n_violations,
            "violations": self.violations,
            "data": self.data,
            "finished": finished,
        }
        write_json(self._file, state)
