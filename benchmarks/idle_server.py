"""Measure how long a server takes to become fast by itself: one with nothing verified, nothing measured and
no record beside the model, into whose data folder documents are ingested, and which nobody tunes. With
``--tune``, before it starts `ragserve tune` runs for so many minutes, and the server asks nothing by itself.

    .venv/bin/python -m benchmarks.idle_server --out benchmarks/results [--tune 10]

The embedded model is copied without its record. While the server is idle, `/info` is read, which does not
disturb it. Questions are asked by `auto` when the documents are in, and other ones when `auto` may take a
strategy, those each by `prefix`, too; composed KV never enters the prefix cache, so that answer is not helped
by the one before.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import httpx

from benchmarks.lib.places import CORPUS
from ragserve.config import DEFAULT_MODEL
from ragserve.engine.running_server import RunningServer, running_server
from ragserve.profiles.costs import FILE_NAME as COSTS_FILE
from ragserve.profiles.gate import EXACT
from ragserve.profiles.gate import FILE_NAME as GATE_FILE
from ragserve.verification.report import GrowingReport

NAMESPACE = "own"
BEFORE, AFTER = 3, 20  # questions
POLL_S = 1.0
NOTE = (
    "after s: since the server was ready. cpu s: CPU time of all its processes by then. compared: usable "
    "questions that every strategy still open was asked. composed: of the questions asked in this state. "
    "ttft ms: medians; those of prefix are of the questions that auto composed an answer to, asked again."
)


def without_record(work: Path) -> Path:
    """Copy the embedded model without what is known of it."""
    model = work / "ragserve-tiny"
    profiles = shutil.ignore_patterns("ragserve-*.json")
    shutil.copytree(DEFAULT_MODEL, model, ignore=profiles)
    return model


def questions(files: Sequence[Path]) -> Iterator[str]:
    """Questions about the files, of every kind in turn."""
    names = {file.name for file in files}
    lines = (CORPUS / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    about = [row["question"] for row in map(json.loads, lines) if names & set(row["documents"])]
    yield from about[:: len(about) // (BEFORE + AFTER)]


class Watched:
    """A server and the seconds since it was ready."""

    def __init__(self, server: RunningServer, client: httpx.Client, report: GrowingReport) -> None:
        self._server, self._client, self._report = server, client, report
        self._ready = time.monotonic()
        self.last: dict[str, Any] = {}  # state of the idle tuner
        self._compared: int | None = None

    @property
    def after_s(self) -> float:
        return time.monotonic() - self._ready

    def look(self) -> dict[str, Any]:
        """Read `/info`."""
        info: dict[str, Any] = self._client.get("/info").raise_for_status().json()
        self.last = info["verification"]["idle_tuning"]
        self._compared = self.last.get("compared", self._compared)
        return info

    def add(self, state: str, **figures: Any) -> None:
        """Add a row."""
        spent = {"after s": round(self.after_s), "cpu s": round(self._server.cpu_seconds())}
        self._report.add({"state": state, **spent, "compared": self._compared, **figures})

    def asked(self, some: Sequence[str]) -> dict[str, Any]:
        """Ask questions by `auto`, and by `prefix` those that it composed an answer to."""
        auto, composed, exact = [], [], []
        for question in some:
            auto.append(answer := self._ask(question, "auto"))
            if answer["context"]["strategy"] != "prefix":
                composed.append(answer)
                exact.append(self._ask(question, "prefix"))
        return {
            "asked": len(some),
            "composed": len(composed),
            "auto ttft ms": _median_ttft(composed or auto),
            "prefix ttft ms": _median_ttft(exact) if exact else None,
            "choice": auto[-1]["context"]["choice"],
        }

    def _ask(self, question: str, strategy: str) -> dict[str, Any]:
        body = {"query": question, "namespace": NAMESPACE, "strategy": strategy, "max_new_tokens": 16}
        answer: dict[str, Any] = self._client.post("/rag/query", json=body).raise_for_status().json()
        return answer


def _median_ttft(answers: Sequence[dict[str, Any]]) -> float:
    return round(statistics.median(answer["timings"]["ttft_ms"] for answer in answers), 1)


def measure(
    watched: Watched, data_dir: Path, ingest: Sequence[str], asked: Iterator[str], most_s: float
) -> None:
    """Add a row for each state that the server reaches by itself."""
    subprocess.run(ingest, check=True)
    watched.look()
    watched.add("documents ingested", **watched.asked(list(islice(asked, BEFORE))))
    decided: dict[str, str] = {}
    warmed = verifying = False
    while watched.after_s < most_s and not (data_dir / COSTS_FILE).exists():
        info = watched.look()
        state = watched.last["state"]
        verifying = verifying or state == "verifying"
        if not warmed and not info["warming"]["jobs"]:
            warmed = True
            watched.add("their KV computed")
        found = dict.fromkeys(watched.last["strategies"], "verified") if state == "measuring costs" else {}
        for label, decision in (found | watched.last.get("decided", {})).items():
            if label not in (EXACT, *decided):
                decided[label] = decision
                watched.add(f"{label} {decision}")
        if verifying and state == "waiting":
            break  # it has asked all that it may
        time.sleep(POLL_S)
    known = (data_dir / COSTS_FILE).exists()
    watched.add(
        "what it costs is known" if known else "given up", **watched.asked(list(islice(asked, AFTER)))
    )


def tune(report: GrowingReport, data_dir: Path, model: Path, top_k: int, minutes: float) -> None:
    """Run `ragserve tune`, and add a row with its last lines."""
    command = [sys.executable, "-m", "ragserve.cli", "tune", "--namespace", NAMESPACE]
    command += ["--minutes", str(minutes), "--top-k", str(top_k)]
    command += ["--data-dir", str(data_dir), "--model", str(model)]
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    print(ran.stdout, flush=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    spent = {"after s": round(time.monotonic() - began), "cpu s": round(cpu_s)}
    said = next(line for line in ran.stdout.splitlines() if line.startswith(f"{NAMESPACE}: of "))
    report.add({"state": "tuned", **spent, "compared": None, "choice": said})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for idle-server.json")
    parser.add_argument("--top-k", type=int, default=5, help="passages of a question")
    parser.add_argument("--files", type=int, default=40, help="files of the corpus")
    parser.add_argument("--chunk-tokens", type=int, default=256, help="tokens of a passage at most")
    parser.add_argument("--minutes", type=float, default=60, help="most to wait")
    parser.add_argument("--tune", type=float, help="minutes of ragserve tune; the server does nothing then")
    options = parser.parse_args()
    out = options.out and options.out / ("tuned-server.json" if options.tune else "idle-server.json")
    report = GrowingReport("idle-server", out, note=NOTE)
    with tempfile.TemporaryDirectory(prefix="ragserve-idle-") as folder:
        model, data_dir = without_record(Path(folder)), Path(folder) / "data"
        files = sorted((CORPUS / "files").iterdir())[: options.files]
        own = {"model": model, "top_k": options.top_k, "chunk_tokens": options.chunk_tokens}
        ingest = [sys.executable, "-m", "ragserve.cli", "ingest", *map(str, files)]
        ingest += ["--namespace", NAMESPACE, "--data-dir", str(data_dir), "--model", str(model)]
        ingest += ["--chunk-tokens", str(options.chunk_tokens)]
        report.workload |= {"model": "ragserve-tiny without its record", "files": len(files)}
        report.workload |= {"k": options.top_k, "chunk tokens": options.chunk_tokens}
        if options.tune:
            report.workload["tune minutes"] = options.tune
            subprocess.run(ingest, check=True)
            tune(report, data_dir, model, options.top_k, options.tune)
        elif (data_dir / GATE_FILE).exists() or (data_dir / COSTS_FILE).exists():
            raise RuntimeError("the server knows something already")
        idle = not options.tune
        with (
            running_server(data_dir=data_dir, idle_tuning=idle, verify_share=0.01, **own) as server,
            server.client() as client,
        ):
            watched = Watched(server, client, report)
            if idle:
                measure(watched, data_dir, ingest, questions(files), 60 * options.minutes)
            else:
                watched.add("serving", **watched.asked(list(islice(questions(files), AFTER))))
    report.show()


if __name__ == "__main__":
    main()
