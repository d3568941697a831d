"""`ragserve cache`: report, verify or clear the document cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ragserve.client import Client
from ragserve.commands.options import ApiKey
from ragserve.errors import Conflict

_app = typer.Typer(
    help="The cache of documents' KV: with --url all tiers of a running server, else the files on disk.",
    no_args_is_help=True,
)

Url = Annotated[
    str | None,
    typer.Option(envvar="RAGSERVE_URL", help="Address of a running server. Default: read the files on disk."),
]
DataDir = Annotated[Path, typer.Option(envvar="RAGSERVE_DATA_DIR", help="Data folder; ignored with --url.")]


def register(app: typer.Typer) -> None:
    app.add_typer(_app, name="cache")


@_app.command("stat")
def stat(url: Url = None, api_key: ApiKey = None, data_dir: DataDir = Path("ragserve-data")) -> None:
    """Print bytes and documents per tier and namespace, as JSON."""
    from ragserve.cache import folder

    _print(_call(url, api_key, "GET", "") if url else folder.stat(data_dir / "kv"))


@_app.command("verify")
def verify(url: Url = None, api_key: ApiKey = None, data_dir: DataDir = Path("ragserve-data")) -> None:
    """Read and check every page. Exits with 3 if any is bad; a server treats such documents as not cached."""
    from ragserve.cache import folder

    if url:
        report = _call(url, api_key, "POST", "/verify")
    else:
        found = folder.verify(data_dir / "kv")
        report = {"documents": found.documents, "pages": found.pages, "bytes": found.bytes_}
        report["bad"] = [f"{bad.namespace}/{bad.key}: {bad.reason}" for bad in found.bad]
    _print(report)
    if report["bad"]:
        raise typer.Exit(3)


@_app.command("clear")
def clear(url: Url = None, api_key: ApiKey = None, data_dir: DataDir = Path("ragserve-data")) -> None:
    """Remove all cached KV. It is computed again when needed; documents stay indexed."""
    from ragserve.cache import folder

    if url:
        _call(url, api_key, "DELETE", "")
        return
    try:
        folder.clear(data_dir / "kv")
    except folder.FolderInUse as error:
        hint = "Clear it through the server: --url http://127.0.0.1:30000."
        raise Conflict(f"A server uses {data_dir / 'kv'}.", hint=hint, code="cache_in_use") from error


def _call(url: str, api_key: str | None, method: str, path: str) -> dict[str, Any]:
    with Client(url, api_key=api_key) as client:
        return dict(client.call(method, f"/rag/cache{path}"))


def _print(report: dict[str, Any]) -> None:
    typer.echo(json.dumps(report, indent=1, ensure_ascii=False, default=str))
