"""Merge a low-rank adapter into a model's weights: W + alpha / r * B A (Hu et al., 2022).

In float64, so that the rounded weights, and the model's fingerprint with them, are the same on every machine.

Reads the two files that peft writes, without peft, which only training needs."""

from __future__ import annotations

import json
from pathlib import Path

_PREFIX = "base_model.model."
_WEIGHTS = "adapter_model.safetensors"
_OTHER_FORMS = (
    "use_dora",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "fan_in_fan_out",
)


def merge_adapter(model: Path, adapter: Path) -> None:
    """Add the adapter's weights to those of ``model``, a Hugging Face folder with one safetensors file.

    The file keeps its data types. Raises ValueError for an adapter of another form or another model."""
    from safetensors.torch import load_file, save_file

    settings = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    if settings.get("peft_type") != "LORA" or settings.get("bias", "none") != "none":
        raise ValueError(f"{adapter} is no plain LoRA adapter")
    if other := [name for name in _OTHER_FORMS if settings.get(name)]:
        raise ValueError(f"{adapter} has {', '.join(other)}, which are not merged here")
    parts = load_file(adapter / _WEIGHTS)
    path = model / "model.safetensors"
    weights = load_file(path)
    for name in sorted(parts):
        if name.endswith(".lora_B.weight"):
            continue
        target = name.removeprefix(_PREFIX).replace(".lora_A.", ".")
        up = parts.get(name.replace(".lora_A.", ".lora_B."))
        if ".lora_A." not in name or up is None or target not in weights:
            raise ValueError(f"{adapter} has {name}, for which {model} has no place")
        down, weight = parts[name], weights[target]
        added = settings["lora_alpha"] / down.shape[0] * (up.double() @ down.double())
        weights[target] = (weight.double() + added).to(weight.dtype)
    save_file(weights, path, metadata={"format": "pt"})
