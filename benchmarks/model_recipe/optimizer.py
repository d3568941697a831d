"""Muon for the matrices of the layers, and the learning rate by the clock."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

WARM_STEPS = 80
HELD = 0.3  # share of the schedule at the full rate; then cosine to `LAST`
LAST = 0.03


def orthogonalised(gradient: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Make a batch of matrices nearly orthogonal by Newton-Schulz iterations (Muon, Jordan et al. 2024)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = gradient.bfloat16()
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        product = x @ x.mT
        x = a * x + (b * product + c * product @ product) @ x
    return x.mT if tall else x


class Muon:
    """Momentum whose update is orthogonalised, for matrices grouped by shape.

    Weights decay to zero or, ``towards_start``, to what they are now: decay to zero would take a third of
    trained weights in one run, and with it what they know beyond the data at hand."""

    def __init__(
        self,
        matrices: Sequence[torch.Tensor],
        weight_decay: float = 0.01,
        towards_start: bool = False,
    ) -> None:
        self._groups: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for matrix in matrices:
            self._groups.setdefault(tuple(matrix.shape), []).append(matrix)
        self._momenta = {
            shape: torch.zeros(len(group), *shape, device=group[0].device)
            for shape, group in self._groups.items()
        }
        self._decay = weight_decay
        self._aims = {
            shape: [
                matrix.detach().clone() if towards_start else torch.zeros_like(matrix) for matrix in group
            ]
            for shape, group in self._groups.items()
        }

    @torch.no_grad()
    def step(self, rate: float, momentum: float) -> None:
        for shape, group in self._groups.items():
            gradient = torch.stack([matrix.grad for matrix in group if matrix.grad is not None])
            buffer = self._momenta[shape]
            buffer.lerp_(gradient, 1 - momentum)
            update = orthogonalised(gradient.lerp(buffer, momentum)).float()
            update *= rate * math.sqrt(max(1.0, shape[0] / shape[1]))
            torch._foreach_lerp_(group, self._aims[shape], rate * self._decay)
            torch._foreach_sub_(group, list(update.unbind(0)))

    def state(self) -> dict[tuple[int, ...], torch.Tensor]:
        return self._momenta

    def restore(self, state: dict[tuple[int, ...], torch.Tensor]) -> None:
        for shape, buffer in state.items():
            self._momenta[shape].copy_(buffer)


def rate_at(progress: float, step: int) -> float:
    """The factor of the learning rates at a point of the schedule, 0 to 1."""
    held = progress < HELD
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - HELD) / (1 - HELD))))
    return (1.0 if held else LAST + (1 - LAST) * cosine) * min(1.0, (step + 1) / WARM_STEPS)
