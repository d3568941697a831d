"""Packed sequences: several prompts with their answers in one row, and which tokens see which.

A composed prompt is laid out as the engine composes it with nothing recomputed. The text that documents are
prefilled behind (`kv_prefix`, P tokens) stands once, at the beginning, at positions 0 to P - 1. The system
text sees itself. Each document sees that prefix and itself, at positions from P on, as if it came alone.
Question and answer see the system text, all documents and themselves; the documents' keys are turned to their
places in the prompt for them, by ``shifts``. Any other sequence is causal, from position 0 on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

NOBODY = -1  # sample of the prefix and of padding


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """A prompt and its answer, as token ids. ``composed``: the documents do not see each other. ``rows``:
    places whose next token is compared; empty for those that predict the answers. ``more``: further questions
    over the same documents, each with its answer, that see no other question. An answer's last token is
    predicted only. ``taught``: the base's hidden states that predict the answers over the whole prompt,
    [tokens of all answers, hidden]; None: they are not known."""

    head: Sequence[int]
    documents: Sequence[Sequence[int]] = ()
    question: Sequence[int] = ()
    answer: Sequence[int] = ()
    composed: bool = False
    rows: Sequence[int] = ()
    more: Sequence[tuple[Sequence[int], Sequence[int]]] = ()
    taught: Any = None

    def __len__(self) -> int:
        return self.context + sum(map(len, self.tails))

    @property
    def context(self) -> int:
        """Tokens before the first question."""
        return len(self.head) + sum(map(len, self.documents))

    @property
    def tails(self) -> list[list[int]]:
        """Each question with the tokens of its answer that are read."""
        return [[*question, *answer[:-1]] for question, answer in self._asked]

    @property
    def answers(self) -> list[int]:
        """The tokens of all answers, as `targets` predict them."""
        return [token for _, answer in self._asked for token in answer]

    @property
    def targets(self) -> Sequence[int]:
        """The compared places."""
        if self.rows:
            return self.rows
        found: list[int] = []
        end = self.context
        for tail, (_, answer) in zip(self.tails, self._asked, strict=True):
            end += len(tail)
            found += range(end - len(answer), end)
        return found

    @property
    def _asked(self) -> list[tuple[Sequence[int], Sequence[int]]]:
        return [(self.question, self.answer), *self.more]


@dataclass(slots=True)
class PackedSequences:
    """Sequences one after another. The lists up to ``tails`` have an entry a token.

    ``positions``: where Q and K are computed; ``shifts``: from there to where question and answer see K.
    Tokens of one of ``segments`` see each other, and those ``behind`` the prefix see that, too. ``samples``:
    each token's sequence. ``asked``: tokens that see all of their sequence instead, but for other ``tails``,
    which are numbered from 1; 0 is what they all see. ``targets``: compared tokens. ``bounds``: first token
    of each sequence and the one behind its last. All seeing is causal."""

    prefix: int = 0
    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    shifts: list[int] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    behind: list[bool] = field(default_factory=list)
    tails: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    bounds: list[tuple[int, int]] = field(default_factory=list)

    def _add(
        self,
        ids: Sequence[int],
        position: int,
        *,
        sample: int,
        shift: int = 0,
        behind: bool = False,
        tail: int = 0,
    ) -> None:
        segment = self.segments[-1] + 1 if self.segments else 0
        self.ids += ids
        self.positions += range(position, position + len(ids))
        self.shifts += [shift] * len(ids)
        self.segments += [segment] * len(ids)
        self.samples += [sample] * len(ids)
        self.behind += [behind] * len(ids)
        self.tails += [tail] * len(ids)

    def _add_sequence(self, one: TrainingSequence) -> None:
        sample, start = len(self.bounds), len(self.ids)
        text = [*one.head, *(token for document in one.documents for token in document)]
        if one.composed:
            self._add(one.head, 0, sample=sample)
            place = len(one.head)
            for document in one.documents:
                shift = place - self.prefix
                self._add(document, self.prefix, sample=sample, shift=shift, behind=True)
                place += len(document)
        elif one.more:
            self._add(text, 0, sample=sample)
        else:
            self._add([*text, *one.tails[0]], 0, sample=sample)
        if one.composed or one.more:
            for number, tail in enumerate(one.tails, 1):
                self.asked += range(len(self.ids), len(self.ids) + len(tail))
                self._add(tail, len(text), sample=sample, tail=number)
        self.bounds.append((start, len(self.ids)))
        self.targets += [start + row for row in one.targets]

    def pad(self, multiple: int) -> None:
        """Add tokens that nobody else sees until the length is a multiple."""
        if missing := -len(self.ids) % multiple:
            self._add([0] * missing, 0, sample=NOBODY)


def packed(sequences: Sequence[TrainingSequence], prefix: Sequence[int]) -> PackedSequences:
    """Pack sequences. ``prefix``: token ids that composed ones' documents are behind; left out without one
    of these."""
    composed = any(each.composed for each in sequences)
    found = PackedSequences(len(prefix) if composed else 0)
    if composed:
        found._add(prefix, 0, sample=NOBODY)
    for each in sequences:
        found._add_sequence(each)
    return found


def in_packs(sequences: Sequence[TrainingSequence], room: int) -> list[list[TrainingSequence]]:
    """Divide sequences into packs of at most ``room`` tokens, in order; a longer one is alone."""
    packs: list[list[TrainingSequence]] = []
    used = 0
    for each in sequences:
        if not packs or used + len(each) > room:
            packs.append([])
            used = 0
        packs[-1].append(each)
        used += len(each)
    return packs
