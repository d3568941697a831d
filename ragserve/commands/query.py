"""`ragserve query`: ask a running server from the command line."""

from __future__ import annotations

from typing import Annotated, cast

import typer
from rich.console import Console

from ragserve.answering.results import Answer, Citation
from ragserve.api.views import EVENTS
from ragserve.client import Client, MessageEvent, QueryArguments
from ragserve.client.calls import where
from ragserve.commands.job_console import place, shown
from ragserve.commands.options import DEFAULT_URL, ApiKey, ServerUrl, json_object
from ragserve.config import StrategyName
from ragserve.errors import EngineError
from ragserve.setting_groups.answering import Retrieval
from ragserve.strategy_spec import parse
from sglang_ext.wire.joint_names import is_joint

_FILTER = '{"op":"eq","field":"lang","value":"en"}'
_EXCERPT_CHARS = 160


def register(app: typer.Typer) -> None:
    help_ = "Ask a running server. Prints the answer, its citations, token counts and timings."
    app.command("query", help=help_)(query)


def query(
    question: Annotated[str, typer.Argument(help="The question.")],
    namespace: Annotated[
        str,
        typer.Option("--namespace", "-n", help="Namespace to search; several as a+b or docs-*."),
    ] = "default",
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
    fields: QueryArguments = {
        **where(namespace),
        "k": k,
        "filter": json_object("--filter", filter_, example=_FILTER),
        "retrieval": retrieval,
        "rerank": rerank,
        "strategy": None if spec is None else cast(StrategyName, spec.name),
        "strategy_options": None if spec is None else spec.options,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "system": system,
    }
    console = Console(highlight=False)
    with Client(url, api_key=api_key) as client:
        if stream:
            answer = _streamed(client, question, fields, console, as_json=as_json)
        else:
            answer = client.query(question, **fields)
            if as_json:
                typer.echo(answer.model_dump_json(indent=1))
            else:
                console.print(answer.answer, markup=False)
    if not as_json:
        _print_details(answer, console)


def _streamed(
    client: Client, question: str, fields: QueryArguments, console: Console, *, as_json: bool
) -> Answer:
    names = {kind: name for name, kind in EVENTS.items()}
    final = None
    for event in client.stream(question, **fields):
        if as_json:
            typer.echo(f'{{"event": "{names[type(event)]}", "data": {event.model_dump_json()}}}')
        elif isinstance(event, MessageEvent):
            console.print(event.text, markup=False, end="", soft_wrap=True)
        if isinstance(event, Answer):
            final = event
    if final is None:
        raise EngineError("The server sent no answer.", hint="See its log.")
    if not as_json:
        console.print()
    return final


def _print_details(answer: Answer, console: Console) -> None:
    for each in answer.searched_for.corrections if answer.searched_for else ():
        done = "read" if each.read else "searched for"
        console.print(f'{done} "{each.original}" as "{each.replacement}"', markup=False, style="yellow")
    for sentence in answer.sentences:
        if not sentence.supported:
            text = shown(answer.answer[sentence.start : sentence.end])
            console.print(f"no passage supports: {text}", markup=False, style="yellow")
    for citation in answer.citations:
        console.print(
            f"\n[{citation.index}] {_title(citation, answer.namespace)}", markup=False, style="bold"
        )
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


def _title(citation: Citation, asked: str) -> str:
    home = (citation.namespace or "") if is_joint(asked) else ""
    parts = [home, shown(citation.title), shown(citation.source or ""), place(citation)]
    parts += ["edited"] if citation.edited else []
    scores = [
        f"{name} {value:.2f}"
        for name, value in (("cosine", citation.cosine), ("BM25", citation.bm25))
        if value is not None
    ]
    return ", ".join(part for part in parts if part) + f" ({', '.join([*scores, citation.basis])})"


def _excerpt(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _EXCERPT_CHARS else line[: _EXCERPT_CHARS - 1] + "…"
