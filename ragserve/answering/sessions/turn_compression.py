"""Compress the earlier turns of a session: of their passages, questions and answers the sentences stay that
suit the new question, within a budget of tokens.

The choice is that of `samkv` (docs/composed-contexts.md, `selection=sentences`): by words, and by attention
where the engine holds the turns' keys (`turn_attention`). Each passage, and each question with its answer, is
a document to it. What stays is laid out as a new text: the passages, then the questions with their answers,
then the last turn as it was."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from ragserve.answering.prompt import Prompt, PromptBuilder, PromptDocument
from ragserve.answering.results import EarlierTurn, RetrievedPassage
from ragserve.answering.sessions.past_turns import PastTurn
from ragserve.answering.sessions.turn_attention import AskedPrompts, TurnAttention
from ragserve.answering.sessions.turn_candidates import TurnCandidates, TurnSentence, TurnSource
from sglang_ext.wire.protocol import Span

if TYPE_CHECKING:
    from ragserve.answering.sessions.sentence_choice import SentenceChooser

_LAST = "the last turn stays whole"
_WITHIN = "the earlier turns are within the budget"
_BEST = "its best sentences for this question stay"
_WHOLE = "all of its sentences are among the best for this question"
_NONE = "none of its sentences is among the best for this question"
_ROOM = "room"  # no signal speaks for the sentence, and there was room


@dataclass(frozen=True, slots=True)
class ShortenedDialogue:
    """A dialogue as the next question finds it. ``passages``: those in it, as they stand in the prompt;
    ``whole``: how many of the last ones are complete."""

    turns: tuple[PastTurn, ...]
    passages: list[RetrievedPassage]
    whole: int
    report: list[EarlierTurn]


@dataclass(slots=True)
class _Layout:
    """The turns of a compressed dialogue, with the tokens of each earlier one that are left in it."""

    turns: tuple[PastTurn, ...]
    tokens: dict[int, int] = field(default_factory=dict)


class TurnCompressor:
    """Compresses dialogues of one prompt builder. Thread-safe; loads torch when it is first needed."""

    def __init__(self, builder: PromptBuilder, attention: TurnAttention | None = None) -> None:
        """``attention``: without it, words decide alone."""
        self._builder = builder
        self._attention = attention
        self._lock = threading.Lock()

    def shorten(
        self,
        turns: Sequence[PastTurn],
        question: str,
        budget: int,
        *,
        system: str | None = None,
        found: Collection[tuple[str, str]] = (),
        candidates: TurnCandidates | None = None,
    ) -> ShortenedDialogue:
        """Shorten all turns but the last to at most ``budget`` tokens for a question; they stay as they are
        where they take no more. The system text does not count.

        Args:
            turns: The dialogue, one turn at least.
            system: The dialogue's own system text, if it has one.
            found: Title and text of the passages that were found for the question. They come with it, so
                earlier turns lose them.
            candidates: Those of `candidates` for the same dialogue, question and passages, where they have
                attention."""
        sizes = [len(turn.ids) - (0 if number else turn.spans[0].end) for number, turn in enumerate(turns)]
        taken = sum(sizes[:-1])
        if taken <= budget:
            report = [
                EarlierTurn(turn=number, tokens=size, tokens_kept=size, reason=_WITHIN)
                for number, size in enumerate(sizes, 1)
            ]
            passages = [passage for turn in turns for passage in turn.passages]
            return ShortenedDialogue(tuple(turns), passages, len(passages), report)
        last = turns[-1]
        candidates = self.candidates(turns, question, found) if candidates is None else candidates
        sources = candidates.sources
        chosen = _within(candidates.scored(), sources, budget)
        layout = self._laid_out(turns, sources, chosen, system)
        while sum(layout.tokens.values()) > budget:  # sentences by themselves may take fewer tokens
            chosen.pop()
            layout = self._laid_out(turns, sources, chosen, system)
        kept = {sentence.source for sentence in chosen}
        passages = [
            source.passage for n, source in enumerate(sources) if n in kept and source.passage is not None
        ]
        return ShortenedDialogue(
            layout.turns,
            [*passages, *last.passages],
            len(last.passages),
            list(_report(turns, sizes, candidates, chosen, layout.tokens)),
        )

    def candidates(
        self, turns: Sequence[PastTurn], question: str, found: Collection[tuple[str, str]] = ()
    ) -> TurnCandidates:
        """What may stay of the turns before the last one, for a question; arguments as in `shorten`."""
        known = {*found, *((passage.title, passage.text) for passage in turns[-1].passages)}
        with self._lock:
            chooser = self._chooser
        return TurnCandidates.of(self._builder, chooser, turns[:-1], question, known)

    async def attended(
        self,
        turns: Sequence[PastTurn],
        question: str,
        found: Collection[tuple[str, str]],
        key: str,
        prompts: AskedPrompts,
    ) -> TurnCandidates:
        """`candidates`, with attention where the session with this ``key`` holds the KV of ``prompts``."""
        candidates = await asyncio.to_thread(self.candidates, turns, question, found)
        if self._attention is None:
            return candidates
        return await self._attention.of(candidates, question, key, prompts)

    @cached_property
    def _chooser(self) -> SentenceChooser:
        from ragserve.answering.sessions.sentence_choice import SentenceChooser

        return SentenceChooser(self._builder.tokenizer)

    def _laid_out(
        self,
        turns: Sequence[PastTurn],
        sources: Sequence[TurnSource],
        chosen: Sequence[TurnSentence],
        system: str | None,
    ) -> _Layout:
        kept: dict[int, list[TurnSentence]] = {}
        for sentence in sorted(chosen, key=lambda each: (each.source, each.start)):
            kept.setdefault(sentence.source, []).append(sentence)
        documents: list[tuple[TurnSource, PromptDocument]] = []
        asked: list[tuple[TurnSource, list[int]]] = []
        for number, sentences in kept.items():
            source = sources[number]
            if source.passage is None:
                asked.append((source, [token for each in sentences for token in source.ids_of(each)]))
            else:
                text = self._text(source, source.passage, sentences)
                documents.append((source, PromptDocument("", source.passage.title, text)))
        return _LayingOut(self._builder, turns, system).run(documents, asked)

    def _text(self, source: TurnSource, passage: RetrievedPassage, kept: Sequence[TurnSentence]) -> str:
        """The ``kept`` sentences of a passage, in their order."""
        runs: list[list[int]] = []
        for previous, sentence in zip([None, *kept], kept, strict=False):
            if previous is None or previous.end != sentence.start:
                runs.append([])
            runs[-1] += source.ids_of(sentence)
        if [len(source.body)] == [len(run) for run in runs]:
            return passage.text
        text = ""
        for run in runs:
            # samkv cuts sentences of more than 64 tokens, perhaps within a character
            part = self._read(run).strip("\ufffd")
            text += part if not text or text[-1:].isspace() or part[:1].isspace() else f" {part}"
        return text.strip()

    def _read(self, ids: Sequence[int]) -> str:
        return str(
            self._builder.tokenizer.decode(
                list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )


class _LayingOut:
    """Lays out one compressed dialogue: text that is left of earlier turns, and the last turn."""

    def __init__(self, builder: PromptBuilder, turns: Sequence[PastTurn], system: str | None) -> None:
        self._builder, self._system = builder, system
        self._last = turns[-1]
        # the system text keeps to memory if it came with the requests
        self._system_part = (0,) if 0 in turns[0].unregistered else ()
        self._own = [PromptDocument("", passage.title, passage.text) for passage in self._last.passages]

    def run(
        self,
        documents: Sequence[tuple[TurnSource, PromptDocument]],
        asked: Sequence[tuple[TurnSource, list[int]]],
    ) -> _Layout:
        """``documents``: of earlier turns; ``asked``: their questions, with the token ids left of the
        answers."""
        if asked:
            return self._behind_questions(documents, asked)
        prompt = self._begun(self._last.question, [*(text for _, text in documents), *self._own])
        end = prompt.segments[len(documents)].end if documents else 0
        last = self._last_turn(prompt, end)
        if not documents:
            return _Layout((last,))
        layout = _Layout((self._text(prompt, prompt.input_ids[:end]), last))
        _count(layout, documents, prompt)
        return layout

    def _behind_questions(
        self,
        documents: Sequence[tuple[TurnSource, PromptDocument]],
        asked: Sequence[tuple[TurnSource, list[int]]],
    ) -> _Layout:
        (first, answer), *rest = asked
        begun = self._begun(first.question, [text for _, text in documents])
        ids = [*begun.input_ids, *answer]
        layout = _Layout(())
        _count(layout, documents, begun)
        _add(layout, first, len(ids) - begun.spans[-1].end)
        for source, answer in rest:
            before = len(ids)
            ids = [*self._next(ids, source.question, ()).input_ids, *answer]
            _add(layout, source, len(ids) - before)
        prompt = self._next(ids, self._last.question, self._own)
        layout.turns = self._text(begun, ids), self._last_turn(prompt, len(ids))
        return layout

    def _begun(self, question: str, documents: Sequence[PromptDocument]) -> Prompt:
        return self._builder.build(question, documents, max_prompt_tokens=sys.maxsize, system=self._system)

    def _next(self, ids: Sequence[int], question: str, documents: Sequence[PromptDocument]) -> Prompt:
        return self._builder.follow_up(ids, question, documents, max_prompt_tokens=sys.maxsize)

    def _text(self, begun: Prompt, ids: Sequence[int]) -> PastTurn:
        """What is left of the earlier turns, as one text behind the system text."""
        system = Span(0, begun.segments[0].end)
        owners = self._last.owners[:1]
        return PastTurn(ids, len(ids), (system,), self._system_part, is_text=True, owners=owners)

    def _last_turn(self, prompt: Prompt, behind: int) -> PastTurn:
        last = self._last
        own = sorted({*last.unregistered, *self._system_part})
        found = PastTurn.of(prompt, last.answer, behind=behind, unregistered=own, owners=last.owners)
        return replace(found, passages=last.passages, question=last.question)


def _count(layout: _Layout, documents: Sequence[tuple[TurnSource, PromptDocument]], prompt: Prompt) -> None:
    for (source, _), segment in zip(documents, prompt.segments[1:], strict=False):
        _add(layout, source, segment.end - segment.start)


def _add(layout: _Layout, source: TurnSource, tokens: int) -> None:
    layout.tokens[source.turn] = layout.tokens.get(source.turn, 0) + tokens


def _within(
    sentences: Sequence[TurnSentence], sources: Sequence[TurnSource], budget: int
) -> list[TurnSentence]:
    """Take whole sentences in their order, each that fits into what is left of the budget."""
    chosen: list[TurnSentence] = []
    begun: set[int] = set()
    for sentence in sentences:
        cost = sentence.end - sentence.start
        cost += 0 if sentence.source in begun else sources[sentence.source].extra
        if cost <= budget:
            budget -= cost
            begun.add(sentence.source)
            chosen.append(sentence)
    return chosen


def _report(
    turns: Sequence[PastTurn],
    sizes: Sequence[int],
    candidates: TurnCandidates,
    chosen: Sequence[TurnSentence],
    tokens: dict[int, int],
) -> Iterator[EarlierTurn]:
    sources = candidates.sources
    for number, size in enumerate(sizes[:-1]):
        own = {n for n, source in enumerate(sources) if source.turn == number}
        stay = [each for each in chosen if each.source in own]
        held = sum(each.end - each.start for each in stay)
        reason = _NONE if not held else _BEST
        if held == sum(len(sources[n].body) for n in own) and held:
            reason = _WHOLE
        there = sum(sources[n].passage is not None for n in own)
        if away := len(turns[number].passages) - there:
            reason += f"; {away} of its passages stand elsewhere in the prompt"
        by_signal: dict[str, int] = {}
        for each in stay:
            by_signal[each.signal or _ROOM] = by_signal.get(each.signal or _ROOM, 0) + each.end - each.start
        yield EarlierTurn(
            turn=number + 1,
            tokens=size,
            tokens_kept=tokens.get(number, 0),
            tokens_by_signal=dict(sorted(by_signal.items())),
            rule=candidates.rule(own),
            reason=reason,
        )
    yield EarlierTurn(turn=len(turns), tokens=sizes[-1], tokens_kept=sizes[-1], reason=_LAST)
