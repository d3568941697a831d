"""What a training step reads: composed prompts of one to k passages, with and without the passage that
answers, and whole prompts and plain text, which are to stay as they are. A prompt asks all the questions
that its passages answer, up to `_QUESTIONS`, so that they are read once for all.

Sample ``number`` is the same in every run of the same rows and seed, so that a run that resumes takes the
same steps."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ragserve.adapt.packing import TrainingSequence
from ragserve.adapt.training_rows import TrainingPassage, TrainingRow
from ragserve.answering.prompt import PromptBuilder, PromptDocument
from ragserve.errors import PromptTooLong
from ragserve.verification.question_probes import SHORT

if TYPE_CHECKING:
    from ragserve.answering.prompt import Prompt

_TEXT = 0.06  # share of plain passages, all tokens of which are compared
_WHOLE = 0.2  # of whole prompts
_ONE = 0.2  # of the others: one passage
_UNANSWERABLE = 0.12  # without the passages that answer
_SHORT_ANSWERS = 0.6  # with the system text that asks for few words; the others with the server's
_TEXT_ROWS = 32  # compared tokens of a plain passage
_QUESTIONS = 8  # of a prompt, each blind to the others


def shuffled(count: int, seed: str) -> list[int]:
    """The numbers below ``count`` in the order of a seed."""
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order


def leaves_room(row: TrainingRow, builder: PromptBuilder, room: int) -> bool:
    """Whether a row's question, with the longer system text, leaves room for the beginning of a passage in
    ``room`` tokens."""
    first = row.passages[0]
    documents = [PromptDocument("", first.title, first.text)]
    try:
        prompts = [
            builder.build(row.question, documents, max_prompt_tokens=room, system=system, cut=True)
            for system in (SHORT, None)
        ]
    except PromptTooLong:
        return False
    return all(prompt.documents_kept for prompt in prompts)


class SampleMix:
    """Makes samples of rows for one prompt builder."""

    def __init__(
        self,
        rows: Sequence[TrainingRow],
        builder: PromptBuilder,
        *,
        k: int,
        room: int,
        seed: int,
        answer_tokens: int = 32,
    ) -> None:
        """``k``: most passages; ``room``: most tokens of a prompt; ``answer_tokens``: those that are left for
        each further question's answer."""
        self._rows, self._builder = rows, builder
        self._k, self._room, self._seed, self._answer = k, room, seed, answer_tokens
        self._turn, self._order = -1, list[int]()
        self._about: dict[str, list[TrainingRow]] = defaultdict(list)  # rows by a passage that answers
        for row in rows:
            for text in row.gold_texts:
                self._about[text].append(row)

    def sample(self, number: int) -> TrainingSequence:
        """Sample ``number``, without an answer yet. Each pass over the rows is in another order."""
        turn, place = divmod(number, len(self._rows))
        if turn != self._turn:
            self._turn, self._order = turn, shuffled(len(self._rows), f"{self._seed} order {turn}")
        draw = random.Random(f"{self._seed} sample {number}")
        row = self._rows[self._order[place]]
        kind = draw.random()
        if kind < _TEXT:
            return self._text(draw.choice(row.passages), draw)
        short = draw.random() < _SHORT_ANSWERS
        passages = self._context(row, draw, short=short)
        one = self.sequence(row.question, passages, short=short, composed=kind >= _TEXT + _WHOLE)
        return replace(one, more=self._more(row, passages, draw, self._room - len(one), short=short))

    def sequence(
        self,
        question: str,
        passages: Sequence[TrainingPassage],
        *,
        short: bool = True,
        composed: bool = False,
    ) -> TrainingSequence:
        """Lay a question out over passages, as many as fit. ``short``: with the system text that asks for few
        words."""
        head, *shown, tail = _parts(self._prompt(question, passages, short=short))
        return TrainingSequence(head, shown, tail, composed=composed)

    def context(self, row: TrainingRow, number: int, *, without_gold: bool = False) -> list[TrainingPassage]:
        """The passages of held-out row ``number``: at most k, or those that answer where these are more, in
        an order of its own; ``without_gold``: none that answers. Where not all fit, those that answer are
        there before others, and the last one that fits is cut."""
        draw = random.Random(f"{self._seed} held out {number}")
        others = [each for place, each in enumerate(row.passages) if place not in row.gold]
        gold = [] if without_gold else [row.passages[place] for place in row.gold]
        return self._chosen(row.question, gold, others, self._k, draw, short=True)

    def _context(self, row: TrainingRow, draw: random.Random, *, short: bool) -> list[TrainingPassage]:
        gold = [row.passages[place] for place in row.gold]
        others = [each for place, each in enumerate(row.passages) if place not in row.gold]
        if len(others) < self._k // 2:  # a row that brings few: those of other rows
            more = [draw.choice(draw.choice(self._rows).passages) for _ in range(self._k)]
            known = {each.text for each in row.passages}
            others += [each for each in dict.fromkeys(more) if each.text not in known]
        if draw.random() < _UNANSWERABLE and others:
            gold = []
        one = draw.random() < _ONE
        count = max(1, len(gold)) if one else draw.randint(min(2, self._k), self._k)
        return self._chosen(row.question, gold, others, count, draw, short=short)

    def _more(
        self,
        row: TrainingRow,
        passages: Sequence[TrainingPassage],
        draw: random.Random,
        room: int,
        *,
        short: bool,
    ) -> list[tuple[list[int], list[int]]]:
        """Further questions that the passages answer, without answers yet, that fit into ``room`` tokens with
        these."""
        shown = {each.text for each in passages}
        known = {row.question: row}
        for text in dict.fromkeys(each.text for each in passages):
            known |= {each.question: each for each in self._about.get(text, ()) if each.gold_texts <= shown}
        others = list(known)[1:]
        found = []
        for question in draw.sample(others, min(_QUESTIONS - 1, len(others))):
            tail = _parts(self._prompt(question, passages[:1], short=short))[-1]
            room -= len(tail) + self._answer
            if room < 0:
                break
            found.append((tail, list[int]()))
        return found

    def _chosen(
        self,
        question: str,
        gold: list[TrainingPassage],
        others: list[TrainingPassage],
        count: int,
        draw: random.Random,
        *,
        short: bool,
    ) -> list[TrainingPassage]:
        """All of ``gold`` and the first of ``others``, ``count`` together where gold is fewer: those that
        fit, the last one cut, in any order."""
        found = [*gold, *others[: max(0, count - len(gold))]]
        prompt = self._prompt(question, found, short=short)
        del found[prompt.documents_kept :]
        if prompt.cut_to is not None:
            found[-1] = found[-1].model_copy(update={"text": found[-1].text[: prompt.cut_to]})
        draw.shuffle(found)
        return found

    def _prompt(self, question: str, passages: Sequence[TrainingPassage], *, short: bool) -> Prompt:
        documents = [PromptDocument("", each.title, each.text) for each in passages]
        return self._builder.build(
            question, documents, max_prompt_tokens=self._room, system=SHORT if short else None, cut=True
        )

    def _text(self, passage: TrainingPassage, draw: random.Random) -> TrainingSequence:
        ids = self._builder.plain_ids(f"{passage.title}\n\n{passage.text}".strip())[: self._room]
        rows = range(len(ids))
        return TrainingSequence(ids, rows=sorted(draw.sample(rows, min(_TEXT_ROWS, len(ids)))))


def _parts(prompt: Prompt) -> list[list[int]]:
    return [prompt.input_ids[each.start : each.end] for each in prompt.segments]
