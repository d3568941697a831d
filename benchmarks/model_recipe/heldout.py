"""How well a model answers about texts that no training sees: other passages, countries, articles and, for
the invented tasks, other random streams.

The tokens of an answer are guessed with the right ones before them. An answer counts as right if every guess
is: greedy decoding would give it as it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.model_recipe.architecture import Params
from benchmarks.model_recipe.corpus import Corpus
from benchmarks.model_recipe.forward import Forward
from benchmarks.model_recipe.mixture import Mixture
from benchmarks.model_recipe.samples import Batch, packed

TASKS = ("reading", "facts", "gaps", "hop", "chains", "text")
SEED = 990_000
Scores = dict[str, float]


def as_tensors(batch: Batch, device: str) -> Batch:
    values = (getattr(batch, name) for name in Batch.__dataclass_fields__)
    return Batch(*(torch.as_tensor(value).to(device, non_blocking=True) for value in values))  # type: ignore[arg-type]


class HeldOut:
    """One fixed batch of each task."""

    def __init__(self, folder: Path, tokens: int, device: str, tasks: Sequence[str] = TASKS) -> None:
        mixture = Mixture(Corpus(folder, sentences=2000, part="heldout"), SEED, tokens)
        mixture.hidden_share, mixture.branched_share, mixture.progress = 0.0, 1.0, 1.0
        self.batches = {}
        for task in tasks:
            batch = packed(
                lambda room, name=task: mixture.fitting(lambda: name, room), tokens, mixture.random
            )
            self.batches[task] = as_tensors(batch, device)

    @torch.no_grad()
    def scores(self, forward: Forward, params: Params) -> Scores:
        """Percent of right answers by task, and of ``text`` the mean loss."""
        out = {}
        for task, batch in self.batches.items():
            h = forward(params, batch, forward.visible(batch))
            _, each, guess = forward.head_loss(h, *forward.head(params), batch.target, batch.weight)
            if task == "text":
                out[task] = round(float(each[batch.weight == 1.0].mean()), 3)
                continue
            out[task] = round(100 * float(right(batch, guess).float().mean()), 1)
        return out


def right(batch: Batch, guess: torch.Tensor) -> torch.Tensor:
    """Tell of each answer of a batch whether all its tokens are guessed."""
    reply = torch.as_tensor(batch.reply)
    place, order = torch.as_tensor(batch.chosen)[reply].sort()
    hits = (guess == torch.as_tensor(batch.target))[reply][order]
    begins = torch.cat([place[:1] >= 0, place[1:] != place[:-1] + 1])
    number = begins.cumsum(0) - 1
    misses = torch.zeros(int(number[-1]) + 1 if len(number) else 0, device=hits.device)
    return misses.index_add(0, number, (~hits).float()) == 0


def mean(scores: Scores) -> float:
    """The mean over the tasks with answers."""
    found = [value for task, value in scores.items() if task != "text"]
    return sum(found) / len(found)
