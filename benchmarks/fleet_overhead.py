"""What a fleet costs a request: the same queries to a server with an engine of its own, and to a server in
front of one worker, in turns.

    python -m benchmarks.fleet_overhead [OUT.json] [--queries 500]

Both have the embedded model and the example corpus. Prompts are in the prefix cache of both, and answers are
one token long, so that little is measured but the way to the engine and back."""

from __future__ import annotations

import argparse
import contextlib
import time
from pathlib import Path
from typing import Any

import httpx

from ragserve.bench.api import example_corpus
from ragserve.client import Client
from ragserve.engine.running_server import RunningServer, running_server
from ragserve.verification import report

KEY = "fleet-overhead"
QUESTIONS = tuple(
    f"What is the {what} of {country}?"
    for what in ("capital", "population", "area")
    for country in ("Norway", "Iceland", "Brazil", "Kenya")
)
OPTIONS = {"warm_ingested": False, "strategy": "prefix"}
NOTE = (
    "Milliseconds as one client sees them, both servers in turns, answers of one token, prompts in the "
    "prefix cache. more by fleet: the difference of two queries that follow each other."
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--queries", type=int, default=500)
    given = parser.parse_args()
    with contextlib.ExitStack() as stack:
        alone = stack.enter_context(running_server(**OPTIONS))
        worker = stack.enter_context(running_server(worker=True, api_key=KEY, kv_analysis="lazy"))
        env = {"RAGSERVE_ENGINE_API_KEY": KEY}
        front = stack.enter_context(running_server(env=env, workers=worker.url, **OPTIONS))
        ways = {
            name: stack.enter_context(way(server)) for name, server in (("alone", alone), ("fleet", front))
        }
        for question in QUESTIONS:
            for ask in ways.values():
                ask(question)
        ms: dict[str, list[float]] = {name: [] for name in ways}
        for n in range(given.queries):
            for name in sorted(ways, reverse=bool(n % 2)):
                ms[name].append(ways[name](QUESTIONS[n % len(QUESTIONS)]))
    ms["more by fleet"] = [two - one for one, two in zip(ms["alone"], ms["fleet"], strict=True)]
    rows = [
        {"what": name, "n": len(values), **{f"p{q} ms": report.percentile(values, q) for q in (10, 50, 90)}}
        for name, values in ms.items()
    ]
    workload = {"model": "ragserve-tiny", "strategy": "prefix", "k": 5, "max_new_tokens": 1}
    report.write("fleet overhead", workload, rows, out=given.out, note=NOTE)


@contextlib.contextmanager
def way(server: RunningServer) -> Any:
    """Ingest the example corpus, and give what asks a question there and returns milliseconds."""
    with server.client() as http, Client(server.url) as api, example_corpus(api, None) as namespace:

        def ask(question: str) -> float:
            body = {"query": question, "namespace": namespace, "k": 5, "max_new_tokens": 1}
            started = time.perf_counter()
            response = http.post("/rag/query", json=body)
            ended = time.perf_counter()
            if response.status_code != httpx.codes.OK:
                raise SystemExit(response.text)
            return (ended - started) * 1e3

        yield ask


if __name__ == "__main__":
    main()
