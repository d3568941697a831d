"""Quantises a model's folder by plain rounding, and packs it by SGLang's functions as published ones are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

GROUP, BLOCK = 32, [32, 48]
CONFIGS: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False},
    "gptq of 8 bits": {
        "quant_method": "gptq",
        "bits": 8,
        "group_size": GROUP,
        "desc_act": False,
        "sym": False,
        "checkpoint_format": "gptq_v2",
    },
    "fp8": {"quant_method": "fp8", "activation_scheme": "static"},
    "fp8 of rows": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "fp8 of blocks": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": BLOCK},
}


def quantised(source: Path, folder: Path, kind: str) -> Path:
    """Write into ``folder`` the model of ``source``, its linear layers quantised as ``CONFIGS`` says."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIGS[kind]}))
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = weight.half().contiguous()
            continue
        layer = name.removesuffix(".weight")
        parts = {"awq": _awq, "gptq": _gptq}.get(CONFIGS[kind]["quant_method"], _fp8)(weight.float(), kind)
        tensors |= {f"{layer}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def _rounded(weight: torch.Tensor, groups: torch.Tensor, bits: int) -> tuple[torch.Tensor, ...]:
    """Numbers [in, out], zeros and scales [groups, out] of a weight [in, out], with each row's group."""
    largest = 2**bits - 1
    low, high = (
        torch.stack([found(weight[groups == each], 0).values for each in groups.unique()])
        for found in (torch.min, torch.max)
    )
    scales = ((high - low) / largest).half().float()
    zeros = (-low / scales).round().clamp(1, largest)
    numbers = ((weight / scales[groups]).round() + zeros[groups]).clamp(0, largest)
    return numbers.int(), zeros.int(), scales.half()


def _awq(weight: torch.Tensor, _: str) -> dict[str, torch.Tensor]:
    from sglang.srt.layers.quantization.utils import pack_cols

    rows, columns = weight.T.shape
    numbers, zeros, scales = _rounded(weight.T, torch.arange(rows) // GROUP, 4)

    def packed(each: torch.Tensor) -> torch.Tensor:
        ordered = each.reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(each.shape)
        return pack_cols(ordered, 4, len(each), columns)

    return {"qweight": packed(numbers), "qzeros": packed(zeros), "scales": scales}


def _gptq(weight: torch.Tensor, kind: str) -> dict[str, torch.Tensor]:
    from sglang.srt.layers.quantization.utils import pack_cols, pack_rows

    config = CONFIGS[kind]
    bits, (rows, columns) = config["bits"], weight.T.shape
    groups = torch.arange(rows) // GROUP
    if config["desc_act"]:
        groups = groups[torch.randperm(rows, generator=torch.Generator().manual_seed(1))]
    numbers, zeros, scales = _rounded(weight.T, groups, bits)
    stored = zeros - int(config.get("checkpoint_format", "gptq") == "gptq")
    return {
        "qweight": pack_rows(numbers, bits, rows, columns),
        "qzeros": pack_cols(stored, bits, len(zeros), columns),
        "scales": scales,
        "g_idx": groups.int(),
    }


def _fp8(weight: torch.Tensor, kind: str) -> dict[str, torch.Tensor]:
    if kind == "fp8 of blocks":
        rows, columns = (-(-size // block) for size, block in zip(weight.shape, BLOCK, strict=True))
        scale = torch.empty(rows, columns)
        for i in range(rows):
            for j in range(columns):
                block = weight[i * BLOCK[0] :, j * BLOCK[1] :][: BLOCK[0], : BLOCK[1]]
                scale[i, j] = block.abs().max() / 448
        spread = scale.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
        spread = spread[: len(weight), : weight.shape[1]]
        return {"weight": (weight / spread).to(torch.float8_e4m3fn), "weight_scale_inv": scale}
    scale = weight.abs().amax(1, keepdim=True) / 448
    if kind == "fp8":
        scale = scale.max()
    parts = {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}
    return parts | ({"input_scale": torch.tensor(0.1)} if kind == "fp8" else {})
