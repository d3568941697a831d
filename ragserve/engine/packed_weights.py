"""Checkpoints quantised by AWQ, GPTQ or to FP8, on a machine whose SGLang has no kernels for them: as those
of a GGUF file, their weights are dequantised once, into a folder in bfloat16 that is served in their place.

A weight is (q - zero) * scale, for AWQ and GPTQ with a zero and a scale for each group of input channels and
each output channel; of FP8 it is q * scale, with a scale for each tensor, output channel or block."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragserve.engine.gguf_weights import digest, made_once, save
from ragserve.errors import InvalidRequest

if TYPE_CHECKING:
    import torch

METHODS = ("awq", "gptq", "fp8")
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The columns, of eight, of the four-bit numbers of a word, the lowest first."""
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
_KV_SCALES = (".k_scale", ".v_scale", ".q_scale", ".prob_scale", ".input_scale", ".activation_scale")
"""Those of activations, which are computed in bfloat16."""
_ADVICE = "Give --model the unquantised weights; or serve it on a machine with a GPU."


def method_of(folder: Path) -> str | None:
    """Which of `METHODS` a folder's weights are quantised by; None for others, and for none."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        method = config["quantization_config"]["quant_method"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return method if method in METHODS and any(folder.glob("*.safetensors")) else None


def as_folder(source: Path, folder: Path, say: Callable[[str], None] = lambda line: None) -> Path:
    """Return the folder in ``folder`` with the weights of the checkpoint ``source``, in bfloat16; make it if
    it is not there. ``say`` gets a line when that begins.

    Raises InvalidRequest for weights that are incomplete or packed in another way, and StorageFull."""
    files = [source / "config.json", *sorted(source.glob("*.safetensors"))]
    return made_once(source, folder / f"{source.resolve().name}-{digest(files)}", _write, say)


def _write(source: Path, folder: Path) -> None:
    from safetensors import SafetensorError, safe_open

    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    quantised = config.pop("quantization_config")
    tensors: dict[str, torch.Tensor] = {}
    try:
        for file in sorted(source.glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        _check_complete(source, tensors)
        if quantised["quant_method"] != "fp8" and not any(name.endswith(".qweight") for name in tensors):
            raise ValueError("none of its weights is packed")
        weights = dict(dequantised(tensors, quantised))
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        line = str(error).splitlines()[0]
        raise InvalidRequest(
            f"model: {source} cannot be dequantised: {line}", hint=_ADVICE, param="model"
        ) from error
    save(weights, folder)
    for path in source.iterdir():
        if path.is_file() and not path.name.endswith(_NOT_COPIED) and path.name != "config.json":
            shutil.copy(path, folder)
    config |= {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(
        json.dumps(config, indent=2), encoding="utf-8"
    )  # last, see `made_once`


def _check_complete(source: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Raise ValueError if a file of several is not there."""
    index = source / "model.safetensors.index.json"
    if index.is_file():
        named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if missing := sorted(named.keys() - tensors.keys()):
            raise ValueError(f"it lacks {len(missing)} weights: {', '.join(missing[:3])}")


def dequantised(
    tensors: dict[str, torch.Tensor], config: dict[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and weights [out, in] in bfloat16 of a checkpoint's ``tensors``, which it takes the packed ones
    out of. ``config``: its `quantization_config`.

    Raises ValueError for tensors that do not belong together, and for packings of other kinds."""
    import torch

    method = config["quant_method"]
    parts = ("qweight", "qzeros", "scales", "g_idx")
    packed = sorted(name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight"))
    for name in packed:
        given = {part: tensors.pop(f"{name}.{part}") for part in parts if f"{name}.{part}" in tensors}
        if missing := {"qweight", "qzeros", "scales"} - given.keys():
            raise ValueError(f"{name} has no {' and no '.join(sorted(missing))}")
        weight = _awq(given, config) if method == "awq" else _gptq(given, config)
        yield f"{name}.weight", weight.T.to(torch.bfloat16).contiguous()
    for name in sorted(tensors):
        if name.endswith((*_KV_SCALES, ".weight_scale", ".weight_scale_inv")):
            continue
        tensor = tensors[name]
        if tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point:
            scale = tensors.get(f"{name}_scale", tensors.get(f"{name}_scale_inv"))
            if scale is None:
                raise ValueError(f"{name} has no scale")
            tensor = tensor.float() * _spread(scale.float(), tensor.shape, config.get("weight_block_size"))
        yield name, tensor.to(torch.bfloat16) if tensor.dtype.is_floating_point else tensor


def _awq(given: dict[str, torch.Tensor], config: dict[str, Any]) -> torch.Tensor:
    """A weight [in, out] of four-bit numbers, eight columns to a word."""
    import torch

    version = config.get("version", "gemm")
    if config.get("bits", config.get("w_bit")) != 4 or str(version).lower() != "gemm":
        raise ValueError(f"AWQ of {config.get('bits', config.get('w_bit'))} bits, packed for {version}")
    order = torch.tensor(_AWQ_ORDER)

    def numbers(words: torch.Tensor) -> torch.Tensor:
        found = _unpacked(words, 4)
        ordered = torch.empty_like(found)
        ordered[..., order] = found
        return ordered.flatten(1)

    q, zeros, scales = numbers(given["qweight"]), numbers(given["qzeros"]), given["scales"].float()
    group = len(q) // len(scales)
    if group * len(scales) != len(q) or zeros.shape != scales.shape:
        raise ValueError(f"{len(q)} rows of weights, and {tuple(scales.shape)} scales")
    return (q - zeros.repeat_interleave(group, 0)) * scales.repeat_interleave(group, 0)


def _gptq(given: dict[str, torch.Tensor], config: dict[str, Any]) -> torch.Tensor:
    """A weight [in, out] of numbers of 2, 4 or 8 bits, packed by rows, its zeros by columns."""
    import torch

    bits = config.get("bits")
    if bits not in (2, 4, 8):
        raise ValueError(f"GPTQ of {bits} bits")
    scales = given["scales"].float()
    q = _unpacked(given["qweight"].T, bits).flatten(1).T
    zeros = _unpacked(given["qzeros"], bits).flatten(1)
    if config.get("checkpoint_format", "gptq") == "gptq":
        zeros = zeros + 1  # which this format leaves out
    group = given.get("g_idx")
    if group is None:
        group = torch.arange(len(q)) // (len(q) // len(scales))
    if len(group) != len(q) or zeros.shape != scales.shape:
        raise ValueError(f"{len(q)} rows of weights, and {tuple(scales.shape)} scales")
    return (q - zeros[group.long()]) * scales[group.long()]


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The numbers of 32-bit words [..., n], the lowest bits first: [..., n, 32 / bits]."""
    import torch

    if words.dtype != torch.int32:
        raise ValueError(f"packed numbers of type {words.dtype}")
    return (words[..., None] >> torch.arange(0, 32, bits, dtype=torch.int32)) & (2**bits - 1)


def _spread(scale: torch.Tensor, shape: torch.Size, block: list[int] | None) -> torch.Tensor:
    """Scales of a tensor, its rows or its blocks, as a tensor that broadcasts to ``shape``."""
    if block is None:
        return scale if scale.numel() == 1 else scale.reshape(-1, 1)
    rows, columns = block
    return scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: shape[0], : shape[1]]
