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
from ragserve.errors import InvalidRequest, RagserveError, Unavailable
from ragserve.strategy_spec import parse

_URL = "http://127.0.0.1:30000"
_EXCERPT_CHARS = 160


def register(app: typer.Typer) -> None:
    app.command(
        "query", help="Ask a running server. Prints the answer, its citations, token counts and timings."
    )(query)


def query(
    question: Annotated[str, typer.Argument(help="The question.")],
    namespace: Annotated[str, typer.Option("--namespace", "-n", help="Namespace to search.")] = "default",
    url: Annotated[str, typer.Option(envvar="RAGSERVE_URL", help="Address of the server.")] = _URL,
    api_key: Annotated[
        str | None, typer.Option(envvar="RAGSERVE_API_KEY", help="The server's API key.")
    ] = None,
    k: Annotated[int | None, typer.Option(help="Passages to retrieve. Default: the server's.")] = None,
    filter_: Annotated[
        str | None, typer.Option("--filter", help='JSON, e.g. {"op":"eq","field":"lang","value":"en"}.')
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
        "filter": _json(filter_),
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
            raise _StreamError(data["error"])
        if event == "final_answer":
            final = Answer.model_validate(data)
    if final is None:
        raise Unavailable(
            "The server closed the connection before the answer was complete.", hint="See its log."
        )
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
        raise Unavailable(
            f"No answer from {url}: {error}", hint="Is the server running there? ragserve serve"
        ) from error


class _StreamError(RagserveError):
    """An error event of the server."""

    def __init__(self, error: dict[str, Any]) -> None:
        hint = error.get("hint") or ""
        super().__init__(str(error["message"]).removesuffix(hint).rstrip(), hint=hint, code=error.get("code"))


def _json(text: str | None) -> Any:
    if text is None:
        return None
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidRequest(
            f"--filter is not JSON: {error}.", hint='Try \'{"op":"eq","field":"lang","value":"en"}\'.'
        ) from error


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
    stages = answer.timings.model_dump(exclude_none=True)
    console.print(
        "ms: " + ", ".join(f"{name.removesuffix('_ms')} {value:.1f}" for name, value in stages.items()),
        style="dim",
    )


def _title(citation: Citation) -> str:
    where = [citation.source or "", f"page {citation.page}" if citation.page else ""]
    score = (
        f" ({citation.score:.2f}, {citation.basis})" if citation.score is not None else f" ({citation.basis})"
    )
    return citation.title + ", ".join(["", *(part for part in where if part)]) + score


def _excerpt(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _EXCERPT_CHARS else line[: _EXCERPT_CHARS - 1] + "…"
