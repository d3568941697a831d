"""Compress the earlier turns of a session: of their passages, questions and answers the sentences stay that
suit the new question, within a budget of tokens.

The choice is that of `samkv` by words (docs/composed-contexts.md, `selection=sentences`). Each passage, and
each question with its answer, is a document to it. What stays is laid out as a new text: the passages, then
the questions with their answers, then the last turn as it was."""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from ragserve.answering.past_turns import PastTurn
from ragserve.answering.prompt import Prompt, PromptBuilder, PromptDocument, Segment
from ragserve.answering.results import EarlierTurn, RetrievedPassage
from sglang_ext.protocol import Span
from sglang_ext.request_options import SamKvOptions

if TYPE_CHECKING:
    from ragserve.engine.sentence_choice import SentenceChooser

_LAST = "the last turn stays whole"
_WITHIN = "the earlier turns are within the budget"
_BEST = "its best sentences for this question stay"
_WHOLE = "all of its sentences are among the best for this question"
_NONE = "none of its sentences is among the best for this question"


@dataclass(frozen=True, slots=True)
class ShortenedDialogue:
    """A dialogue as the next question finds it. ``passages``: those in it, as they stand in the prompt;
    ``whole``: how many of the last ones are complete."""

    turns: tuple[PastTurn, ...]
    passages: list[RetrievedPassage]
    whole: int
    report: list[EarlierTurn]


@dataclass(frozen=True, slots=True)
class _Source:
    """A passage, or a question with its answer. ``turn``: counted from 0. ``head``: token ids of the title or
    question, ``body``: of the text or answer. ``extra``: tokens that it takes beside its sentences."""

    turn: int
    head: Sequence[int]
    body: Sequence[int]
    extra: int
    passage: RetrievedPassage | None = None
    question: str = ""

    def ids_of(self, sentence: _Sentence) -> Sequence[int]:
        """Token ids of one of its sentences."""
        return self.body[sentence.start : sentence.end]


@dataclass(frozen=True, slots=True)
class _Sentence:
    """``body[start:end]`` of the source with this number."""

    source: int
    start: int
    end: int
    score: float


@dataclass(slots=True)
class _Layout:
    """The turns of a compressed dialogue, with the tokens of each earlier one that are left in it."""

    turns: tuple[PastTurn, ...]
    tokens: dict[int, int] = field(default_factory=dict)


class TurnCompressor:
    """Compresses dialogues of one prompt builder. Thread-safe; loads torch when it is first needed."""

    def __init__(self, builder: PromptBuilder) -> None:
        self._builder = builder
        self._lock = threading.Lock()

    def shorten(
        self,
        turns: Sequence[PastTurn],
        question: str,
        budget: int,
        *,
        system: str | None = None,
        found: Collection[tuple[str, str]] = (),
    ) -> ShortenedDialogue:
        """Shorten all turns but the last to at most ``budget`` tokens for a question; they stay as they are
        where they take no more. The system text does not count.

        Args:
            turns: The dialogue, one turn at least.
            system: The dialogue's own system text, if it has one.
            found: Title and text of the passages that were found for the question. They come with it, so
                earlier turns lose them."""
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
        known = {*found, *((passage.title, passage.text) for passage in last.passages)}
        sources = list(self._sources(turns[:-1], known))
        chosen = _within(self._scored(sources, question), sources, budget)
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
            list(_report(turns, sizes, sources, chosen, layout.tokens)),
        )

    @cached_property
    def _chooser(self) -> SentenceChooser:
        from ragserve.engine.sentence_choice import SentenceChooser

        return SentenceChooser(self._builder.tokenizer)

    def _sources(self, turns: Sequence[PastTurn], known: set[tuple[str, str]]) -> Iterator[_Source]:
        """The passages of the turns, each once and without those that are ``known``, then their questions
        with the answers."""
        builder = self._builder
        seen = set(known)
        for number, turn in enumerate(turns):
            for passage in turn.passages:
                if (key := (passage.title, passage.text)) in seen:
                    continue
                seen.add(key)
                head, body = builder.plain_ids(f"{passage.title}\n"), builder.plain_ids(passage.text)
                yield _Source(number, head, body, len(builder.document_ids(passage.title, "")), passage)
        for number, turn in enumerate(turns):
            for asked, answer in _exchanges(turn, builder):
                prompt = builder.follow_up([], asked, (), max_prompt_tokens=sys.maxsize)
                head = builder.plain_ids(f"{asked}\n")
                yield _Source(number, head, answer, len(prompt.input_ids), question=asked)

    def _scored(self, sources: Sequence[_Source], question: str) -> list[_Sentence]:
        """The sentences of the sources, the best first; of equal ones the newest."""
        ids: list[int] = []
        segments = [Segment("system", 0, 0)]
        for source in sources:
            segments.append(Segment("document", len(ids), len(ids) + len(source.head) + len(source.body)))
            ids += [*source.head, *source.body]
        if not ids:
            return []
        ids += self._builder.question_ids(question)
        prompt = Prompt(ids, tuple(segments), len(sources), 0, 0)
        with self._lock:
            chooser = self._chooser
        found = chooser.sentences(prompt).scored(SamKvOptions())
        chooser.forget()
        sentences = [
            _Sentence(
                number, max(0, start - len(sources[number].head)), end - len(sources[number].head), score
            )
            for number, own in enumerate(found)
            for start, end, score in own
            if end > len(sources[number].head)
        ]
        return sorted(sentences, key=lambda each: (-each.score, -sources[each.source].turn))

    def _laid_out(
        self,
        turns: Sequence[PastTurn],
        sources: Sequence[_Source],
        chosen: Sequence[_Sentence],
        system: str | None,
    ) -> _Layout:
        kept: dict[int, list[_Sentence]] = {}
        for sentence in sorted(chosen, key=lambda each: (each.source, each.start)):
            kept.setdefault(sentence.source, []).append(sentence)
        documents: list[tuple[_Source, PromptDocument]] = []
        asked: list[tuple[_Source, list[int]]] = []
        for number, sentences in kept.items():
            source = sources[number]
            if source.passage is None:
                asked.append((source, [token for each in sentences for token in source.ids_of(each)]))
            else:
                text = self._text(source, source.passage, sentences)
                documents.append((source, PromptDocument("", source.passage.title, text)))
        return _LayingOut(self._builder, turns, system).run(documents, asked)

    def _text(self, source: _Source, passage: RetrievedPassage, kept: Sequence[_Sentence]) -> str:
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
        documents: Sequence[tuple[_Source, PromptDocument]],
        asked: Sequence[tuple[_Source, list[int]]],
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
        documents: Sequence[tuple[_Source, PromptDocument]],
        asked: Sequence[tuple[_Source, list[int]]],
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
        return PastTurn(ids, len(ids), (system,), self._system_part, is_text=True)

    def _last_turn(self, prompt: Prompt, behind: int) -> PastTurn:
        last = self._last
        own = sorted({*last.unregistered, *self._system_part})
        found = PastTurn.of(prompt, last.answer, behind=behind, unregistered=own)
        return replace(found, passages=last.passages, question=last.question)


def _count(layout: _Layout, documents: Sequence[tuple[_Source, PromptDocument]], prompt: Prompt) -> None:
    for (source, _), segment in zip(documents, prompt.segments[1:], strict=False):
        _add(layout, source, segment.end - segment.start)


def _add(layout: _Layout, source: _Source, tokens: int) -> None:
    layout.tokens[source.turn] = layout.tokens.get(source.turn, 0) + tokens


def _within(sentences: Sequence[_Sentence], sources: Sequence[_Source], budget: int) -> list[_Sentence]:
    """Take whole sentences in their order, each that fits into what is left of the budget."""
    chosen: list[_Sentence] = []
    begun: set[int] = set()
    for sentence in sentences:
        cost = sentence.end - sentence.start
        cost += 0 if sentence.source in begun else sources[sentence.source].extra
        if cost <= budget:
            budget -= cost
            begun.add(sentence.source)
            chosen.append(sentence)
    return chosen


def _exchanges(turn: PastTurn, builder: PromptBuilder) -> Iterator[tuple[str, Sequence[int]]]:
    """The turn's questions, those of its history first, each with the token ids of its answer. Neighbouring
    messages of one role are one."""
    asked: list[str] = []
    said: list[str] = []
    for message in turn.history:
        if message.role == "assistant":
            said.append(message.content)
            continue
        if said:
            yield "\n\n".join(asked), builder.plain_ids("\n\n".join(said))
            asked, said = [], []
        asked.append(message.content)
    if said:
        yield "\n\n".join(asked), builder.plain_ids("\n\n".join(said))
        asked = []
    yield "\n\n".join([*asked, turn.question]), turn.answer


def _report(
    turns: Sequence[PastTurn],
    sizes: Sequence[int],
    sources: Sequence[_Source],
    chosen: Sequence[_Sentence],
    tokens: dict[int, int],
) -> Iterator[EarlierTurn]:
    for number, size in enumerate(sizes[:-1]):
        own = {n for n, source in enumerate(sources) if source.turn == number}
        held = sum(each.end - each.start for each in chosen if each.source in own)
        reason = _NONE if not held else _BEST
        if held == sum(len(sources[n].body) for n in own) and held:
            reason = _WHOLE
        there = sum(sources[n].passage is not None for n in own)
        if away := len(turns[number].passages) - there:
            reason += f"; {away} of its passages stand elsewhere in the prompt"
        yield EarlierTurn(turn=number + 1, tokens=size, tokens_kept=tokens.get(number, 0), reason=reason)
    yield EarlierTurn(turn=len(turns), tokens=sizes[-1], tokens_kept=sizes[-1], reason=_LAST)
