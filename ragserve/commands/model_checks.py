"""What keeps a model from being served by SGLang on this machine, found without loading its weights."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ragserve.config import Settings
from ragserve.engine import gguf_weights
from ragserve.engine.packaged_model import is_packaged, place
from ragserve.engine.packed_weights import METHODS, method_of

Problem = tuple[str, str]
"""What was found, and what to do about it."""


def problem_at_ingestion(settings: Settings) -> Problem | None:
    """What keeps a model on this machine, which passages are cut for, from being served here."""
    path = Path(settings.model)
    if path.is_file():
        return unreadable_file(path)
    if settings.engine_elsewhere or not (path / "config.json").is_file():
        return None
    config = read_config(path)
    if isinstance(config, tuple):
        return config
    return problem_of(config, settings)


def problem_of(config: dict[str, Any], settings: Settings) -> Problem | None:
    """What in a model's config keeps SGLang from serving it on this machine."""
    options = settings.engine_args
    if (problem := unknown_architecture(config, options)) or is_dequantised(settings):
        return problem
    return quantised_for_others(config, options)


def unreadable_file(path: Path) -> Problem:
    """The problem of a model that is a file."""
    return f"{path} is a file", "Give --model the folder with config.json and the weights, or a GGUF file."


def read_config(folder: Path) -> dict[str, Any] | Problem:
    """Read a model's config.json, or say why that fails."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"{folder / 'config.json'} cannot be read: {error}", "Download the complete model again."
    if not isinstance(config, dict):
        return f"{folder / 'config.json'} is no JSON object", "Download the complete model again."
    return config


def unknown_architecture(config: dict[str, Any], options: dict[str, Any]) -> Problem | None:
    """The problem of a config that names architectures of which neither SGLang nor transformers knows
    one. ``options``: those of the engine, which may let it read more."""
    names = [name for name in config.get("architectures") or [] if isinstance(name, str)]
    more = (config.get("auto_map"), options.get("trust_remote_code"), options.get("json_model_override_args"))
    if not names or any(more) or os.environ.get("SGLANG_EXTERNAL_MODEL_PACKAGE"):
        return None
    known = _in_sglang()
    if not known or any(name in known for name in names) or _in_transformers(names):
        return None
    advice = (
        "Give another model: docs.sglang.io lists those that it serves. Other versions of sglang or "
        "transformers than the pinned ones are not tested with ragserve."
    )
    return f"SGLang {version('sglang')} does not know {', '.join(names)}", advice


@cache
def _in_sglang() -> frozenset[str]:
    """Every class of SGLang's models. They are read, not imported, which would take half a minute."""
    spec = find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return frozenset()
    folder = Path(spec.submodule_search_locations[0]) / "srt/models"
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in folder.glob("*.py"))
    return frozenset(name for text in texts for name in re.findall(r"^class (\w+)", text, re.MULTILINE))


def _in_transformers(names: list[str]) -> bool:
    """True if SGLang can take one of ``names`` from transformers."""
    import transformers

    return any(name in dir(transformers) for name in names)


def quantised_for_others(config: dict[str, Any], options: dict[str, Any]) -> Problem | None:
    """The problem of a quantised checkpoint that this machine has no kernels for."""
    given = config.get("quantization_config") or config.get("compression_config")
    method = given.get("quant_method") if isinstance(given, dict) else None
    if not method or "quantization" in options:
        return None
    import torch

    if torch.cuda.is_available():
        least = _least_capability(method)
        major, minor = torch.cuda.get_device_capability()
        if least is None or 10 * major + minor >= least:
            return None
        found = f"its weights are quantised ({method}), which needs a GPU of compute capability {least / 10}"
        return f"{found}; this one has {major}.{minor}", "Give the model's unquantised weights."
    if _has_amx():
        return None
    advice = "Give the model's unquantised weights; or serve it on a machine with a GPU."
    if method in METHODS:
        advice = f"Give --model a folder with them, not an id: {', '.join(METHODS)} are dequantised then."
    return f"its weights are quantised ({method}), which SGLang cannot run on this CPU", advice


def tokenizer_name(settings: Settings) -> str | None:
    """The folder or id that a server loads its tokenizer from; None if it is still to be made. Raises
    InvalidRequest."""
    if settings.tokenizer:
        return settings.tokenizer
    if is_packaged(settings.model):
        made = place()
    elif (file := gguf_weights.gguf_of(settings.model)) is not None:
        made = gguf_weights.place(file, settings.data_dir / "models")
    else:
        return settings.model
    return str(made) if (made / "config.json").is_file() else None


def is_dequantised(settings: Settings) -> bool:
    """True if the model is a folder of quantised weights that `packed_weights` makes one in bfloat16 of, as
    SGLang does not run them on this machine."""
    folder = Path(settings.model)
    if (method := method_of(folder)) is None:
        return False
    config = {"quantization_config": {"quant_method": method}}
    return quantised_for_others(config, settings.engine_args) is not None


def _least_capability(method: str) -> int | None:
    """Ten times the compute capability that a quantisation needs; None if SGLang does not say."""
    from ragserve.engine.compat import prepare

    prepare()
    with suppress(Exception):  # what SGLang does not tell, it finds out at the start
        from sglang.srt.layers.quantization import QUANTIZATION_METHODS

        return int(QUANTIZATION_METHODS[method].get_min_capability())
    return None


def _has_amx() -> bool:
    """True if SGLang's kernels for quantised weights run on this CPU."""
    from ragserve.engine.compat import prepare

    prepare()
    from sglang.srt.utils import cpu_has_amx_support

    return bool(cpu_has_amx_support())
