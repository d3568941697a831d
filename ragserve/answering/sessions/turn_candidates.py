"""What may stay of the earlier turns of a session: their passages, and their questions with the answers, cut
into sentences that the signals of `samkv` score for a new question."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ragserve.answering.prompt import Prompt, PromptBuilder, Segment
from ragserve.answering.results import RetrievedPassage, TurnRule
from ragserve.answering.sessions.past_turns import PastTurn
from sglang_ext.wire.protocol import Span
from sglang_ext.wire.request_options import SamKvOptions

if TYPE_CHECKING:
    from ragserve.answering.sessions.sentence_choice import PromptSentences, SentenceChooser


@dataclass(frozen=True, slots=True)
class TurnSource:
    """A passage, or a question with its answer. ``turn``: counted from 0. ``head``: token ids of the title or
    question, ``body``: of the text or answer. ``extra``: tokens that it takes beside its sentences.
    ``number``: of the passage in its turn. ``body_at``: where ``body`` begins in the passage's segment of a
    prompt; None where that cannot be told, and for a question."""

    turn: int
    head: Sequence[int]
    body: Sequence[int]
    extra: int
    passage: RetrievedPassage | None = None
    number: int = 0
    body_at: int | None = None
    question: str = ""
    is_last: bool = False  # the turn's own question, not one of the history before it

    def place(self, turn: PastTurn) -> tuple[Span, int] | None:
        """Where it stands in ``turn``'s ids, as a prompt had the turn, and where the body begins in that;
        None where it does not."""
        if self.passage is None:
            start = turn.spans[-1].end
            there = self.is_last and start < turn.asked < len(turn.ids)
            return (Span(start, len(turn.ids)), turn.asked - start) if there else None
        spans = turn.spans[1:]
        if self.body_at is None or self.number >= len(spans):
            return None
        return spans[self.number], self.body_at

    def ids_of(self, sentence: TurnSentence) -> Sequence[int]:
        """Token ids of one of its sentences."""
        return self.body[sentence.start : sentence.end]


@dataclass(frozen=True, slots=True)
class TurnSentence:
    """``body[start:end]`` of the source with this number. ``signal``: the one that speaks most for it; "" for
    a sentence for which none does."""

    source: int
    start: int
    end: int
    score: float
    signal: str = ""


@dataclass(frozen=True, eq=False)
class TurnCandidates:
    """The sources of a dialogue's earlier turns, and their sentences for one question; None without
    sources. ``held``: numbers of the sources that are scored by attention, too."""

    sources: tuple[TurnSource, ...]
    sentences: PromptSentences | None
    held: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls,
        builder: PromptBuilder,
        chooser: SentenceChooser,
        turns: Sequence[PastTurn],
        question: str,
        known: Collection[tuple[str, str]],
    ) -> TurnCandidates:
        """Those of ``turns``, without the passages whose title and text are ``known``."""
        sources = tuple(_sources(builder, turns, known))
        ids: list[int] = []
        segments = [Segment("system", 0, 0)]
        for source in sources:
            segments.append(Segment("document", len(ids), len(ids) + len(source.head) + len(source.body)))
            ids += [*source.head, *source.body]
        if not ids:
            return cls(sources, None)
        prompt = Prompt([*ids, *builder.question_ids(question)], tuple(segments), len(sources), 0, 0)
        found = chooser.sentences(prompt)
        chooser.forget()
        return cls(sources, found)

    def begins(self) -> list[list[int]]:
        """For each source where the sentences of its body begin, counted in the body."""
        return [
            [max(0, start - len(source.head)) for start, end in bounds if end > len(source.head)]
            for source, bounds in zip(self.sources, self._bounds(), strict=True)
        ]

    def attended(self, attention: Sequence[Sequence[float] | None]) -> TurnCandidates:
        """Let signal `attention` take part: for each source its values by `begins`, None where the engine
        has no keys. Titles and questions are scored by words."""
        if self.sentences is None:
            return self
        values: list[float | None] = []
        for source, bounds, own in zip(self.sources, self._bounds(), attention, strict=True):
            heads = sum(end <= len(source.head) for _, end in bounds)
            values += [None] * len(bounds) if own is None else [*[None] * heads, *own]
        held = frozenset(number for number, own in enumerate(attention) if own is not None)
        return TurnCandidates(self.sources, self.sentences.attended(values), held)

    def rule(self, sources: Collection[int]) -> TurnRule:
        """What the sentences of these sources are chosen by."""
        held = len(self.held.intersection(sources))
        return "words" if not held else "attention" if held == len(sources) else "mixed"

    def scored(self) -> list[TurnSentence]:
        """The sentences of the bodies, the best first; of equal ones the newest."""
        if self.sentences is None:
            return []
        options = SamKvOptions()
        leading = iter(self.sentences.leading(options))
        found = []
        for number, own in enumerate(self.sentences.scored(options)):
            head = len(self.sources[number].head)
            for start, end, score in own:
                signal = next(leading)
                if end > head:
                    found.append(TurnSentence(number, max(0, start - head), end - head, score, signal))
        return sorted(found, key=lambda each: (-each.score, -self.sources[each.source].turn))

    def _bounds(self) -> list[list[tuple[int, int]]]:
        return [] if self.sentences is None else self.sentences.bounds()


def _sources(
    builder: PromptBuilder, turns: Sequence[PastTurn], known: Collection[tuple[str, str]]
) -> Iterator[TurnSource]:
    """The passages of the turns, each once and without those that are ``known``, then their questions with
    the answers."""
    seen = set(known)
    for turn, own in enumerate(turns):
        for number, passage in enumerate(own.passages):
            if (key := (passage.title, passage.text)) in seen:
                continue
            seen.add(key)
            head, body = builder.plain_ids(f"{passage.title}\n"), builder.plain_ids(passage.text)
            at = _place_of(body, builder.document_ids(*key))
            yield TurnSource(turn, head, body, len(builder.document_ids(key[0], "")), passage, number, at)
    for turn, own in enumerate(turns):
        for asked, answer, is_last in _exchanges(own, builder):
            prompt = builder.follow_up([], asked, (), max_prompt_tokens=sys.maxsize)
            head, extra = builder.plain_ids(f"{asked}\n"), len(prompt.input_ids)
            yield TurnSource(turn, head, answer, extra, question=asked, is_last=is_last)


def _place_of(body: Sequence[int], ids: Sequence[int]) -> int | None:
    """Where ``body`` begins in ``ids`` for the last time, but for a token at its ends that the tokenizer has
    joined with what stands there; None where it does not."""
    for first, last in ((0, 0), (0, 1), (1, 0), (1, 1)):
        part = list(body[first : len(body) - last])
        for at in range(len(ids) - len(part), -1, -1) if part else ():
            if list(ids[at : at + len(part)]) == part:
                return max(0, at - first)
    return None


def _exchanges(turn: PastTurn, builder: PromptBuilder) -> Iterator[tuple[str, Sequence[int], bool]]:
    """The turn's questions, those of its history first, each with the token ids of its answer; the last one
    is marked. Neighbouring messages of one role are one."""
    asked: list[str] = []
    said: list[str] = []
    for message in turn.history:
        if message.role == "assistant":
            said.append(message.content)
            continue
        if said:
            yield "\n\n".join(asked), builder.plain_ids("\n\n".join(said)), False
            asked, said = [], []
        asked.append(message.content)
    if said:
        yield "\n\n".join(asked), builder.plain_ids("\n\n".join(said)), False
        asked = []
    yield "\n\n".join([*asked, turn.question]), turn.answer, True
