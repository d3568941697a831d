"""Settings as command-line flags: every field becomes `--field-name` with its description, so none is
documented twice.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import typer
from pydantic import ValidationError

from ragserve.config import Settings, load
from ragserve.errors import InvalidRequest

_PLAIN = (int, float, str, Path)
_OBJECTS = frozenset(
    name
    for name, field in Settings.model_fields.items()
    if getattr(field.annotation, "__origin__", None) is dict
)

# of commands that start an engine for one piece of work
ENGINE_SETTINGS = (
    "tokenizer",
    "dtype",
    "context_length",
    "max_total_tokens",
    "mem_fraction_static",
    "tp_size",
    "kv_host_bytes",
    "engine_args",
)


def with_settings(command: Callable[..., Any], names: Iterable[str] | None = None) -> Callable[..., Any]:
    """``command(settings, ...)`` as a Typer callback whose flags are the settings ``names`` (default: all)
    and its own parameters.
    """
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "settings"]
    fields = {
        name: Settings.model_fields[name]
        for name in (names or Settings.model_fields)
        if name not in {p.name for p in own}
    }
    flags = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=typer.Option(
                None,
                "--" + name.replace("_", "-"),
                help=_help(name),
                rich_help_panel="Settings",
                show_default=False,
            ),
            annotation=_flag_type(field.annotation) | None,
        )
        for name, field in fields.items()
    ]

    def run(**given: Any) -> Any:
        flags_given = {name: given.pop(name) for name in fields}
        for name in _OBJECTS & flags_given.keys():
            if isinstance(flags_given[name], str):
                flags_given[name] = _json_object(name, flags_given[name])
        return command(settings_from(**flags_given), **given)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature([*own, *flags])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in (*own, *flags)}
    return run


def settings_from(**flags: Any) -> Settings:
    """Settings, with pydantic's report turned into one line per field and what to do."""
    try:
        return load(**flags)
    except ValidationError as error:
        lines = [f"  {'.'.join(map(str, e['loc'])) or 'settings'}: {e['msg']}" for e in error.errors()]
        raise InvalidRequest(
            "Invalid settings:\n" + "\n".join(lines),
            hint="\nThey come from flags, RAGSERVE_* variables or ragserve.toml.",
        ) from None


def _json_object(name: str, text: str) -> dict[str, Any]:
    flag = "--" + name.replace("_", "-")
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidRequest(
            f"{flag} is not JSON: {error}.", hint=f"""Example: {flag} '{{"page_size": 16}}'."""
        ) from None
    if not isinstance(value, dict):
        raise InvalidRequest(
            f"{flag} must be a JSON object.", hint=f"""Example: {flag} '{{"page_size": 16}}'."""
        )
    return value


def _help(name: str) -> str:
    field = Settings.model_fields[name]
    default = "" if field.default in (None, ...) or name in _OBJECTS else f" [default: {field.default}]"
    return (field.description or "") + default


def _flag_type(annotation: Any) -> Any:
    """The type Typer parses: the first plain type in the annotation; choices and secrets stay text that
    pydantic checks.
    """
    if annotation in _PLAIN:
        return annotation
    for part in getattr(annotation, "__args__", ()):
        if part in _PLAIN:
            return part
    return str
