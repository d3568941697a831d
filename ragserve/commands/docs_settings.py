"""`ragserve docs settings`, `ratings` and `unanswered`: how a namespace is asked, and what came of it."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from ragserve.commands.data_folder import open_data
from ragserve.commands.job_console import print_json, shown
from ragserve.commands.options import AsJson, Namespace, problems, with_settings
from ragserve.config import Settings
from ragserve.errors import InvalidRequest
from ragserve.tenants.audit_log import record_command

_SERVERS = "(the server's)"
_READS = ["data_dir", "registry_url"]


def register(docs: typer.Typer) -> None:
    """Add the commands to `ragserve docs`."""
    docs.command("settings")(with_settings(settings, _READS))
    docs.command("ratings")(with_settings(ratings, _READS))
    docs.command("unanswered")(with_settings(unanswered, _READS))


def settings(
    server: Settings,
    namespace: Annotated[str, typer.Argument(help="The namespace.")] = "default",
    system: Annotated[str | None, typer.Option(help="System text of its queries.")] = None,
    k: Annotated[int | None, typer.Option(help="Passages of a query.")] = None,
    min_score: Annotated[float | None, typer.Option(help="Lowest score of a passage.")] = None,
    retrieval: Annotated[str | None, typer.Option(help="dense, lexical or hybrid.")] = None,
    not_found: Annotated[str | None, typer.Option(help="note, refuse or off.")] = None,
    strategy: Annotated[
        str | None, typer.Option(help="Strategy with its options, as concat:recompute=sentences,share=0.15.")
    ] = None,
    unset: Annotated[
        list[str] | None, typer.Option(help="Leave this one to the server again. Repeatable.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show or change the defaults of a namespace's queries: a query's own values come before them, the
    server's behind. A running server has them from its next query on."""
    from ragserve.setting_groups.per_namespace import NamespaceSettings

    given = {
        "system": system,
        "k": k,
        "min_score": min_score,
        "retrieval": retrieval,
        "not_found": not_found,
        "strategy": strategy,
    }
    given = {name: value for name, value in given.items() if value is not None}
    left = {name.replace("-", "_") for name in unset or ()}
    for name in left:
        if name not in NamespaceSettings.model_fields:
            raise InvalidRequest(
                f"There is no setting {name!r}.", hint=f"One of: {', '.join(NamespaceSettings.model_fields)}."
            )
    with open_data(server) as store:
        store.namespace(namespace)  # must exist
        stored = NamespaceSettings.of(store.settings(namespace)).given()
        kept = {name: value for name, value in stored.items() if name not in left}
        try:
            own = NamespaceSettings(**(kept | given))
        except ValidationError as error:
            raise InvalidRequest("Invalid settings:\n  " + "\n  ".join(problems(error))) from None
        if own.given() != stored:
            store.set_settings(namespace, own.given())
            record_command(server, "docs settings", namespace=namespace, result="changed")
    if as_json:
        print_json(own.model_dump())
        return
    for name, value in own.model_dump().items():
        typer.echo(f"{name}: {_SERVERS if value is None else shown(str(value))}")


def ratings(server: Settings, namespace: Namespace = "default") -> None:
    """Print users' ratings as rows for `ragserve eval`, JSON lines: answers that were found good, with their
    documents, and the questions of the others. A server keeps them with --feedback-bytes."""
    from ragserve.answering.rating_log import rated

    with open_data(server) as store:
        store.namespace(namespace)  # must exist
        rows = rated(server.data_dir, store, namespace)
    for row in rows:
        typer.echo(json.dumps(row, ensure_ascii=False))
    typer.echo(f"{len(rows):,} rated answers in namespace {namespace}", err=True)


def unanswered(
    server: Settings,
    namespace: Namespace = "default",
    limit: Annotated[int, typer.Option(min=1, help="List at most this many questions.")] = 100,
    as_json: AsJson = False,
) -> None:
    """List what was asked and not found, newest first. A server keeps it with --query-log-bytes."""
    from ragserve.answering.rating_log import unanswered as listed

    with open_data(server) as store:
        store.namespace(namespace)  # must exist
        found: list[dict[str, Any]] = listed(server.data_dir, store, namespace, limit)
    if as_json:
        print_json(found)
        return
    for each in found:
        times = "" if each["asked"] == 1 else f", asked {each['asked']:,} times"
        typer.echo(f"{shown(each['question'])}\n    {each['time'][:16]}{times}: {shown(each['why'])}")
    typer.echo(f"{len(found):,} questions")
