"""Ask a model over question sets by the batches of `ragserve adapt`, without an engine.

    python -m benchmarks.packed_answers MODEL OUT_DIR SETS_DIR SECONDS

Greedy answers over whole prompts and over composed ones with nothing recomputed, which are laid out as the
engine composes them. For machines that a start of an engine takes too long on. OUT_DIR gets
rows-0.jsonl and eval.json, from which `benchmarks.answer_table` makes a table. A part of every set is asked
before the next."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragserve.adapt import greedy
from ragserve.adapt.low_rank import AdaptedModel
from ragserve.adapt.packing import TrainingSequence
from ragserve.answering.prompt import PromptBuilder, PromptDocument
from ragserve.config import load as settings_of
from ragserve.engine.document_prefix import prefix_ids
from ragserve.eval.data import Question, load, set_name
from ragserve.files import write_json
from ragserve.verification.metrics import contains_answer, exact_match, is_refusal, token_f1
from ragserve.verification.question_probes import SHORT
from ragserve.verification.report import environment

TOKENS, ROOM = 24, 8160  # of an answer, and of a prompt
PARTS, AT_ONCE = 4, 200


@dataclass(frozen=True, slots=True)
class Asked:
    """A set's question and its prompt."""

    name: str
    question: Question
    head: list[int]
    documents: list[list[int]]
    tail: list[int]

    def sequence(self, *, composed: bool) -> TrainingSequence:
        return TrainingSequence(self.head, self.documents, self.tail, composed=composed)


def prompts(sets: Path, builder: PromptBuilder) -> list[Asked]:
    """The questions of all files of a folder, every fourth of each set first."""
    found = []
    for path in sorted(sets.iterdir()):
        for number, question in enumerate(load(path)):
            documents = [PromptDocument("", each.title, each.text) for each in question.documents]
            prompt = builder.build(
                question.question, documents, max_prompt_tokens=ROOM, system=SHORT, cut=True
            )
            head, *shown, tail = (prompt.input_ids[each.start : each.end] for each in prompt.segments)
            found.append((number % PARTS, Asked(set_name(path), question, head, shown, tail)))
    return [asked for _, asked in sorted(found, key=lambda each: each[0])]


def row_of(asked: Asked, answer: str, *, composed: bool) -> dict[str, Any]:
    """A row as `benchmarks.answer_table` reads it."""
    question, tokens = asked.question, sum(map(len, asked.documents))
    return {
        "set": asked.name,
        "id": question.id,
        "strategy": "concat" if composed else "full",
        "answer": answer,
        "em": exact_match(answer, question.answers),
        "f1": token_f1(answer, question.answers),
        "contains": contains_answer(answer, question.answers),
        "refused": is_refusal(answer, question.answers),
        "document_tokens": tokens,
        "kept": tokens,
        "recomputed": 0 if composed else tokens,
        "error": None,
    }


def answered(model: AdaptedModel, asked: list[Asked], end: float) -> Iterator[dict[str, Any]]:
    """A row for each question and strategy, until the time is up."""
    for at in range(0, len(asked), AT_ONCE):
        part = asked[at : at + AT_ONCE]
        for composed in (False, True):
            if time.monotonic() > end:
                return
            found = greedy.answers(model, [each.sequence(composed=composed) for each in part], TOKENS)
            for each, ids in zip(part, found, strict=True):
                yield row_of(each, greedy.text_of(model, ids), composed=composed)


def main() -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("model", type=Path)
    options.add_argument("out", type=Path)
    options.add_argument("sets", type=Path)
    options.add_argument("seconds", type=float)
    given = options.parse_args()
    end = time.monotonic() + given.seconds
    builder = PromptBuilder.load(str(given.model), None)
    prefix = prefix_ids(settings_of(), builder.tokenizer)
    model = AdaptedModel.load(given.model, prefix, builder.tokenizer)
    given.out.mkdir(parents=True, exist_ok=True)
    workload = {
        "model": given.model.name,
        "engine": "none: the batches of ragserve adapt",
        "attention": "masks" if model.no_flex else "FlexAttention",
        "dtype": str(model.causal.dtype).removeprefix("torch."),
        "max_new_tokens": TOKENS,
        "decoding": "greedy",
        "system text": SHORT,
    }
    write_json(given.out / "eval.json", {"workload": workload, "environment": environment()})
    with (given.out / "rows-0.jsonl").open("w", encoding="utf-8") as out:
        for row in answered(model, prompts(given.sets, builder), end):
            out.write(json.dumps(row) + "\n")
            out.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
