"""`ragserve doctor`: look at everything a server needs, and say what to do about what is wrong."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import SecretStr, ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ragserve.commands.doctor_checks import Check, examine
from ragserve.config import Settings, load

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red", "skip": "dim"}


def register(app: typer.Typer) -> None:
    app.command("doctor")(doctor)


def doctor(
    data_dir: Annotated[Path | None, typer.Option(help="Folder of registry and indexes.")] = None,
    model: Annotated[str | None, typer.Option(help="Generation model.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Tokenizer where it differs from the model's.")
    ] = None,
    embedder: Annotated[str | None, typer.Option(help="Embedding model.")] = None,
    engine_url: Annotated[str | None, typer.Option(help="An SGLang server that runs elsewhere.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to bind.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to bind.")] = None,
    index_device: Annotated[str | None, typer.Option(help="cpu or gpu.")] = None,
    tp_size: Annotated[int | None, typer.Option(help="GPUs that share the model.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Check versions, plugins, GPU, model, embedder, disk, index, port and engine. Exits with 1 if something
    will not work.
    """
    # What is on this machine is examined; nothing is fetched on the way. Read when Hugging Face's libraries
    # are imported.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    flags: dict[str, Any] = {
        "data_dir": data_dir,
        "model": model,
        "tokenizer": tokenizer,
        "embedder": embedder,
        "engine_url": engine_url,
        "host": host,
        "port": port,
        "index_device": index_device,
        "tp_size": tp_size,
    }
    given = {name for name, value in flags.items() if value is not None}
    settings, first = _settings(flags)
    console = Console(quiet=as_json)
    checks = [first]
    if settings is not None:
        with console.status("examining"):
            checks += examine(settings)
    rows = provenance(settings, given) if settings is not None else []
    failed = any(check.status == "fail" for check in checks)
    if as_json:
        report = {
            "ok": not failed,
            "checks": [
                {"name": c.name, "status": c.status, "found": c.found, "advice": c.advice or None}
                for c in checks
            ],
            "settings": [{"name": name, "value": value, "from": source} for name, value, source in rows],
        }
        typer.echo(json.dumps(report, indent=1, ensure_ascii=False))
    else:
        _print(console, checks, rows)
    raise typer.Exit(1 if failed else 0)


def _settings(flags: dict[str, Any]) -> tuple[Settings | None, Check]:
    try:
        settings = load(**flags)
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(map(str, e['loc'])) or 'settings'}: {e['msg']}"
            for e in error.errors(include_url=False)
        )
        return None, Check(
            "settings",
            "fail",
            wrong,
            "Correct the flag, the RAGSERVE_ variable or the line in ragserve.toml.",
        )
    except tomllib.TOMLDecodeError as error:
        return None, Check("settings", "fail", f"ragserve.toml: {error}", "Correct the file.")
    if settings.api_key is None:
        advice = "Everyone on this machine can use the server. Set RAGSERVE_API_KEY to change that."
        return settings, Check("settings", "ok", "valid; no API key, so loopback only", advice)
    return settings, Check("settings", "ok", "valid")


def provenance(settings: Settings, given: set[str]) -> list[tuple[str, Any, str]]:
    """(name, value, source) of each setting; source is flag, environment, ragserve.toml or default. Secrets
    are masked.
    """
    environment = {
        name.lower().removeprefix("ragserve_") for name in os.environ if name.lower().startswith("ragserve_")
    }
    path = Path("ragserve.toml")
    file = set(tomllib.loads(path.read_text())) if path.exists() else set()
    rows = []
    for name in Settings.model_fields:
        value = getattr(settings, name)
        if isinstance(value, (SecretStr, Path)):
            value = str(value)
        source = (
            "flag"
            if name in given
            else "environment"
            if name in environment
            else "ragserve.toml"
            if name in file
            else "default"
        )
        rows.append((name, value, source))
    return rows


def _print(console: Console, checks: list[Check], rows: list[tuple[str, Any, str]]) -> None:
    table = Table("check", "", "found, and what to do", title="ragserve doctor", title_justify="left")
    for check in checks:
        colour = _COLOURS[check.status]
        advice = f"\n[bold]{escape(check.advice)}[/bold]" if check.advice else ""
        table.add_row(check.name, f"[{colour}]{check.status}[/{colour}]", escape(check.found) + advice)
    console.print(table)
    changed = [row for row in rows if row[2] != "default"]
    if changed:
        table = Table(
            "setting", "value", "from", title="settings that are not at their default", title_justify="left"
        )
        for name, value, source in changed:
            table.add_row(name, escape(str(value)), source)
        console.print(table)
    elif rows:
        console.print(f"All {len(rows)} settings are at their defaults; --json lists them.")
    failed = sum(check.status == "fail" for check in checks)
    console.print(f"[red]{failed} failed[/red]" if failed else "[green]nothing stands in the way[/green]")
