"""Settings as command-line flags: each field becomes ``--field-name`` with its own description as help."""

from __future__ import annotations

import inspect
import json
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic import ValidationError

from ragserve.config import Settings, load
from ragserve.errors import InvalidRequest
from ragserve.setting_groups.levels import COMMON, EXPERIMENTAL
from sglang_ext.wire import renamed

_PLAIN = (int, float, str, Path)
_OBJECTS = {name for name, field in Settings.model_fields.items() if get_origin(field.annotation) is dict}

# help panels of the settings, by the first field of each
_COMMON_PANEL, _EXPERIMENTAL_PANEL = "Settings: common", "Settings: experimental"
_PANELS = {
    "data_dir": "Settings: files and models",
    "engine_url": "Settings: engine",
    "sparse_attention": "Settings: sparse decoding",
    "prefill_mode": "Settings: sparse prefill",
    "kv_host_bytes": "Settings: document cache",
    "host": "Settings: server",
    "oidc_issuer": "Settings: single sign-on",
    "strategy": "Settings: answering",
    "max_query_chars": "Settings: limits",
    "sentence_bytes": "Settings: ingestion and index",
}

_SHORT = {"router_url": "--router", "rerank": "--reranker"}  # flags beside those that settings are named by

Namespace = Annotated[str, typer.Option("--namespace", "-n", help="Namespace of the documents.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
ApiKey = Annotated[str | None, typer.Option(envvar="RAGSERVE_API_KEY", help="The server's API key.")]
DEFAULT_URL = "http://127.0.0.1:30000"
ServerUrl = Annotated[str, typer.Option(envvar="RAGSERVE_URL", help="Address of the server.")]

# for commands that start an engine for one piece of work
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


# what the cost of a sparse decode step depends on
DECODE_SETTINGS = (
    "decode_mode",
    "decode_budget",
    "decode_reuse",
    "decode_scores",
    "decode_threshold",
    "decode_page_size",
    "decode_logical_page",
    "decode_ranking",
    "decode_bound",
)

# what the verdict on a strategy depends on, beside the engine and the search
VERDICT_SETTINGS = (
    *("verify_margin", "system_prompt", "kv_prefix", "sparse_attention", *DECODE_SETTINGS, "decode_heads"),
    "decode_dense_below",
    *("prefill_mode", "prefill_alpha", "prefill_observe", "prefill_dense_last", "prefill_dense_below"),
)


def with_settings(
    command: Callable[..., Any], names: Iterable[str] | None = None, *, make: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Turn ``command(settings, ...)`` into a Typer callback.

    Its flags are the command's other parameters and the settings ``names`` (default: all). ``make`` makes the
    first argument of the flags, by default `settings_from`.
    """
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    taken = {parameter.name for parameter in own}
    panels = [_COMMON_PANEL, *_PANELS.values(), _EXPERIMENTAL_PANEL]
    fields = [name for name in names or Settings.model_fields if name not in taken]
    fields.sort(key=lambda name: panels.index(_panel(name)))
    old = [name for name, new in renamed.SETTINGS.items() if new in fields]
    flags = [*map(_parameter, fields), *map(_old_parameter, old)]

    def run(**given: Any) -> Any:
        chosen = {name: given.pop(name, None) for name in (*fields, *old)}
        for name in _OBJECTS.intersection(fields):
            chosen[name] = json_object(_flag(name), chosen[name], example='{"page_size": 16}')
        settings = (make or settings_from)(**chosen)
        reads = "model" in fields and isinstance(settings, Settings)
        return command(_with_folder(settings) if reads else settings, **given)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature([*own, *flags])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in (*own, *flags)}
    return run


def say(line: str) -> None:
    """Print a line of progress on stderr."""
    typer.echo(line, err=True)


def settings_from(**flags: Any) -> Settings:
    """Load the settings. Raises ``InvalidRequest`` with one line per wrong field."""
    try:
        return load(**flags)
    except ValueError as error:
        hint = "\nSettings come from flags, RAGSERVE_* variables or ragserve.toml."
        raise InvalidRequest("Invalid settings:\n  " + "\n  ".join(problems(error)), hint=hint) from None


def _with_folder(settings: Settings) -> Settings:
    """Let a model that is fetched by name, comes as a GGUF file, or has quantised weights that SGLang does
    not run on this machine, be the folder that is made of it."""
    from ragserve.commands.model_checks import is_dequantised
    from ragserve.engine import gguf_weights, packed_weights
    from ragserve.engine.packaged_model import is_packaged, model_folder

    if settings.engine_elsewhere:
        return settings
    if is_packaged(settings.model):
        return settings.model_copy(update={"model": str(model_folder(say))})
    folder = settings.data_dir / "models"
    if (file := gguf_weights.gguf_of(settings.model)) is not None:
        made = gguf_weights.as_folder(file, folder, say)
    elif is_dequantised(settings):
        made = packed_weights.as_folder(Path(settings.model), folder, say)
    else:
        return settings
    return settings.model_copy(update={"model": str(made)})


def problems(error: ValueError) -> list[str]:
    """Return a line per wrong field: its name and what is wrong with it. Of any error but pydantic's, such as
    that a setting is given by two names, return its text."""
    if not isinstance(error, ValidationError):
        return [f"ragserve.toml: {error}" if isinstance(error, tomllib.TOMLDecodeError) else str(error)]
    return [
        f"{'.'.join(map(str, e['loc'])) or 'settings'}: {e['msg']}" for e in error.errors(include_url=False)
    ]


def _panel(name: str) -> str:
    if name in COMMON:
        return _COMMON_PANEL
    if name in EXPERIMENTAL:
        return _EXPERIMENTAL_PANEL
    fields = list(Settings.model_fields)
    return next(_PANELS[each] for each in reversed(fields[: fields.index(name) + 1]) if each in _PANELS)


def _parameter(name: str) -> inspect.Parameter:
    flags = [_flag(name), *([_SHORT[name]] if name in _SHORT else [])]
    option = typer.Option(None, *flags, help=_help(name), rich_help_panel=_panel(name), show_default=False)
    annotation = _flag_type(Settings.model_fields[name].annotation) | None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=annotation)


def _old_parameter(name: str) -> inspect.Parameter:
    """A hidden flag by the old name of a setting; `load` warns of it."""
    option = typer.Option(None, _flag(name), hidden=True)
    annotation = _flag_type(Settings.model_fields[renamed.SETTINGS[name]].annotation) | None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=annotation)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def json_object(flag: str, text: str | None, *, example: str) -> dict[str, Any] | None:
    """Parse a flag's JSON object. Raises ``InvalidRequest``."""
    if text is None:
        return None
    hint = f"Example: {flag} '{example}'."
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits
        raise InvalidRequest(f"{flag} is not JSON: {error}.", hint=hint) from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{flag} must be a JSON object.", hint=hint)
    return value


def _help(name: str) -> str:
    field = Settings.model_fields[name]
    parts = [field.description or ""]
    if get_origin(field.annotation) is Literal:
        parts.append(f"One of {', '.join(map(str, get_args(field.annotation)))}.")
    if name in _OBJECTS:
        parts.append("A JSON object.")
    elif field.default not in (None, ...):
        parts.append(f"Default: {_readable(name, field.default)}.")
    return " ".join(parts)


def _readable(name: str, default: Any) -> str:
    if name == "model":
        return "the small model that comes along"
    if name.endswith("_bytes"):
        return f"{default:,} ({default // 2**20:,} MiB)"
    return str(default)


def _flag_type(annotation: Any) -> Any:
    """The first plain type in the annotation. Choices and secrets stay text, which pydantic checks."""
    parts = (annotation, *getattr(annotation, "__args__", ()))
    return next((part for part in parts if part in _PLAIN), str)
