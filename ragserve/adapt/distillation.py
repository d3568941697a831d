"""The loss: how far an adapted model's next tokens are from the base's, which reads the whole prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ragserve.adapt.packing import TrainingSequence

if TYPE_CHECKING:
    import torch

    from ragserve.adapt.low_rank import AdaptedModel

_ROWS = 128  # whose logits are in memory at once


def divergence(model: AdaptedModel, sequences: Sequence[TrainingSequence]) -> torch.Tensor:
    """KL(base with full attention || adapted model), summed over the compared tokens, a scalar.

    Memory: the logits of `_ROWS` tokens, whatever the number of tokens."""
    import torch
    from torch.utils.checkpoint import checkpoint

    pack, wanted = model.pack(sequences), torch.cat(_taught(model, sequences))
    hidden, *_ = model.run(pack)
    given = hidden[pack.targets]

    def part(own: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = model.logits(base).log_softmax(-1)
        found: torch.Tensor = torch.nn.functional.kl_div(
            model.logits(own).log_softmax(-1), target, reduction="sum", log_target=True
        )
        return found

    total = torch.zeros((), device=model.device)
    for at in range(0, len(given), _ROWS):
        chunk = given[at : at + _ROWS], wanted[at : at + _ROWS]
        total = total + checkpoint(part, *chunk, use_reentrant=False)
    return total


def _taught(model: AdaptedModel, sequences: Sequence[TrainingSequence]) -> list[torch.Tensor]:
    """The base's hidden states that predict each sequence's compared tokens, over the whole prompt."""
    import torch

    known = [each.taught for each in sequences]
    asked = [n for n, each in enumerate(known) if each is None]
    if asked:
        whole = [replace(sequences[n], composed=False) for n in asked]
        pack = model.pack(whole)
        with torch.no_grad(), model.base():
            hidden, *_ = model.run(pack)
        parts = hidden[pack.targets].split([len(each.targets) for each in whole])
        for n, part in zip(asked, parts, strict=True):
            known[n] = part
    return known
