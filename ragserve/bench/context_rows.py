"""The context benchmark's rows as they come, on the console and in the report's file."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ragserve.measuring import report
from ragserve.profiles.costs import CostSample

NOTE = (
    "Milliseconds, medians. queue: in SGLang's queue, without load (waiting for the disk), query (SamKV's query pass) and select;"
    " compose, ask (what the question attends to), recompute and extend (of one pass the first has the question, too, the second its"
    " logits): the work on the device; other: messages between processes, admission, launching, sampling and the way back."
    " Rows of one run were measured together, in turn. Random weights where the model is only a shape: the answers mean nothing."
)
_EXACT = ("full", "prefix, question new")
_PLACE = ("context tokens", "document tokens", "strategy", "tier")


class Measured:
    """Rows so far; ``full_ms`` is the time of strategy `full` by length."""

    def __init__(self, out: Path | None, workload: dict[str, Any], merge: Path | None = None) -> None:
        """``merge``: an earlier report. Its rows stay where this run has none, each with the run that it
        comes from.
        """
        self.workload = workload
        self.full_ms: dict[int, float] = {}
        self.failed: list[str] = []
        self._out = out
        self._started = time.monotonic()
        self._run = time.strftime("%Y-%m-%d %H:%M")
        earlier = (
            json.loads(merge.read_text(encoding="utf-8")) if merge is not None and merge.exists() else {}
        )
        self._earlier: list[dict[str, Any]] = earlier.get("rows", [])
        self._profiles: list[dict[str, Any]] = []
        self._rows: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> None:
        """Print a row and write the report."""
        self._rows.append(row | {"run": self._run})
        if "error" in row:
            self.failed.append(row["error"])
        self._say(row)
        if self._out is not None:
            report.save(self._report(), self._out)

    def add_profile(self, profile: dict[str, Any]) -> None:
        """Print what a request launched and write it beside the report."""
        self._profiles.append(profile)
        self._say(profile)
        if self._out is not None:
            report.save(
                {"run": self._run, "profiles": self._profiles},
                self._out.with_name(f"{self._out.stem}-profiles.json"),
            )

    def samples(
        self, labels: Mapping[str, str], system_tokens: int, question_tokens: int
    ) -> list[CostSample]:
        """This run's rows as `ragserve calibrate` would have measured them: exact ones, and those named in
        ``labels`` by their labels.
        """
        found = []
        for row in self._rows:
            if "error" in row:
                continue
            documents, ms, name = row["context tokens"], row["ttft ms"], row["strategy"]
            if name in _EXACT:
                prompt = system_tokens + documents + question_tokens
                found.append(
                    CostSample(prompt, ms, cached=0 if name == _EXACT[0] else system_tokens + documents)
                )
            elif name in labels:
                found.append(
                    CostSample(system_tokens + documents, ms, strategy=labels[name], tier=row["tier"])
                )
        return found

    def show(self) -> dict[str, Any]:
        """Print the table and write the report."""
        return report.write("context", self.workload, self._all(), out=self._out, note=NOTE)

    def _say(self, row: dict[str, Any]) -> None:
        print(
            f"{time.monotonic() - self._started:.0f} s  "
            + "  ".join(f"{name}: {value}" for name, value in row.items()),
            flush=True,
        )

    def _report(self) -> dict[str, Any]:
        return report.assemble("context", self.workload, self._all(), note=NOTE)

    def _all(self) -> list[dict[str, Any]]:
        """Earlier rows that this run did not measure, and its own, by document size and length."""
        done = {tuple(row.get(name) for name in _PLACE) for row in self._rows}
        kept = [row for row in self._earlier if tuple(row.get(name) for name in _PLACE) not in done]
        return sorted([*kept, *self._rows], key=lambda row: (row["document tokens"], row["context tokens"]))
