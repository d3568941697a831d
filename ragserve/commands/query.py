"""`ragserve query`: ask a running server from the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console

from ragserve.answering.results import Answer, Citation
from ragserve.client import Client, error_of
from ragserve.commands.job_console import place
from ragserve.commands.options import DEFAULT_URL, ApiKey, ServerUrl, json_object
from ragserve.config import Retrieval
from ragserve.errors import RagserveError, Unavailable
from ragserve.strategy_spec import parse

_FILTER = '{"op":"eq","field":"lang","value":"en"}'
_EXCERPT_CHARS = 160


def register(app: typer.Typer) -> None:
    help_ = "Ask a running server. Prints the answer, its citations, token counts and timings."
    app.command("query", help=help_)(query)


def query(
    question: Annotated[str, typer.Argument(help="The question.")],
    namespace: Annotated[str, typer.Option("--namespace", "-n", help="Namespace to search.")] = "default",
    url: ServerUrl = DEFAULT_URL,
    api_key: ApiKey = None,
    k: Annotated[int | None, typer.Option(help="Passages to retrieve. Default: the server's.")] = None,
    filter_: Annotated[str | None, typer.Option("--filter", help=f"JSON, e.g. {_FILTER}.")] = None,
    retrieval: Annotated[Retrieval | None, typer.Option(help="How to search. Default: the server's.")] = None,
    rerank: Annotated[
        str | None, typer.Option(help="off, keys, or a CrossEncoder of the server's. Default: the server's.")
    ] = None,
    strategy: Annotated[
        str | None, typer.Option(help="Strategy, with options as in epic:first=16. Default: the server's.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Longest answer, in tokens. Default: the server's.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature; 0, the default, is greedy.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="Replace the system text.")] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print the answer while it is generated.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the server's JSON; with --stream one event per line.")
    ] = False,
) -> None:
    """Ask a question. Exits with 1, and the server's reason, if there is no answer."""
    spec = parse(strategy)[0] if strategy else None
    fields = {
        "query": question,
        "namespace": namespace,
        "k": k,
        "filter": json_object("--filter", filter_, example=_FILTER),
        "retrieval": retrieval,
        "rerank": rerank,
        "strategy": spec and spec.name,
        "strategy_options": spec and dict(spec.options),
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "system": system,
    }
    body = {name: value for name, value in fields.items() if value is not None}
    console = Console(highlight=False)
    if stream:
        answer = _streamed(url, api_key, body, console, as_json=as_json)
    else:
        with Client(url, api_key=api_key) as client:
            raw = client.call("POST", "/rag/query", json=body)
        if as_json:
            typer.echo(json.dumps(raw, ensure_ascii=False, indent=1))
            return
        answer = Answer.model_validate(raw)
        console.print(answer.answer, markup=False)
    if not as_json:
        _print_details(answer, console)


def _streamed(
    url: str, api_key: str | None, body: dict[str, Any], console: Console, *, as_json: bool
) -> Answer:
    final = None
    for event, data in events(url, api_key, body):
        if as_json:
            typer.echo(json.dumps({"event": event, "data": data}, ensure_ascii=False))
        elif event == "message":
            console.print(data["text"], markup=False, end="", soft_wrap=True)
        if event == "error":
            failure, hint = data["error"], data["error"].get("hint") or ""
            message = str(failure["message"]).removesuffix(hint).rstrip()
            raise RagserveError(message, hint=hint, code=failure.get("code"))
        if event == "final_answer":
            final = Answer.model_validate(data)
    if final is None:
        message = "The server closed the connection before the answer was complete."
        raise Unavailable(message, hint="See its log.")
    if not as_json:
        console.print()
    return final


def events(url: str, api_key: str | None, body: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield name and data of each event of a streamed query.

    Raises the server's error, or ``Unavailable`` if no server answers.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with (
            httpx.Client(
                base_url=url.rstrip("/"), headers=headers, timeout=httpx.Timeout(600, connect=10)
            ) as client,
            client.stream("POST", "/rag/query", json={**body, "stream": True}) as response,
        ):
            if response.is_error:
                response.read()
                raise error_of(response)
            name = "message"
            for line in response.iter_lines():
                field, _, value = line.partition(": ")
                if field == "event":
                    name = value
                elif field == "data":
                    yield name, json.loads(value)
    except (httpx.TransportError, httpx.InvalidURL) as error:
        hint = "Is the server running there? ragserve serve"
        raise Unavailable(f"No answer from {url}: {error}", hint=hint) from error


def _print_details(answer: Answer, console: Console) -> None:
    for citation in answer.citations:
        console.print(f"\n[{citation.index}] {_title(citation)}", markup=False, style="bold")
        console.print(f"    {_excerpt(citation.text)}", markup=False)
    use, usage = answer.context, answer.usage
    console.print(
        f"\n{use.documents_kept} of {use.documents_retrieved} passages in the prompt; "
        f"tokens: {usage.prompt} prompt ({usage.cached} cached), {usage.completion} generated; "
        f"{use.tokens_recomputed} of {use.tokens_kept} document tokens computed ({use.strategy})",
        markup=False,
        style="dim",
    )
    if use.choice:
        console.print(f"auto chose {use.choice}", markup=False, style="dim")
    for note in use.notes:
        console.print(note, markup=False, style="yellow")
    stages = answer.timings.model_dump(exclude_none=True).items()
    timings = ", ".join(f"{name.removesuffix('_ms')} {value:.1f}" for name, value in stages)
    console.print(f"ms: {timings}", style="dim")


def _title(citation: Citation) -> str:
    where = [citation.title, citation.source or "", place(citation)]
    scores = [
        f"{name} {value:.2f}"
        for name, value in (("cosine", citation.cosine), ("BM25", citation.bm25))
        if value is not None
    ]
    return ", ".join(part for part in where if part) + f" ({', '.join([*scores, citation.basis])})"


def _excerpt(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _EXCERPT_CHARS else line[: _EXCERPT_CHARS - 1] + "…"
