"""Finds where a model's values stop being finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def not_finite(model: torch.nn.Module, forward: Callable[[], Any]) -> str:
    """Run ``forward``, which runs ``model``, and name the first module that gives a value that is not finite,
    and whether it was given one; empty if all values are finite. Weights that are not finite are named
    first."""
    import torch

    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        if not bool(torch.isfinite(weight).all()):
            return f"weight {name} is not finite"
    found: list[str] = []

    def watch(name: str, inputs: tuple[Any, ...], output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if found or not isinstance(first, torch.Tensor) or bool(torch.isfinite(first).all()):
            return
        given = [each for each in inputs if isinstance(each, torch.Tensor)]
        bad = any(not bool(torch.isfinite(each).all()) for each in given)
        rows = ~torch.isfinite(first).flatten(0, -2).all(-1)
        found.append(
            f"{name or 'the model'} gives values that are not finite in {int(rows.sum())} of {len(rows)} "
            f"rows of type {first.dtype}; its inputs are {'not finite' if bad else 'finite'}"
        )

    hooks = [
        module.register_forward_hook(lambda _, inputs, output, name=name: watch(name, inputs, output))
        for name, module in model.named_modules()
    ]
    try:
        with torch.no_grad():
            forward()
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else ""
