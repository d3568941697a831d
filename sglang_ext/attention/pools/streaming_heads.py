"""Pattern files: which KV heads of which layers are streaming heads (LServe 3.4, DuoAttention)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

PATTERN_VERSION = 1


def save_pattern(path: Path, gates: torch.Tensor, *, share: float, model: str, **details: Any) -> None:
    """Write the gates and the pattern in which ``share`` of the heads stream, atomically.

    ``gates``: float [layers, kv_heads]; 1: the head needs all of the context. ``details``: further fields.

    Raises:
        ValueError: a gate or a figure is not finite.
    """
    pattern = {
        "v": PATTERN_VERSION,
        "model": model,
        "share": share,
        "gates": [[round(float(g), 4) for g in row] for row in gates],
        "streaming": streaming_heads(gates, share).int().tolist(),
    }
    text = json.dumps(pattern | details, allow_nan=False) + "\n"
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        error.filename = str(path)  # a write that fails does not name its file
        raise


def streaming_heads(gates: torch.Tensor, share: float) -> torch.Tensor:
    """Return bool [layers, kv_heads], True for the ``share`` of the heads with the lowest gates."""
    if not 0 <= share <= 1:
        raise ValueError(f"a share of {share} of the heads: expected 0 to 1")
    chosen = torch.zeros(gates.numel(), dtype=torch.bool)
    chosen[gates.flatten().argsort(stable=True)[: round(share * gates.numel())]] = True
    return chosen.view(gates.shape)


def even_streaming_heads(gates: torch.Tensor) -> torch.Tensor:
    """Return bool [layers, kv_heads], True for the half of the heads of each layer with the lowest gates."""
    order = gates.argsort(dim=1, stable=True).argsort(dim=1)
    return order < gates.shape[1] // 2


def read_pattern(path: Path) -> torch.Tensor:
    """Return bool [layers, kv_heads], True for streaming ones.

    Raises:
        ValueError: the file is no pattern, or has gates that are not finite.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        version, pattern = raw["v"], torch.tensor(raw["streaming"], dtype=torch.bool)
        gates = torch.tensor(raw.get("gates", []), dtype=torch.float64)
    except (OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{path} is no pattern file ({error!r}): make one with `ragserve calibrate --part heads`"
        ) from None
    if version != PATTERN_VERSION:
        raise ValueError(
            f"{path} has version {version}, expected {PATTERN_VERSION}: make it again with `ragserve "
            "calibrate --part heads`"
        )
    if not bool(gates.isfinite().all()):
        raise ValueError(
            f"{path} has gates that are not finite, so its heads are chosen by nothing: make it again with "
            "`ragserve calibrate --part heads`"
        )
    return pattern


def load_pattern(path: Path, layers: int, kv_heads: int, *, rank: int = 0, world: int = 1) -> torch.Tensor:
    """Return bool [layers, kv_heads], True for the streaming ones of this rank's ``kv_heads`` heads.

    Raises:
        ValueError: the file is no pattern for this model.
    """
    pattern = read_pattern(path)
    total = kv_heads * world
    if pattern.dim() != 2 or pattern.shape[0] != layers or total % pattern.shape[1]:
        raise ValueError(
            f"{path} is for another model: it has {list(pattern.shape)} layers and KV heads, expected "
            f"[{layers}, {total}]"
        )
    # With more ranks than KV heads, several ranks hold copies of one head.
    pattern = pattern.repeat_interleave(total // pattern.shape[1], dim=1)
    return pattern[:, rank * kv_heads : (rank + 1) * kv_heads].contiguous()
