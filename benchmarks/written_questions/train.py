"""Train the embedded model's adapter on written questions: supervised answers, whole and composed.

    python -m benchmarks.written_questions.train MODEL ROWS.jsonl OUT [--seconds 420] [--rank 12]
        [--rate 5e-4] [--composed 0.6] [--samples 32] [--text 0.05] [--steps N] [--limit N]

MODEL: the folder that `python -m ragserve.engine.packaged_model` names. ROWS: of `rows expand --laid-out`.
The loss is the cross entropy of the answers' tokens, over prompts that ragserve's builder lays out; in a
share of the samples each document is prefilled apart, behind the documents' prefix, as `ragserve adapt`
emulates the engine. A share of samples is plain passages, on which the adapted model is kept near the base
(KL). The gradient is finite before every step. Each minute the held-out answers' loss is noted, whole and
composed, and the best adapter is kept: OUT/adapter, in peft's form, bfloat16, at most 8 MB at rank 12.
OUT/checkpoints lets the same command go on where it was cut; OUT/train.json has course and digests."""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ragserve.adapt.sample_mix import shuffled
from ragserve.answering.messages import Message
from ragserve.answering.prompt import PromptBuilder, PromptDocument
from ragserve.config import load
from ragserve.files import write_json
from ragserve.json_lines import json_lines

if TYPE_CHECKING:
    from ragserve.adapt.low_rank import AdaptedModel
    from ragserve.adapt.packing import TrainingSequence

SEED = 51
HELD_OUT = 400
EVERY_S = 60.0
LEAST_RATE, WARM_UP, CLIP = 0.05, 30, 1.0
_TEXT_ROWS = 64  # compared tokens of a plain passage
_BAD = 5  # steps in a row without a finite gradient that end the training


class Samples:
    """Lays out rows. Sample ``number`` is the same in every run."""

    def __init__(self, rows: Sequence[dict[str, Any]], builder: PromptBuilder, room: int) -> None:
        self._rows, self._builder, self._room = rows, builder, room
        self._end = [builder.tokenizer.eos_token_id]
        self._turn, self._order = -1, list[int]()

    def sample(self, number: int, composed: float, text: float) -> TrainingSequence:
        """A row's sequence, each pass in another order; with the share ``text`` a passage of it alone."""
        turn, place = divmod(number, len(self._rows))
        if turn != self._turn:
            self._turn, self._order = turn, shuffled(len(self._rows), f"{SEED} order {turn}")
        draw = random.Random(f"{SEED} sample {number}")
        row = self._rows[self._order[place]]
        if draw.random() < text:
            return self.plain(draw.choice(row["passages"]), draw)
        return self.sequence(row, composed=draw.random() < composed)

    def sequence(self, row: dict[str, Any], *, composed: bool) -> TrainingSequence:
        from ragserve.adapt.packing import TrainingSequence

        turns = [
            message
            for question, answer in row["history"]
            for message in (Message("user", question), Message("assistant", answer))
        ]
        documents = [PromptDocument("", each["title"], each["text"]) for each in row["passages"]]
        prompt = self._builder.build(
            row["question"],
            documents,
            max_prompt_tokens=self._room,
            history=turns,
            system=row["system"],
        )
        head, *shown, tail = [prompt.input_ids[each.start : each.end] for each in prompt.segments]
        answer = [*self._builder.plain_ids(row["target"]), *self._end]
        return TrainingSequence(head, shown, tail, answer, composed=composed)

    def plain(self, passage: dict[str, str], draw: random.Random) -> TrainingSequence:
        from ragserve.adapt.packing import TrainingSequence

        ids = self._builder.plain_ids(f"{passage['title']}\n\n{passage['text']}")[: self._room]
        return TrainingSequence(ids, rows=sorted(draw.sample(range(len(ids)), min(_TEXT_ROWS, len(ids)))))


def answer_loss(model: AdaptedModel, sequences: Sequence[TrainingSequence]) -> torch.Tensor:
    """Cross entropy of the answers' tokens, summed, a scalar."""
    pack = model.pack(sequences)
    hidden, *_ = model.run(pack)
    wanted = torch.tensor([token for each in sequences for token in each.answer], device=model.device)
    return torch.nn.functional.cross_entropy(model.logits(hidden[pack.targets]), wanted, reduction="sum")


def step_loss(model: AdaptedModel, samples: Sequence[TrainingSequence]) -> Iterator[torch.Tensor]:
    """The parts of a step's loss, each for a backward pass of its own: answers' and plain texts'."""
    from ragserve.adapt.distillation import divergence
    from ragserve.adapt.packing import in_packs

    for loss, some in (
        (answer_loss, [each for each in samples if each.answer]),
        (divergence, [each for each in samples if not each.answer]),
    ):
        tokens = sum(len(each.targets) for each in some)
        for part in in_packs(some, model.room):
            yield loss(model, part) / tokens


@torch.no_grad()
def held_out_loss(model: AdaptedModel, sequences: Sequence[TrainingSequence]) -> float:
    from ragserve.adapt.packing import in_packs

    tokens = sum(len(each.targets) for each in sequences)
    return sum(float(answer_loss(model, part)) for part in in_packs(sequences, model.room)) / tokens


def train(given: argparse.Namespace) -> dict[str, Any]:
    """Train, from the latest checkpoint if there is one, and return what train.json has."""
    from ragserve.adapt.checkpoints import Checkpoints, TrainingCourse
    from ragserve.adapt.low_rank import AdaptedModel, digest_of
    from ragserve.engine.document_prefix import prefix_ids

    builder = PromptBuilder.load(str(given.model))
    rows = [row for _, row in islice(json_lines(given.rows), given.limit)]
    count = min(HELD_OUT, len(rows) // 5)
    model = AdaptedModel.load(given.model, prefix_ids(load(), builder.tokenizer), builder.tokenizer)
    model.add_adapter(given.rank, SEED)
    weights = list(model.parameters().values())
    optimiser = torch.optim.AdamW(weights, given.rate, (0.9, 0.99), weight_decay=0.0)
    held, rows = rows[:count], rows[count:]
    gold = {row["passages"][place]["text"] for row in held for place in row["gold"]}
    rows = [row for row in rows if not any(each["text"] in gold for each in row["passages"])]
    samples = Samples(rows, builder, model.room - 64)
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
        losses = {name: held_out_loss(model, some) for name, some in checks.items()}
        best = min((sum((e["whole"], e["composed"])) for e in course.history), default=math.inf)
        course.history.append({"step": course.step, "seconds": round(course.seconds), **losses})
        if sum(losses.values()) < best and course.step:
            course.best_step = course.step
            write_adapter(model, given.out / "adapter")
        checkpoints.save(course, model.parameters(), optimiser.state_dict())
        print(json.dumps(course.history[-1]), flush=True)

    if not course.history:
        note()
    bad, mark, noted = 0, time.monotonic(), time.monotonic()
    while (share := max(course.seconds / given.seconds, course.step / given.steps)) < 1 and bad < _BAD:
        cosine = LEAST_RATE + (1 - LEAST_RATE) * (1 + math.cos(math.pi * share)) / 2
        for group in optimiser.param_groups:
            group["lr"] = given.rate * cosine * min(1.0, (course.step + 1) / WARM_UP)
        first = course.step * given.samples
        drawn = [samples.sample(first + n, given.composed, given.text) for n in range(given.samples)]
        optimiser.zero_grad(set_to_none=True)
        with model.training():
            for loss in step_loss(model, drawn):
                loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(weights, CLIP)
        if torch.isfinite(norm):
            optimiser.step()
            bad = 0
        else:
            bad, course.skipped = bad + 1, course.skipped + 1
        course.step += 1
        now = time.monotonic()
        course.seconds, mark = course.seconds + now - mark, now
        ended = course.seconds >= given.seconds or course.step >= given.steps or bad == _BAD
        if now - noted > EVERY_S or ended:
            note()
            mark = noted = time.monotonic()
    about = {
        "base": given.model.name,
        "base digest": digest_of(given.model),
        "rows": len(rows),
        "held out": count,
        "rank": given.rank,
        "rate": given.rate,
        "composed": given.composed,
        "samples a step": given.samples,
        "steps": course.step,
        "skipped": course.skipped,
        "best step": course.best_step,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "course": course.history,
    }
    write_json(given.out / "train.json", about)
    return about


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


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("rows", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=420)
    parser.add_argument("--rank", type=int, default=12)
    parser.add_argument("--rate", type=float, default=5e-4)
    parser.add_argument("--composed", type=float, default=0.6, help="share of prompts read apart")
    parser.add_argument("--samples", type=int, default=32, help="of a step")
    parser.add_argument("--text", type=float, default=0.05, help="share of plain passages")
    parser.add_argument("--steps", type=float, default=math.inf, help="most steps")
    parser.add_argument("--limit", type=int, help="use the first N rows only")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    about = train(given)
    return 0 if about["best step"] else 1


if __name__ == "__main__":
    sys.exit(main())
