"""Trains the adapter: AdamW with warm-up and cosine, whose gradient is finite before every step.

Time or steps end a training. Each block of steps first lets the base answer the block's prompts greedily,
over the whole prompt; the answers' tokens are what is compared."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ragserve.adapt import greedy
from ragserve.adapt.checkpoints import Checkpoints, TrainingCourse
from ragserve.adapt.distillation import divergence
from ragserve.adapt.finite_values import not_finite
from ragserve.adapt.packing import TrainingSequence, in_packs
from ragserve.errors import RagserveError

if TYPE_CHECKING:
    import torch

    from ragserve.adapt.low_rank import AdaptedModel
    from ragserve.adapt.sample_mix import SampleMix

OnProgress = Callable[[str, str], None]
"""Called with the phase and its counts."""
_WARM_UP = 10  # steps
_LEAST_RATE = 0.1  # share of the learning rate at the end
_CLIP = 1.0
_BAD = 5  # steps in a row without a finite gradient that end a training


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """``seconds`` of training, or ``steps`` where they come first; ``batch``: samples of a step; ``every``:
    steps between held-out KL and checkpoints; ``answer_tokens``: longest answer."""

    seconds: float
    steps: int | None = None
    batch: int = 16
    every: int = 20
    rate: float = 2e-4
    answer_tokens: int = 32


class _TimeIsUp(Exception):
    """The time to train has passed."""


class Training:
    """One training of a model that has its adapter."""

    def __init__(
        self,
        model: AdaptedModel,
        mix: SampleMix,
        held_out: Sequence[TrainingSequence],
        checkpoints: Checkpoints,
        options: TrainingOptions,
        on_progress: OnProgress = lambda phase, counts: None,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_step: Callable[[int], None] = lambda step: None,
    ) -> None:
        """``held_out``: composed prompts without answers. ``on_step``: called with the number of steps taken
        after each."""
        import torch

        self._model, self._mix, self._options = model, mix, options
        self._checkpoints, self._progress, self._clock = checkpoints, on_progress, clock
        self._on_step, self._prompts = on_step, held_out
        self._weights = list(model.parameters().values())
        self._optimiser = torch.optim.AdamW(self._weights, options.rate, (0.9, 0.99), weight_decay=0.0)
        self._warm_from = 0
        self._mark = clock()
        self.course = TrainingCourse()

    def run(self) -> TrainingCourse:
        """Train, from the latest checkpoint if there is one, and leave the model with the adapter of the best
        held-out KL. Raises RagserveError where it has never fallen."""
        self._progress("held-out answers", "")
        self._held_out = self._answered(self._prompts)
        self._resume()
        if not self.course.history:
            self._progress("held-out KL", "")
            self._evaluate()
            self._check()
        self._mark = self._clock()
        bad = 0
        block: list[TrainingSequence] = []
        while not self.course.stopped and self._share < 1:
            first = self.course.step * self._options.batch
            if not block:
                left = self._options.every - self.course.step % self._options.every
                drawn = [self._mix.sample(first + i) for i in range(left * self._options.batch)]
                try:
                    block = self._answered(drawn, self._in_time)
                except _TimeIsUp:  # no step has been taken since the last checkpoint's
                    self._count()
                    self._save()
                    break
            samples, block = block[: self._options.batch], block[self._options.batch :]
            if self._step(samples):
                bad = 0
            else:
                bad, self.course.skipped = bad + 1, self.course.skipped + 1
            self.course.step += 1
            self._count()
            if bad == _BAD:
                self.course.stopped = f"{_BAD} steps in a row had no finite gradient"
            if self.course.step % self._options.every == 0 or self.course.stopped or self._share >= 1:
                self._evaluate()
                self._count()
                self._save()
            self._say()
            self._on_step(self.course.step)
        if not self.course.best_step:
            why = self.course.stopped or "more time, or more questions, may help"
            raise RagserveError(
                f"Held-out KL never fell in {self.course.step} steps, so nothing is written: {why}."
            )
        self._load(self._checkpoints.best(self.course.best_step))
        return self.course

    def _check(self) -> None:
        """Raise RagserveError where the untrained adapter's KL is not finite, and name the module."""
        if math.isfinite(self._total({key: self.course.history[0][key] for key in ("composed", "whole")})):
            return
        [part, *_] = in_packs(self._held_out, self._model.room)
        why = not_finite(self._model.causal, lambda: divergence(self._model, part))
        raise RagserveError(
            f"The model's values are not finite before any training: {why or 'only at times'}.",
            hint="Look at the weights, or at what else uses the GPU.",
        )

    def _count(self) -> None:
        """Count the time since the last call."""
        now = self._clock()
        self.course.seconds, self._mark = self.course.seconds + now - self._mark, now

    def _in_time(self) -> None:
        """Raise _TimeIsUp once it is."""
        if self.course.seconds + self._clock() - self._mark >= self._options.seconds:
            raise _TimeIsUp

    @property
    def _share(self) -> float:
        """Share of the training that is done."""
        steps = self.course.step / self._options.steps if self._options.steps else 0.0
        return max(steps, self.course.seconds / self._options.seconds)

    def _rate(self) -> float:
        warm = min(1.0, (self.course.step - self._warm_from + 1) / _WARM_UP)
        cosine = _LEAST_RATE + (1 - _LEAST_RATE) * (1 + math.cos(math.pi * min(1.0, self._share))) / 2
        return self._options.rate * warm * cosine

    def _step(self, samples: Sequence[TrainingSequence]) -> bool:
        """Take a step; without a finite gradient leave the weights as they are, and return False."""
        import torch

        for group in self._optimiser.param_groups:
            group["lr"] = self._rate()
        if not self._find_gradient(samples):
            if not self._model.save_memory():
                raise torch.OutOfMemoryError("A step does not fit into the GPU's memory.")
            self._progress("memory", "layers are computed again in the backward pass from now on")
            return self._step(samples)
        norm = torch.nn.utils.clip_grad_norm_(self._weights, _CLIP)
        if not torch.isfinite(norm):
            return False
        self._optimiser.step()
        return True

    def _find_gradient(self, samples: Sequence[TrainingSequence]) -> bool:
        """Compute the samples' gradient; False where the GPU's memory is full."""
        import torch

        self._optimiser.zero_grad(set_to_none=True)
        tokens = sum(len(each.targets) for each in samples)
        try:
            with self._model.training():
                for part in in_packs(samples, self._model.room):
                    (divergence(self._model, part) / tokens).backward()
        except torch.OutOfMemoryError:  # whose traceback holds what is to be freed
            return False
        return True

    def _evaluate(self) -> None:
        """Note the held-out KL a token, of composed and of whole prompts, and keep the best adapter."""
        import torch

        kl = {}
        for name, composed in (("composed", True), ("whole", False)):
            sequences = [replace(each, composed=composed) for each in self._held_out]
            total, tokens = 0.0, sum(len(each.targets) for each in sequences)
            with torch.no_grad():
                for part in in_packs(sequences, self._model.room):
                    total += float(divergence(self._model, part))
            kl[name] = total / tokens
        course = self.course
        best = min((self._total(each) for each in course.history), default=math.inf)
        course.history.append({"step": course.step, **kl})
        if course.step and self._total(kl) < best:
            course.best_step = course.step
            self._checkpoints.save_best(self._model.parameters(), course.step)

    @staticmethod
    def _total(kl: dict[str, float]) -> float:
        total = kl["composed"] + kl["whole"]
        return total if math.isfinite(total) else math.inf

    def _answered(
        self, sequences: Sequence[TrainingSequence], on_batch: Callable[[], None] = lambda: None
    ) -> list[TrainingSequence]:
        """Sequences with the base's greedy answers over the whole prompt, and what predicts them; plain texts
        as they are. ``on_batch``: called before each batch of answers."""
        asked = [n for n, each in enumerate(sequences) if not each.rows]
        prompts = [replace(sequences[n], composed=False) for n in asked]
        with self._model.base():
            found = greedy.taught(self._model, prompts, self._options.answer_tokens, on_batch)
        made = list(sequences)
        for n, ([answer, *others], taught) in zip(asked, found, strict=True):
            more = [(question, ids) for (question, _), ids in zip(sequences[n].more, others, strict=True)]
            made[n] = replace(sequences[n], answer=answer, more=more, taught=taught)
        return made

    def _resume(self) -> None:
        if (known := self._checkpoints.load()) is None:
            return
        self.course, adapter, optimiser = known
        self._load(adapter)
        if optimiser is None:
            self._warm_from = self.course.step
        else:
            self._optimiser.load_state_dict(optimiser)
        self._progress("resumed", f"step {self.course.step}")

    def _load(self, adapter: dict[str, torch.Tensor]) -> None:
        import torch

        with torch.no_grad():
            for name, value in self._model.parameters().items():
                value.copy_(adapter[name])

    def _save(self) -> None:
        self._checkpoints.save(self.course, self._model.parameters(), self._optimiser.state_dict())

    def _say(self) -> None:
        latest, options = self.course.history[-1], self._options
        left = (options.seconds - self.course.seconds) / 60
        steps = f" of {options.steps}" if options.steps else ""
        self._progress(
            "training",
            f"step {self.course.step}{steps}, held-out KL {latest['composed']:.3f} composed and "
            f"{latest['whole']:.4f} whole, {left:.0f} min left",
        )
