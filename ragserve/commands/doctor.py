"""`ragserve doctor`: check everything that a server needs, and say what to do about problems."""

from __future__ import annotations

import os
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from pydantic import SecretStr
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ragserve.commands.doctor_checks import Check, examine
from ragserve.commands.job_console import print_json
from ragserve.commands.options import AsJson, problems, with_settings
from ragserve.config import Settings, load
from ragserve.setting_groups.levels import EXPERIMENTAL, group_of
from sglang_ext.wire import renamed

_MODELS = ("model", "tokenizer", "embedder")
_SETTINGS = (
    "data_dir",
    "registry_url",
    *_MODELS,
    "rerank",
    "rerank_models",
    "engine_url",
    "host",
    "port",
    "index_device",
    "tp_size",
)
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red", "skip": "dim"}


def register(app: typer.Typer) -> None:
    app.command("doctor")(with_settings(doctor, _SETTINGS, make=dict))


def doctor(flags: dict[str, Any], as_json: AsJson = False) -> None:
    """Check versions, plugins, GPU, model, embedder, disk, index, port and engine.

    Exits with 1 if something will not work.
    """
    given = {name for name, value in flags.items() if value is not None}
    # Nothing is downloaded during the checks. Hugging Face's libraries read this when they are imported.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    settings, first = _settings(flags)
    console = Console(quiet=as_json)
    checks, rows = [first], []
    if settings is not None:
        with console.status("checking"):
            checks += examine(settings)
        rows = provenance(settings, given)
    failed = any(check.status == "fail" for check in checks)
    if as_json:
        found = [asdict(check) | {"advice": check.advice or None} for check in checks]
        values = [
            {"name": name, "value": value, "from": source, "group": group_of(name)}
            for name, value, source in rows
        ]
        print_json({"ok": not failed, "checks": found, "settings": values})
    else:
        _print(console, checks, rows)
    raise typer.Exit(1 if failed else 0)


def _settings(flags: dict[str, Any]) -> tuple[Settings | None, Check]:
    try:
        settings = load(**flags)
    except ValueError as error:
        advice = "Correct the flag, the RAGSERVE_ variable or the line in ragserve.toml."
        return None, Check("settings", "fail", "; ".join(problems(error)), advice)
    if not settings.has_key:
        advice = (
            "Everyone on this machine can use the server. Set RAGSERVE_API_KEY, or make keys with "
            "`ragserve keys`."
        )
        return settings, Check("settings", "ok", "valid; no API key, so loopback only", advice)
    return settings, Check("settings", "ok", "valid")


def provenance(settings: Settings, given: set[str]) -> list[tuple[str, Any, str]]:
    """List (name, value, source) of each setting. Secrets are masked.

    The source is flag, environment, ragserve.toml or default; ``given`` names the settings given as flags.
    """
    path = Path("ragserve.toml")
    variables = [name.lower() for name in os.environ]
    sources = {  # the first that names a setting wins
        "flag": given,
        "environment": {name.removeprefix("ragserve_") for name in variables if name.startswith("ragserve_")},
        "ragserve.toml": set(tomllib.loads(path.read_text())) if path.exists() else set(),
        "default": set(Settings.model_fields),
    }
    new = renamed.SETTINGS
    sources = {source: {new.get(name, name) for name in names} for source, names in sources.items()}
    rows = []
    for name in Settings.model_fields:
        value = getattr(settings, name)
        value = str(value) if isinstance(value, (SecretStr, Path)) else value
        rows.append((name, value, next(source for source, names in sources.items() if name in names)))
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
            "setting", "value", "from", title="settings changed from their defaults", title_justify="left"
        )
        for name, value, source in changed:
            level = " (experimental)" if name in EXPERIMENTAL else ""
            table.add_row(name + level, escape(str(value)), source)
        console.print(table)
    elif rows:
        console.print(f"All {len(rows)} settings have their default values; --json lists them.")
    failed = sum(check.status == "fail" for check in checks)
    console.print(f"[red]{failed} failed[/red]" if failed else "[green]no problems found[/green]")
