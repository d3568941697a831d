"""The whole product in one go: ingest real documents, serve them, ask three questions, show what came back
and how long it took.

    scripts/demo            ingest, serve, ask, stop
    scripts/demo --serve    the same, but the server stays up

Exits with 1 if anything failed.
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

from ragserve.errors import RagserveError
from ragserve.measuring.server import RunningServer, running_server

REPO = Path(__file__).resolve().parent.parent
CORPUS = REPO / "examples" / "corpus" / "files"
NAMESPACE = "demo"
QUESTIONS = (
    "What is the capital of Norway?",
    "Who is the head of government of Finland?",
    "Who is the head of state of Netherlands?",
)
console = Console(highlight=False, soft_wrap=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--serve", action="store_true", help="leave the server running")
    parser.add_argument(
        "--data-dir", type=Path, default=REPO / "ragserve-data", help="where the index is kept"
    )
    parser.add_argument(
        "--port", type=int, default=0, help="default: a free one, 30000 with --serve if it is free"
    )
    options = parser.parse_args()
    started = time.monotonic()
    try:
        ingest(options.data_dir)
        console.rule("[bold]serve")
        port = options.port or (_default_port() if options.serve else 0)
        with running_server(data_dir=options.data_dir, port=port, outlive=options.serve) as server:
            memory = server.resident_bytes() / 2**30
            console.print(
                f"{server.url} is ready after {server.start_s:.1f} s; all its processes hold {memory:.1f} GiB"
            )
            with server.client() as client:
                for i, question in enumerate(QUESTIONS):
                    console.rule(f"[bold]{question}" + (" (streamed)" if i == 1 else ""))
                    show(streamed(client, question) if i == 1 else asked(client, question))
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
    """An answer that is not one."""


def ingest(data_dir: Path) -> None:
    """Through the command line, as a user would; unchanged files cost a hash."""
    console.rule("[bold]ingest examples/corpus")
    command = [
        sys.executable,
        "-m",
        "ragserve.cli",
        "ingest",
        str(CORPUS),
        "--recursive",
        "--namespace",
        NAMESPACE,
        "--data-dir",
        str(data_dir),
    ]
    subprocess.run(command, check=True)


def asked(client: httpx.Client, question: str) -> dict[str, Any]:
    """POST /rag/query, answered as one JSON object."""
    response = client.post("/rag/query", json={"query": question, "namespace": NAMESPACE})
    if response.is_error:
        raise DemoFailed(response.text)
    answer = dict(response.json())
    console.print(f"[bold green]{answer['answer']}")
    return answer


def streamed(client: httpx.Client, question: str) -> dict[str, Any]:
    """POST /rag/query as server-sent events, printed as they come."""
    answer: dict[str, Any] = {}
    with client.stream(
        "POST", "/rag/query", json={"query": question, "namespace": NAMESPACE, "stream": True}
    ) as response:
        for event, data in events(response):
            if event == "message":
                console.print(f"[bold green]{data['text']}", end="")
            elif event == "final_answer":
                answer = data
            elif event == "error":
                raise DemoFailed(data["error"]["message"])
    console.print()
    return answer


def events(response: httpx.Response) -> Iterator[tuple[str, dict[str, Any]]]:
    name = ""
    for line in response.iter_lines():
        if line.startswith("event:"):
            name = line[6:].strip()
        elif line.startswith("data:"):
            yield name, json.loads(line[5:])


def show(answer: dict[str, Any]) -> None:
    """Citations, tokens and milliseconds of one answer."""
    if not answer.get("answer", "").strip() or not answer.get("citations"):
        raise DemoFailed(f"no answer, or one without a citation: {answer}")
    for citation in answer["citations"]:
        where = Path(citation["source"]).name + (f", page {citation['page']}" if citation["page"] else "")
        console.print(
            f"  [cyan]\\[{citation['index']}] {where}[/], characters {citation['start']}-{citation['end']}, score {citation['score']:.2f}"
        )
    usage, context, timings = answer["usage"], answer["context"], answer["timings"]
    console.print(
        f"  tokens: {usage['prompt']} prompt, {usage['cached']} cached, {usage['completion']} answer; strategy {context['strategy']}"
    )
    stages = ", ".join(
        f"{name.removesuffix('_ms')} {value:.1f}" for name, value in timings.items() if value is not None
    )
    console.print(f"  milliseconds: {stages}")


def goodbye(server: RunningServer) -> None:
    console.print(
        f"The server stays up at [bold]{server.url}[/] (process {server.process.pid}, log {server.log})."
    )
    console.print(f"Stop it with: kill {server.process.pid}")


def _default_port() -> int:
    """SGLang's port where it is free, so that clients find us; otherwise any."""
    import socket

    with socket.socket() as probe:
        return 30000 if probe.connect_ex(("127.0.0.1", 30000)) else 0


if __name__ == "__main__":
    sys.exit(main())
