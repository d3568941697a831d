"""Train the embedded model on one GPU, for a given time.

    python -m benchmarks.model_recipe.train PACKED OUT --seconds 1380 [--start MODEL] [--teacher MODEL]

The schedule follows the clock. OUT gets ``log.jsonl``, the weights (bfloat16 shards) and ``checkpoint.pt``
every two minutes and at the end. The same command goes on from the checkpoint, so a run may be cut into
several with ``--stop-after`` seconds each; ``--seconds`` is the time of all together. ``--start`` names
weights to start from, grown if they are shallower; the ``--teacher`` is the start unless another is named.
With ``--only-new`` the layers that the start lacks are trained and everything else is left as it is.
``--longest 131072 --theta 2e6 --alone`` trains a reader of prompts of so many tokens (long_prompts.py)."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.model_recipe import architecture as model
from benchmarks.model_recipe.architecture import Shape
from benchmarks.model_recipe.corpus import CONTEXT, Corpus
from benchmarks.model_recipe.forward import Forward
from benchmarks.model_recipe.heldout import HeldOut, as_tensors
from benchmarks.model_recipe.long_prompts import LongMixture
from benchmarks.model_recipe.mixture import Mixture
from benchmarks.model_recipe.optimizer import Muon, rate_at
from benchmarks.model_recipe.samples import Batch

SAVE_SECONDS = 120
HELDOUT_SECONDS = 60
TAUGHT_STEPS = 2  # every so many steps the teacher is asked: a sixth of the time
MUON_RATE = 0.02
ADAM_RATE = 0.0025
GROWN_RATE = 0.5  # of both rates, where weights that are trained already go on


class Stream(torch.utils.data.IterableDataset):
    """Batches of the mixture; ``shared`` holds the progress and whether documents may be hidden."""

    def __init__(self, corpus: Corpus, options: argparse.Namespace, seed: int, shared: Any) -> None:
        self.corpus, self.options, self.seed, self.shared = corpus, options, seed, shared

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        worker = torch.utils.data.get_worker_info()
        torch.set_num_threads(1)
        seed = self.seed * 1000 + (worker.id if worker else 0)
        tokens, longest = self.options.tokens, self.options.longest
        if longest > CONTEXT:
            mixture: Mixture = LongMixture(self.corpus, seed, tokens, longest, self.options.lengthened)
        else:
            mixture = Mixture(self.corpus, seed, tokens)
        while True:
            mixture.hide = bool(self.shared[1])
            batch = mixture.batch(self.shared[0])
            yield [torch.from_numpy(getattr(batch, name)) for name in Batch.__dataclass_fields__]


def main() -> int:
    options = parsed()
    began = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options.out.mkdir(parents=True, exist_ok=True)
    shared = multiprocessing.Array("d", [0.0, 0.0])
    checkpoint = options.out / "checkpoint.pt"
    before = torch.load(checkpoint, map_location="cpu", weights_only=True) if checkpoint.exists() else None
    if before:
        shared[0] = before["seconds"] / options.seconds
    corpus = Corpus(options.packed, sentences=60_000 if device == "cuda" else 5_000)
    print(f"data loaded in {time.monotonic() - began:.1f} s", flush=True)
    seed = options.seed + (before["step"] if before else 0)
    batches = iter(loader(corpus, options, seed, shared, device))
    run = Run(options, device, before)
    shared[1] = float(run.forward.attention.hides)
    run.train(batches, shared)
    # the workers hold batches that nobody reads; a clean end would wait for them
    sys.stdout.flush()
    os._exit(0)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("packed", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=1380, help="training time of all runs together")
    parser.add_argument("--stop-after", type=float, default=1e9, help="seconds of this run")
    parser.add_argument("--steps", type=int, default=10**9, help="steps of all runs together")
    parser.add_argument("--tokens", type=int, default=131_072, help="tokens of a step")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--layers", type=int, default=Shape.num_hidden_layers)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--start", type=Path, help="folder of weights to start from")
    parser.add_argument("--teacher", type=Path, help="folder of weights whose predictions count on real text")
    parser.add_argument("--only-new", action="store_true", help="train only layers that the start lacks")
    parser.add_argument("--rate", type=float, help="factor of the learning rates")
    parser.add_argument("--longest", type=int, default=CONTEXT, help="tokens of the longest sample")
    parser.add_argument(
        "--lengthened", type=float, default=0.5, help="part of the time before most are so long"
    )
    parser.add_argument("--theta", type=float, default=Shape.rope_theta, help="base of the rotary angles")
    parser.add_argument("--alone", action="store_true", help="no teacher")
    return parser.parse_args()


def loader(corpus: Corpus, options: argparse.Namespace, seed: int, shared: Any, device: str) -> Any:
    many = options.workers > 0
    return torch.utils.data.DataLoader(
        Stream(corpus, options, seed, shared),
        batch_size=None,
        num_workers=options.workers,
        prefetch_factor=3 if many else None,
        multiprocessing_context="fork" if many else None,
        pin_memory=device == "cuda",
    )


class Run:
    """Weights, optimizers and counters of a training."""

    def __init__(self, options: argparse.Namespace, device: str, before: dict[str, Any] | None) -> None:
        self.options, self.device = options, device
        self.shape = Shape(
            num_hidden_layers=options.layers,
            rope_theta=options.theta,
            max_position_embeddings=options.longest,
        )
        self.params = model.init_params(self.shape, device, options.seed)
        onward = bool(options.start) and not options.only_new  # weights that are trained already go on
        self.rate = options.rate or (GROWN_RATE if onward else 1.0)
        self._start_from()
        trained = self.params
        if options.only_new:
            trained = model.lacking(self.params, options.start, self.shape)
        matrices = {n: p for n, p in trained.items() if p.ndim == 2 and "embed" not in n}
        self.rest = [p for n, p in trained.items() if n not in matrices]
        self.muon = Muon(list(matrices.values()), towards_start=onward)
        self.teacher = self._teacher()
        self.adam = torch.optim.AdamW(
            self.rest, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=device == "cuda"
        )
        self.forward = Forward(self.shape, device)
        self.heldout = HeldOut(options.packed, options.tokens, device)
        self.step, self.seconds = 0, 0.0
        if before:
            self._restore(before)
        self.log = (options.out / "log.jsonl").open("a", encoding="utf-8")
        size = sum(p.numel() for p in self.params.values())
        self.say(parameters=size, step=self.step, attention=self.forward.attention.attend.__name__)

    def _start_from(self) -> None:
        if self.options.start:
            start = model.started(self.options.start, self.shape, self.device)
            with torch.no_grad():
                for name, value in start.items():
                    self.params[name].copy_(value)

    def _teacher(self) -> model.Params | None:
        """The teacher's weights in the precision of the layers."""
        folder = self.options.teacher or self.options.start
        if not folder or self.options.alone:
            return None
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        weights = model.started(folder, self.shape, self.device)
        return {name: value.to(dtype) for name, value in weights.items()}

    def train(self, batches: Iterator[list[torch.Tensor]], shared: Any) -> None:
        """Step until the time or the steps of this run, or of all runs, are over."""
        sums = torch.zeros(5, device=self.device)
        began, base, since, saved, measured = 0.0, self.seconds, 0, 0.0, 0.0
        while True:
            sums += self._step(as_tensors(Batch(*next(batches)), self.device), shared[0])  # type: ignore[arg-type]
            since += 1
            if not began:  # the first step compiles
                began = time.monotonic()
            passed = time.monotonic() - began
            self.seconds = base + passed
            shared[0] = min(1.0, self.seconds / self.options.seconds)
            over = self.seconds >= self.options.seconds or passed >= self.options.stop_after
            over = over or self.step >= self.options.steps
            if over or self.step % 100 == 0 or self.device == "cpu":
                self._report(sums, since)
                sums, since = torch.zeros_like(sums), 0
            if over or passed - measured > HELDOUT_SECONDS:
                measured = passed
                self.say(step=self.step, heldout=self.heldout.scores(self.forward, self.params))
            if over or passed - saved > SAVE_SECONDS:
                saved = passed
                self.save()
            if over:
                return

    def _step(self, batch: Any, progress: float) -> torch.Tensor:
        """Take one step; return sums of loss, text loss and count, reply hits and count."""
        visible = self.forward.visible(batch)
        inputs = (self.forward(self.params, batch, visible), *self.forward.head(self.params))
        inputs = (*inputs, batch.target, batch.weight)
        if self.teacher and self.step % TAUGHT_STEPS == 0:
            with torch.no_grad():
                known = self.forward(self.teacher, batch, visible)
                wanted = self.forward.head_logits(known, *self.forward.head(self.teacher))
            loss, each, guess = self.forward.taught_loss(*inputs, batch.taught, batch.reply, wanted)
        else:
            loss, each, guess = self.forward.head_loss(*inputs)
        loss.backward()
        rate = rate_at(progress, self.step) * self.rate
        torch.nn.utils.clip_grad_norm_(self.rest, 1.0)
        for group in self.adam.param_groups:
            group["lr"] = ADAM_RATE * rate
        self.adam.step()
        self.muon.step(MUON_RATE * rate, 0.85 + 0.10 * min(1.0, self.step / 300))
        for param in self.params.values():
            param.grad = None
        self.step += 1
        text = batch.weight == 1.0
        hits = ((guess == batch.target) & batch.reply).sum()
        return torch.stack([loss.detach(), (each * text).sum(), text.sum(), hits, batch.reply.sum()]).float()

    def _report(self, sums: torch.Tensor, steps: int) -> None:
        loss, text, texts, hits, replies = sums.tolist()
        self.say(
            step=self.step,
            seconds=round(self.seconds, 1),
            loss=round(loss / steps, 3),
            text=round(text / max(1, texts), 3),
            replies=round(hits / max(1, replies), 4),
            million_tokens=round(self.step * self.options.tokens / 1e6, 1),
        )

    def say(self, **values: Any) -> None:
        line = json.dumps(values)
        print(line, flush=True)
        self.log.write(line + "\n")
        self.log.flush()

    def save(self) -> None:
        """Write weights and checkpoint; a run that is killed meanwhile leaves the earlier checkpoint."""
        model.save(self.params, self.shape, self.options.out)
        state = {
            "params": {name: value.detach() for name, value in self.params.items()},
            "muon": self.muon.state(),
            "adam": self.adam.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
        }
        beside = self.options.out / "checkpoint.tmp"
        torch.save(state, beside)
        beside.replace(self.options.out / "checkpoint.pt")

    def _restore(self, before: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, value in before["params"].items():
                self.params[name].copy_(value)
        self.muon.restore(before["muon"])
        self.adam.load_state_dict(before["adam"])
        self.step, self.seconds = before["step"], before["seconds"]


if __name__ == "__main__":
    sys.exit(main())
