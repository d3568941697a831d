"""`ragserve cache`: report, verify or clear the document cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ragserve.client import Client
from ragserve.commands.options import ApiKey, with_settings
from ragserve.config import Settings
from ragserve.errors import Conflict, NotFound

Url = Annotated[
    str | None,
    typer.Option(envvar="RAGSERVE_URL", help="Address of a running server. Default: read the files on disk."),
]


def register(app: typer.Typer) -> None:
    cache = typer.Typer(
        help="The cache of documents' KV: with --url all tiers of a running server, else the files on disk.",
        no_args_is_help=True,
    )
    for name, command in (("stat", stat), ("verify", verify), ("clear", clear)):
        cache.command(name)(with_settings(command, ["data_dir"]))
    app.add_typer(cache, name="cache")


def stat(settings: Settings, url: Url = None, api_key: ApiKey = None) -> None:
    """Print bytes and documents per tier and namespace, as JSON."""
    from ragserve.cache import folder

    if url:
        _print(_call(url, api_key, "GET", ""))
        return
    every = [folder.stat(root) for root in _roots(settings)]
    if len(every) == 1:
        _print(every[0])
        return
    sums = {name: sum(each[name] for each in every) for name in ("files", "bytes")}
    _print({"in_use": any(each["in_use"] for each in every), **sums, "folders": every})


def verify(settings: Settings, url: Url = None, api_key: ApiKey = None) -> None:
    """Read and check every page. Exits with 3 if any is bad; a server treats such documents as not cached."""
    from ragserve.cache import folder

    if url:
        report = _call(url, api_key, "POST", "/verify")
    else:
        found = [folder.verify(root) for root in _roots(settings)]
        report = {
            "documents": sum(each.documents for each in found),
            "pages": sum(each.pages for each in found),
            "bytes": sum(each.bytes_ for each in found),
            "bad": [f"{bad.namespace}/{bad.key}: {bad.reason}" for each in found for bad in each.bad],
        }
    _print(report)
    if report["bad"]:
        raise typer.Exit(3)


def clear(settings: Settings, url: Url = None, api_key: ApiKey = None) -> None:
    """Remove all cached KV. It is computed again when needed; documents stay indexed."""
    from ragserve.cache import folder

    if url:
        _call(url, api_key, "DELETE", "")
        return
    for root in _roots(settings):
        try:
            removed = folder.clear(root)
        except folder.FolderInUse as error:
            hint = "Clear it through the server: --url http://127.0.0.1:30000."
            raise Conflict(f"A server uses {root}.", hint=hint, code="cache_in_use") from error
        typer.echo(f"{root}: {removed:,} {'file' if removed == 1 else 'files'} removed")


def _roots(settings: Settings) -> list[Path]:
    """The folders of documents' KV, those of the workers that `--replicas` starts among them. Raises NotFound
    without a data folder."""
    if not settings.data_dir.is_dir():
        raise NotFound(f"There is no data in {settings.data_dir}.", hint="Give --data-dir.")
    return [settings.data_dir / "kv", *sorted(settings.data_dir.glob("workers/*/kv"))]


def _call(url: str, api_key: str | None, method: str, path: str) -> dict[str, Any]:
    with Client(url, api_key=api_key) as client:
        return dict(client.call(method, f"/rag/cache{path}"))


def _print(report: dict[str, Any]) -> None:
    typer.echo(json.dumps(report, indent=1, ensure_ascii=False, default=str))
