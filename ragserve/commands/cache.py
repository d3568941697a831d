"""`ragserve cache`: what the document cache holds, whether it is sound, and emptying it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ragserve.client import Client
from ragserve.errors import Conflict

_app = typer.Typer(
    help="The cache of documents' KV: of a running server with --url, else the files of a data folder.",
    no_args_is_help=True,
)

Url = Annotated[
    str | None,
    typer.Option(envvar="RAGSERVE_URL", help="Ask this server: all tiers. Without it, the files on disk."),
]
ApiKey = Annotated[str | None, typer.Option(envvar="RAGSERVE_API_KEY", help="Its API key.")]
DataDir = Annotated[
    Path, typer.Option(envvar="RAGSERVE_DATA_DIR", help="Data folder, where no server is asked.")
]


def register(app: typer.Typer) -> None:
    app.add_typer(_app, name="cache")


@_app.command("stat")
def stat(url: Url = None, api_key: ApiKey = None, data_dir: DataDir = Path("ragserve-data")) -> None:
    """Bytes and documents per tier and namespace, as JSON."""
    from ragserve.cache import folder as offline

    _print(_ask(url, api_key, "GET", "") if url else offline.stat(data_dir / "kv"))


@_app.command("verify")
def verify(url: Url = None, api_key: ApiKey = None, data_dir: DataDir = Path("ragserve-data")) -> None:
    """Read every page and check it. Exits with 3 where one is bad; a server treats those documents as not
    cached.
    """
    from ragserve.cache import folder as offline

    if url:
        report = _ask(url, api_key, "POST", "/verify")
    else:
        found = offline.verify(data_dir / "kv")
        report = {"documents": found.documents, "pages": found.pages, "bytes": found.bytes_}
        report["bad"] = [f"{bad.namespace}/{bad.key}: {bad.reason}" for bad in found.bad]
    _print(report)
    if report["bad"]:
        raise typer.Exit(3)


@_app.command("clear")
def clear(url: Url = None, api_key: ApiKey = None, data_dir: DataDir = Path("ragserve-data")) -> None:
    """Remove all cached KV; it is computed again when needed. Documents stay indexed."""
    from ragserve.cache import folder as offline

    if url:
        _ask(url, api_key, "DELETE", "")
        return
    try:
        offline.clear(data_dir / "kv")
    except offline.FolderInUse as error:
        raise Conflict(
            f"A server uses {data_dir / 'kv'}.",
            hint="Ask it: --url http://127.0.0.1:30000.",
            code="cache_in_use",
        ) from error


def _ask(url: str, api_key: str | None, method: str, path: str) -> dict[str, Any]:
    with Client(url, api_key=api_key) as client:
        return dict(client.call(method, f"/rag/cache{path}"))


def _print(report: dict[str, Any]) -> None:
    typer.echo(json.dumps(report, indent=1, ensure_ascii=False, default=str))
