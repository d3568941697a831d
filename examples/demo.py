"""The whole product in one run: ingest real documents, serve them, answer three questions exactly and by what
`auto` chooses, then seven more, and say how many of the ten are right.

    scripts/demo            ingest, serve, ask, stop
    scripts/demo --serve    the same, but leave the server running

Exits with 1 if anything fails; a wrong answer is no failure.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ragserve.engine.running_server import RunningServer, running_server
from ragserve.errors import RagserveError
from ragserve.profiles.costs import FILE_NAME as COSTS_FILE
from ragserve.verification.metrics import contains_answer

REPO = Path(__file__).resolve().parent.parent
CORPUS = REPO / "examples" / "corpus" / "files"
NAMESPACE = "demo"
SHOWN = {
    "What is the capital of Norway?": "Oslo",
    "Who is the head of government of Finland?": "Orpo",
    "Who is the head of state of Netherlands?": "Willem-Alexander",
}
MORE = {
    "Which mountain of Kenya is the highest?": "Mount Kenya",
    "What do people pay with in Iceland?": "kronur",
    "How many people does Peru have?": "32,768,614",
    "Which tree is the national symbol of Cuba?": "royal palm",
    "In which year did Greece become an independent country?": "1830",
    "how long is the coast of belgium": "66.5",
    "WHAT IS THE INTERNET CODE OF MEXICO?": ".mx",
}
"""Questions, and the words that a right answer contains."""
PASSAGES = 20
FEW_PASSAGES = 5  # for the questions that are not shown in full
COMPOSED = {"strategy": "concat", "strategy_options": {"recompute": "sentences", "share": 0.15}}
COSTS_S = 900  # most seconds to wait for the server's measurement of what strategies cost
AS_SERVED = {"idle_tuning": True, "verify_share": 0.01}  # the defaults of `ragserve serve`
console = Console(highlight=False, soft_wrap=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--serve", action="store_true", help="leave the server running")
    parser.add_argument("--data-dir", type=Path, default=REPO / "ragserve-data", help="folder of the index")
    parser.add_argument(
        "--port", type=int, default=0, help="default: any free port, but 30000 with --serve if free"
    )
    options = parser.parse_args()
    started = time.monotonic()
    try:
        ingest(options.data_dir)
        console.rule("[bold]serve")
        port = options.port or (_default_port() if options.serve else 0)
        own = AS_SERVED if options.serve else {"idle_tuning": True}
        with running_server(data_dir=options.data_dir, port=port, outlive=options.serve, **own) as server:
            memory = server.resident_bytes() / 2**30
            console.print(
                f"{server.url} is ready after {server.start_s:.1f} s; its processes use {memory:.1f} GiB"
            )
            with server.client() as client:
                wait_for_costs(client, options.data_dir / COSTS_FILE)
                prepare(client)
                answers = {}
                for i, question in enumerate(SHOWN):
                    console.rule(f"[bold]{question}" + (" (streamed)" if i == 1 else ""))
                    answers[question] = chosen = (ask_streaming if i == 1 else ask)(client, question)
                    show(chosen)
                    compare(exact=ask(client, question, strategy="prefix"), auto=chosen)
                answers |= {question: ask(client, question, k=FEW_PASSAGES) for question in MORE}
                count_right(answers)
            console.rule()
            console.print(f"Everything worked, in {time.monotonic() - started:.0f} s.")
            if options.serve:
                server.detached = True
                goodbye(server)
    except (RagserveError, httpx.HTTPError, subprocess.CalledProcessError, DemoFailed) as error:
        console.print(f"[red]The demo failed:[/] {error}")
        return 1
    return 0


class DemoFailed(Exception):
    """The server gave no usable answer."""


def ingest(data_dir: Path) -> None:
    """Ingest the corpus with the command line. A second run finds the files unchanged."""
    console.rule("[bold]ingest examples/corpus")
    options = ["--recursive", "--namespace", NAMESPACE, "--data-dir", str(data_dir)]
    subprocess.run([sys.executable, "-m", "ragserve.cli", "ingest", str(CORPUS), *options], check=True)


def wait_for_costs(client: httpx.Client, costs: Path) -> None:
    """Let the server measure what strategies cost, as it does when idle, as long as it says that it is about
    to."""
    started, said = time.monotonic(), ""
    while not costs.exists() and time.monotonic() - started < COSTS_S:
        tuning = client.get("/info").raise_for_status().json()["verification"]["idle_tuning"]
        if tuning["state"] not in ("waiting", "measuring costs"):
            break
        doing = f"{tuning['state']} for {tuning['for']}" if "for" in tuning else tuning["state"]
        if doing not in ("waiting", said):
            console.print(f"The idle server is {doing} ...")
            said = doing
        time.sleep(0.2)
    known = "knows" if costs.exists() else "does not know yet"
    console.print(f"The idle server {known} what strategies cost here ({time.monotonic() - started:.0f} s).")


def prepare(client: httpx.Client) -> None:
    """Compute the KV of the passages that will be found."""
    started = time.monotonic()
    for question in SHOWN:
        ask(client, question, max_new_tokens=1, **COMPOSED)
    took = time.monotonic() - started
    console.print(f"The KV of {PASSAGES} passages for each question was computed in {took:.0f} s.")


def ask(client: httpx.Client, question: str, **options: Any) -> dict[str, Any]:
    """POST /rag/query; the response is one JSON object."""
    body = {"query": question, "namespace": NAMESPACE, "k": PASSAGES, **options}
    response = client.post("/rag/query", json=body)
    if response.is_error:
        raise DemoFailed(response.text)
    return dict(response.json())


def ask_streaming(client: httpx.Client, question: str) -> dict[str, Any]:
    """POST /rag/query; the response is server-sent events."""
    answer: dict[str, Any] = {}
    pieces: list[str] = []
    body = {"query": question, "namespace": NAMESPACE, "k": PASSAGES, "stream": True}
    with client.stream("POST", "/rag/query", json=body) as response:
        for event, data in events(response):
            if event == "message":
                pieces.append(data["text"])
            elif event == "final_answer":
                answer = data
            elif event == "error":
                raise DemoFailed(data["error"]["message"])
    if "".join(pieces) != answer.get("answer"):
        raise DemoFailed(f"the pieces {pieces} are not the answer {answer}")
    return answer


def events(response: httpx.Response) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and data of each server-sent event."""
    name = ""
    for line in response.iter_lines():
        if line.startswith("event:"):
            name = line[6:].strip()
        elif line.startswith("data:"):
            yield name, json.loads(line[5:])


def show(answer: dict[str, Any]) -> None:
    """Print an answer with its citations, tokens and milliseconds."""
    if not answer.get("answer", "").strip() or not answer.get("citations"):
        raise DemoFailed(f"no answer, or no citation: {answer}")
    console.print(f"[bold green]{answer['answer']}")
    for citation in answer["citations"]:
        where = Path(citation["source"]).name + (f", page {citation['page']}" if citation["page"] else "")
        span = f"characters {citation['start']}-{citation['end']}"
        if citation["cosine"] is not None:
            span += f", cosine {citation['cosine']:.2f}"
        console.print(f"  [cyan]\\[{citation['index']}] {where}[/], {span}")
    usage, timings = answer["usage"], answer["timings"]
    counts = f"{usage['prompt']} prompt, {usage['cached']} cached, {usage['completion']} answer"
    console.print(f"  tokens: {counts}")
    console.print(f"  chosen: {answer['context']['choice']}")
    stages = {name.removesuffix("_ms"): ms for name, ms in timings.items() if ms is not None}
    console.print("  milliseconds: " + ", ".join(f"{name} {ms:.1f}" for name, ms in stages.items()))


def compare(**answers: dict[str, Any]) -> None:
    """Print what several answers to a question took, and the answers, below each other."""
    table = Table(*("", "strategy", "first token", "kept", "recomputed", "answer"), box=None, pad_edge=True)
    for name, answer in answers.items():
        context = answer["context"]
        tokens = (f"{context[f'tokens_{part}']:,}" for part in ("kept", "recomputed"))
        first = f"{answer['timings']['ttft_ms']:,.0f} ms"
        table.add_row(name, context["strategy"], first, *tokens, answer["answer"])
    console.print(table)


def count_right(answers: dict[str, dict[str, Any]]) -> None:
    """Print each answer, whether it contains the right words, and how many do."""
    console.rule("[bold]right answers")
    table = Table("question", "answer", "right", box=None, pad_edge=True)
    right = 0
    for question, wanted in (SHOWN | MORE).items():
        found = contains_answer(answers[question]["answer"], [wanted])
        right += found
        table.add_row(question, escape(answers[question]["answer"]), "yes" if found else f"no: {wanted}")
    console.print(table)
    console.print(f"{right} of {len(answers)} answers are right.")


def goodbye(server: RunningServer) -> None:
    """Say where the server is and how to stop it."""
    pid = server.process.pid
    console.print(f"The server keeps running at [bold]{server.url}[/] (process {pid}, log {server.log}).")
    console.print(f"Stop it with: kill {pid}")


def _default_port() -> int:
    """SGLang's port if it is free, so that clients find the server; otherwise any."""
    import socket

    with socket.socket() as probe:
        return 30000 if probe.connect_ex(("127.0.0.1", 30000)) else 0


if __name__ == "__main__":
    sys.exit(main())
