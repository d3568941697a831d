"""Train the embedded model's adapter on written questions: supervised answers, whole and composed.

    python -m benchmarks.written_questions.train MODEL ROWS.jsonl OUT [--seconds 420] [--rank 12]
        [--rate 1e-3] [--composed 0.6] [--room TOKENS] [--packs 2] [--steps N] [--limit N] [--words N]
        [--held-out 300] [--every 60]

MODEL: the folder that `python -m ragserve.engine.packaged_model` names. ROWS: of `rows expand --laid-out`.
The loss is the cross entropy of the answers' tokens, over prompts that ragserve's builder lays out, each with
several questions that do not see each other; in a share of the prompts each document is prefilled apart,
behind the documents' prefix, as `ragserve adapt` emulates the engine. A step takes --packs packs of --room
tokens. --seconds is the time of the whole command but for the last note, which the learning rate follows. The
gradient is finite before every step. At times the held-out answers' loss is noted, whole and composed, and
the best adapter is kept: OUT/adapter, in peft's form, bfloat16, at most 8 MB at rank 12. OUT/checkpoints lets
the same command go on where it was cut; OUT/train.json has course and digests."""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from ragserve.adapt.finite_values import not_finite
from ragserve.answering.messages import Message
from ragserve.answering.prompt import PromptBuilder, PromptDocument
from ragserve.config import load
from ragserve.files import write_json
from ragserve.json_lines import json_lines

if TYPE_CHECKING:
    from ragserve.adapt.low_rank import AdaptedModel
    from ragserve.adapt.packing import TrainingSequence

SEED = 51
MOST_TOKENS = 6000  # of a prompt with all its questions
LEAST_RATE, WARM_UP, CLIP = 0.02, 30, 1.0
_BAD = 5  # steps in a row without a finite gradient that end the training
_SAY = 10  # steps between two lines about them
_WORKERS = 6  # processes that lay prompts out, beside a GPU
_FREE = {"cuda": 48 * 2**30, "cpu": 12 * 2**30}  # bytes of memory with which activations are saved


class Samples:
    """Lays out rows, in packs of at most ``room`` tokens. Pack ``number`` is the same in every run."""

    def __init__(
        self,
        rows: Sequence[dict[str, Any]],
        builder: PromptBuilder,
        room: int,
        composed: float = 0.5,
        end: int | None = None,
    ) -> None:
        """``end``: token that ends an answer; None for the tokenizer's."""
        self._rows, self._builder, self._composed = rows, builder, composed
        self.room = room
        self._most = min(room, MOST_TOKENS)
        self._end = [builder.tokenizer.eos_token_id if end is None else end]

    def pack(self, number: int) -> list[TrainingSequence]:
        """Drawn rows, until the next one does not fit."""
        draw = random.Random(f"{SEED} pack {number}")
        found: list[TrainingSequence] = []
        left = self.room
        while True:
            one = self.sequence(draw.choice(self._rows), composed=draw.random() < self._composed)
            left -= len(one)
            if left < 0 and found:
                return found
            found.append(one)

    def sequence(self, row: dict[str, Any], *, composed: bool) -> TrainingSequence:
        """A row's prompt, with as many of its further questions as there is room for."""
        from ragserve.adapt.packing import TrainingSequence

        documents = [PromptDocument("", each["title"], each["text"]) for each in row["passages"]]
        prompt = self._builder.build(
            row["question"],
            documents,
            max_prompt_tokens=self._most,
            history=_turns(row),
            system=row["system"],
        )
        head, *shown, tail = [prompt.input_ids[each.start : each.end] for each in prompt.segments]
        more: list[tuple[Sequence[int], Sequence[int]]] = []
        one = TrainingSequence(head, shown, tail, self._answer(row), composed=composed)
        left = self._most - len(one)
        for each in row.get("more", ()) if len(shown) == len(documents) else ():
            # A question's ids depend on neither the documents nor the system text.
            asked = self._builder.build(
                each["question"], documents[:1], max_prompt_tokens=sys.maxsize, history=_turns(each)
            )
            ids = asked.input_ids[asked.segments[-1].start :]
            answer = self._answer(each)
            left -= len(ids) + len(answer)
            if left < 0:
                break
            more.append((ids, answer))
        return replace(one, more=more)

    def _answer(self, row: dict[str, Any]) -> list[int]:
        return [*self._builder.plain_ids(row["target"]), *self._end]


def _turns(row: dict[str, Any]) -> list[Message]:
    return [
        message
        for question, answer in row["history"]
        for message in (Message("user", question), Message("assistant", answer))
    ]


class Packs(torch.utils.data.Dataset[Any]):
    """The packs of `Samples`, for processes that lay them out."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __getitem__(self, number: int) -> list[TrainingSequence]:
        return self._samples.pack(number)


def packs(samples: Samples, first: int, device: torch.device) -> Iterator[list[TrainingSequence]]:
    """All packs from number ``first`` on, laid out ahead beside a GPU."""
    is_gpu = device.type == "cuda"
    yield from torch.utils.data.DataLoader(
        Packs(samples),
        batch_size=None,
        sampler=range(first, first + 10**7),
        num_workers=_WORKERS if is_gpu else 0,
        collate_fn=list,
        multiprocessing_context="fork" if is_gpu else None,
        prefetch_factor=4 if is_gpu else None,
    )


def answer_loss(model: AdaptedModel, sequences: Sequence[TrainingSequence]) -> torch.Tensor:
    """Cross entropy of the answers' tokens, summed, a scalar."""
    pack = model.pack(sequences)
    hidden, *_ = model.run(pack)
    wanted = torch.tensor([token for each in sequences for token in each.answers], device=model.device)
    return torch.nn.functional.cross_entropy(model.logits(hidden[pack.targets]), wanted, reduction="sum")


class Step:
    """Forward and backward passes of packs. Layers' activations are saved where there is memory, and computed
    again from the first time on that a GPU has too little."""

    def __init__(self, model: AdaptedModel) -> None:
        self._model = model
        is_gpu = model.device.type == "cuda"
        free = torch.cuda.mem_get_info()[0] if is_gpu else psutil.virtual_memory().available
        self.saves = free > _FREE[model.device.type]
        if self.saves:
            model.causal.gradient_checkpointing_disable()
        self._contexts = ExitStack()
        self.mixed = False  # whether the adapter, whose weights have 32 bits, computes in 16

    def computed(self) -> AbstractContextManager[Any]:
        """Around forward passes."""
        model = self._model
        return torch.autocast(model.device.type, model.causal.dtype) if self.mixed else nullcontext()

    def check(self, pack: Sequence[TrainingSequence]) -> str:
        """Compute a pack, with mixed precision where the model has 16 bits and that gives finite values.
        Returns which module does not, where no way does."""
        from peft.helpers import disable_input_dtype_casting

        model = self._model

        def forward() -> None:
            with self.computed():
                packed = model.pack(pack)
                hidden, *_ = model.run(packed)
                model.logits(hidden[packed.targets])

        self._contexts.close()
        self.mixed = model.causal.dtype.itemsize == 2
        if self.mixed:
            self._contexts.enter_context(disable_input_dtype_casting(model.adapter))
            if not (why := not_finite(model.causal, forward)):
                return ""
            print(f"with mixed precision {why}", flush=True)
            self._contexts.close()
            self.mixed = False
        return not_finite(model.causal, forward)

    def backward(self, some: Sequence[Sequence[TrainingSequence]]) -> float:
        """Add the gradient of the mean loss of the packs' answer tokens; returns that loss."""
        tokens = sum(len(each.targets) for pack in some for each in pack)
        total = torch.zeros((), device=self._model.device)
        for pack in some:
            found = self._backward(pack, tokens)
            if found is None:  # outside of the handler, which holds the memory
                print("activations are computed again: the GPU's memory is full", flush=True)
                self.saves = False
                self._model.causal.gradient_checkpointing_enable({"use_reentrant": False})
                torch.cuda.empty_cache()
                found = self._backward(pack, tokens)
            total += found
        return float(total)

    def try_flex(self, pack: Sequence[TrainingSequence]) -> None:
        """Compile FlexAttention for packs of the training's size, or say why masks are used."""
        model = self._model
        if not model.no_flex:
            try:
                self.backward([pack])
            except torch.OutOfMemoryError:
                raise  # masks take more
            except Exception as error:  # noqa: BLE001 - whatever the compiler says
                model.no_flex = f"it failed: {str(error).splitlines()[0] if str(error) else error!r}"
        print(f"attention: {f'masks, as {model.no_flex}' if model.no_flex else 'FlexAttention'}", flush=True)

    def _backward(self, pack: Sequence[TrainingSequence], tokens: int) -> torch.Tensor | None:
        """The pack's part of the loss; None where it does not fit into memory with saved activations."""
        try:
            with self._model.training():
                with self.computed():
                    loss = answer_loss(self._model, pack) / tokens
                loss.backward()
        except torch.OutOfMemoryError:
            if not self.saves:
                raise
            return None
        return loss.detach()


def held_out_loss(model: AdaptedModel, sequences: Sequence[TrainingSequence], step: Step) -> float:
    """The mean loss of the answers' tokens, computed as in training, for which attention is compiled."""
    from ragserve.adapt.packing import in_packs

    tokens = sum(len(each.targets) for each in sequences)
    total = 0.0
    for part in in_packs(sequences, model.room):
        with torch.set_grad_enabled(step.saves), step.computed():
            total += float(answer_loss(model, part).detach())
    return total / tokens


def divided(rows: Sequence[dict[str, Any]], count: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The first ``count`` rows, without further questions, and the others that show none of their gold."""
    held = [row | {"more": []} for row in rows[:count]]
    gold = {row["passages"][place]["text"] for row in held for place in row["gold"]}
    shown = (row for row in rows[count:] if not any(each["text"] in gold for each in row["passages"]))
    return held, list(shown)


def train(given: argparse.Namespace) -> dict[str, Any]:
    """Train, from the latest checkpoint if there is one, and return what train.json has."""
    from ragserve.adapt.checkpoints import Checkpoints, TrainingCourse
    from ragserve.adapt.low_rank import AdaptedModel, digest_of
    from ragserve.engine.document_prefix import prefix_ids

    mark = time.monotonic()
    builder = PromptBuilder.load(str(given.model))
    rows = [row for _, row in islice(json_lines(given.rows), given.limit) if _words(row) <= given.words]
    count = min(given.held_out, len(rows) // 5)
    prefix = prefix_ids(load(), builder.tokenizer)
    room = given.room or (16384 if torch.cuda.is_available() else 0)
    model = AdaptedModel.load(given.model, prefix, builder.tokenizer, room=room)
    model.add_adapter(given.rank, SEED)
    weights = list(model.parameters().values())
    optimiser = torch.optim.AdamW(weights, given.rate, (0.9, 0.99), weight_decay=0.0)
    held, rows = divided(rows, count)
    ends = model.causal.generation_config.eos_token_id  # what the engine stops at; a tokenizer may err
    end = ends[0] if isinstance(ends, list) else ends
    samples = Samples(rows, builder, model.room, given.composed, end)
    checks = {
        name: [samples.sequence(row, composed=composed) for row in held]
        for name, composed in (("whole", False), ("composed", True))
    }
    checkpoints, course = Checkpoints(given.out / "checkpoints"), TrainingCourse()
    if (known := checkpoints.load()) is not None:
        course, adapter, state = known
        for name, value in model.parameters().items():
            value.data.copy_(adapter[name])
        if state is not None:
            optimiser.load_state_dict(state)

    def note() -> None:
        losses = {name: held_out_loss(model, some, step) for name, some in checks.items()}
        best = min((sum((e["whole"], e["composed"])) for e in course.history), default=math.inf)
        course.history.append({"step": course.step, "seconds": round(course.seconds), **losses})
        if sum(losses.values()) < best and course.step:
            course.best_step = course.step
            write_adapter(model, given.out / "adapter")
        checkpoints.save(course, model.parameters(), optimiser.state_dict())
        print(json.dumps(course.history[-1]), flush=True)

    step, bad, noted = Step(model), 0, time.monotonic()
    step.try_flex(samples.pack(0))
    stopped = step.check(samples.pack(0))
    if not stopped:
        if not course.history:
            note()
        if not all(map(math.isfinite, course.history[-1].values())):
            stopped = "the held-out loss is not finite"
    coming = packs(samples, course.step * given.packs, model.device)
    while not stopped:
        if (share := max(course.seconds / given.seconds, course.step / given.steps)) >= 1:
            break
        cosine = LEAST_RATE + (1 - LEAST_RATE) * (1 + math.cos(math.pi * share)) / 2
        for group in optimiser.param_groups:
            group["lr"] = given.rate * cosine * min(1.0, (course.step + 1) / WARM_UP)
        optimiser.zero_grad(set_to_none=True)
        drawn = list(islice(coming, given.packs))
        loss = step.backward(drawn)
        norm = torch.nn.utils.clip_grad_norm_(weights, CLIP)
        if torch.isfinite(norm):
            optimiser.step()
            bad = 0
        else:
            bad, course.skipped = bad + 1, course.skipped + 1
            stopped = step.check(drawn[0]) or "gradients are not finite" if bad == _BAD else ""
        course.step += 1
        now = time.monotonic()
        course.seconds, mark = course.seconds + now - mark, now
        ended = stopped or course.seconds >= given.seconds or course.step >= given.steps
        if now - noted > given.every or ended:
            note()
            noted = time.monotonic()
        if course.step % _SAY == 0 or not torch.isfinite(norm):
            tokens, answers = (sum(each) for each in zip(*map(_sizes, drawn), strict=True))
            print(
                f"step {course.step}, {course.seconds:.0f} s: loss {loss:.3f}, norm {float(norm):.2f}, "
                f"{tokens} tokens, {answers} answers",
                flush=True,
            )
    about = {
        "base": given.model.name,
        "base digest": digest_of(given.model),
        "rows": len(rows),
        "held out": count,
        "rank": given.rank,
        "rate": given.rate,
        "composed": given.composed,
        "packs a step": given.packs,
        "tokens of a pack": model.room,
        "attention": f"masks: {model.no_flex}" if model.no_flex else "flex",
        "steps": course.step,
        "skipped": course.skipped,
        "stopped": stopped,
        "mixed precision": step.mixed,
        "best step": course.best_step,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "course": course.history,
    }
    write_json(given.out / "train.json", about)
    return about


def _words(row: dict[str, Any]) -> int:
    return sum(len(each["text"].split()) for each in row["passages"])


def _sizes(pack: Sequence[TrainingSequence]) -> tuple[int, int]:
    """Tokens and answers."""
    return sum(map(len, pack)), sum(1 + len(each.more) for each in pack)


def write_adapter(model: AdaptedModel, folder: Path) -> None:
    """Write the adapter in peft's form, in bfloat16, whole or not at all."""
    from safetensors.torch import load_file, save_file

    new = folder.with_name(folder.name + ".new")
    shutil.rmtree(new, ignore_errors=True)
    model.adapter.save_pretrained(new)
    path = new / "adapter_model.safetensors"
    save_file({name: value.bfloat16() for name, value in load_file(path).items()}, path)
    (new / "README.md").unlink(missing_ok=True)  # peft's empty form
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("rows", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=420)
    parser.add_argument("--rank", type=int, default=12)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--composed", type=float, default=0.6, help="share of prompts read apart")
    parser.add_argument("--room", type=int, default=0, help="tokens of a pack; default: 16384 on a GPU")
    parser.add_argument("--packs", type=int, default=2, help="of a step")
    parser.add_argument("--steps", type=float, default=math.inf, help="most steps")
    parser.add_argument("--limit", type=int, help="use the first N rows only")
    parser.add_argument("--words", type=float, default=math.inf, help="most words of a prompt's passages")
    parser.add_argument("--held-out", type=int, default=300, help="prompts, each with its own question alone")
    parser.add_argument("--every", type=float, default=60, help="seconds between held-out losses")
    return parser


def main() -> int:
    given = arguments().parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    about = train(given)
    if about["stopped"]:
        print(f"Training has stopped: {about['stopped']}.", file=sys.stderr)
    return 0 if about["best step"] and not about["stopped"] else 1


if __name__ == "__main__":
    sys.exit(main())
