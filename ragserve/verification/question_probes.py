"""Probes: questions whose right answer is known without labels.

The reference of a probe is the model's answer over the chunk that the question is about, alone: where the
model is distracted by nothing. It must stand in the chunk, and the model must not know it without the chunk,
so that only reading earns it. A pair is two such questions in one, about chunks that are near each other, and
neither chunk alone answers it. Answers of whole contexts are scored against the reference. All that is asked
here are short prompts; what cannot be used is left out before any whole context is asked."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from ragserve.answering.follow_ups import passages
from ragserve.answering.prompt import Message, PromptBuilder, PromptDocument
from ragserve.answering.results import RetrievedPassage
from ragserve.engine.base import AnswerSource, GenerateRequest, Sampling
from ragserve.retrieval.passage_search import FoundPassages
from ragserve.retrieval.search_options import SearchOptions
from ragserve.verification.engine_run import first_token
from ragserve.verification.given_scores import TitledText
from ragserve.verification.metrics import contains_answer, count_words, is_refusal, normalise, token_f1
from ragserve.verification.questions import DrawnQuestion, Kind, cloze, written
from ragserve_index.types import Chunk

SHORT = (
    "Answer the question from the documents. Write the answer alone, in as few words as possible, without a "
    "sentence around it."
)
"""System text of all that is compared, so that answers can be held against each other."""
WRITER = "You write questions for a quiz about documents. Write the question alone."
ONE = (
    "Write one short question that a sentence of the document answers with a name, a number or a few words. "
    "Name what it is about, so that it can be understood without the document."
)
SHOTS = (
    ("The Forth Bridge, a cantilever railway bridge west of Edinburgh, was opened on 4 March 1890 by the "
     "Prince of Wales.", "In which year was the Forth Bridge opened?"),
    ("Invoices are paid within 30 days. The Kolstad observatory is led by Mari Lund of Tromso.",
     "Who leads the Kolstad observatory?"),
)  # fmt: skip
ANOTHER = "Write another short question, about something else in the document, of the same kind."
BOTH = "Answer both questions, one answer after the other. First: {} Second: {}"
TRIED, USABLE = 10, 3  # questions that the model writes of a kind before so many must be usable
_ATTEMPTS = 3  # questions about a chunk, of which the first usable one is a probe
_BEST = 3  # passages, of which each alone may answer a user's question
_WRITTEN_TOKENS = 48
_SHORT_TOKENS = 24
_MOST_WORDS = 12  # of a reference
_SAME = 0.5  # F1 above which two short answers say the same
_SEARCHED_CHARS = 300  # of a chunk, for its nearest
_FILLERS = ("is", "was", "are", "were", "in", "by", "of", "on", "at", "to", "it")
_POINTS_AWAY = frozenset(
    ("document", "documents", "passage", "passages", "text", "author", "article", "paragraph", "sentence")
)
"""Words of questions that cannot be understood alone."""


class Search(Protocol):
    """Finds passages, as `ragserve.retrieval.passage_search.PassageSearch` does."""

    async def search(
        self, namespace: str, question: str, options: SearchOptions, *, sentences: bool = False
    ) -> FoundPassages: ...


class Probes:
    """Makes probes with one engine and search."""

    def __init__(
        self, engine: AnswerSource, search: Search, builder: PromptBuilder, namespace: str, room: int
    ) -> None:
        """``room``: tokens of the longest prompt."""
        self._engine, self._search, self._builder = engine, search, builder
        self._namespace, self._room = namespace, room
        self._tried: Counter[Kind] = Counter()
        self._used: Counter[Kind] = Counter()

    def note(self, kind: Kind, *, usable: bool) -> None:
        """Count what came of a question that an earlier run wrote."""
        self._tried[kind] += 1
        self._used[kind] += usable

    def _writes(self, kind: Kind) -> bool:
        return self._tried[kind] < TRIED or self._used[kind] * TRIED >= USABLE * self._tried[kind]

    async def about(self, chunk: Chunk, *, two: bool = False) -> DrawnQuestion | None:
        """Make a probe about a chunk, or with ``two``, where that can be, about it and the chunk nearest to
        it; None where none of a few questions can be used. Raises what the engine raises."""
        one = await self._single(chunk)
        if one is not None and two and self._writes("pair"):
            return await self._pair(one, chunk) or one
        return one

    async def _single(self, chunk: Chunk | RetrievedPassage) -> DrawnQuestion | None:
        id_, draw = str(chunk.chunk_id), 0
        for attempt in range(_ATTEMPTS):
            if attempt == 0 and self._writes("written"):
                found = await self._written(id_, chunk)
            else:
                asked = cloze(chunk.text, random.Random(chunk.chunk_id), draw)
                if asked is None:
                    return None
                draw += 1
                found = await self._with_reference(DrawnQuestion(id_, "cloze", *asked), chunk)
            if found is not None:
                return found
        return None

    async def _pair(self, one: DrawnQuestion, chunk: Chunk) -> DrawnQuestion | None:
        """Ask a question and one about the nearest chunk together; None unless the model answers both over
        both chunks, and neither answer stands in the other's chunk."""
        near = await self._nearest(chunk)
        other = await self._single(near) if near is not None else None
        found: DrawnQuestion | None = None
        if near is not None and other is not None:
            apart = not contains_answer(_text(near), one.references)
            if apart and not contains_answer(_text(chunk), other.references):
                text = BOTH.format(one.text, other.text)
                said = await self._said(text, [chunk, near], tokens=2 * _SHORT_TOKENS)
                references = (one.references[0], other.references[0])
                if all(contains_answer(said, [each]) for each in references):
                    found = DrawnQuestion(one.id, "pair", text, references)
        self.note("pair", usable=found is not None)
        return found

    async def of_user(self, question: DrawnQuestion) -> DrawnQuestion | None:
        """Give a user's question a reference: what the best passages, each read alone, agree on; None where
        they do not, or nothing in them answers."""
        search = SearchOptions(_BEST)
        found = passages((await self._search.search(self._namespace, question.text, search)).passages)
        said = [answer for each in found if (answer := await self._stands(question.text, [each])) is not None]
        if not said or any(token_f1(said[0], [other]) <= _SAME for other in said[1:]):
            return None
        return await self._earned(replace(question, references=(said[0],)))

    async def others(self, chunk: Chunk, first: DrawnQuestion, most: int) -> list[DrawnQuestion]:
        """Further questions about a chunk, at most so many, whose answers stand in it. The model may know
        them without it, so they are no probes. None where it does not write questions about this chunk."""
        asked, found = [first.text], list[DrawnQuestion]()
        for _ in range(most if first.kind == "written" else 0):
            question = await self._asked(chunk, asked)
            if question is None or question in asked:
                break
            asked.append(question)
            answer = await self._stands(question, [chunk])
            if answer is not None and not contains_answer(question, [answer]):
                found.append(replace(first, text=question, references=(answer,)))
        return found

    async def _asked(self, chunk: TitledText, before: Sequence[str] = ()) -> str | None:
        """The question that the model writes about a chunk, after those ``before``; None for one that cannot
        be used."""
        turns: list[Message] = []
        for shown, asked in SHOTS:
            turns += [Message("user", f"{shown}\n\n{ONE}"), Message("assistant", asked)]
        # in the question itself, as in the examples: it is the last one that is asked about
        text = f"{chunk.title}\n{chunk.text}".strip()
        wanted = f"{text}\n\n{ONE}"
        for asked in before:
            turns += [Message("user", wanted), Message("assistant", asked)]
            wanted = ANOTHER
        said = await self._said(wanted, [], WRITER, _WRITTEN_TOKENS, turns)
        question = written(said, [shot for _, shot in SHOTS])
        if question is None or _POINTS_AWAY & set(normalise(question).split()):
            return None
        return question

    async def _written(self, id_: str, chunk: TitledText) -> DrawnQuestion | None:
        question = await self._asked(chunk)
        if question is None:
            found = None
        else:
            found = await self._with_reference(DrawnQuestion(id_, "written", question), chunk)
        self.note("written", usable=found is not None)
        return found

    async def _with_reference(self, question: DrawnQuestion, chunk: TitledText) -> DrawnQuestion | None:
        """Add the reference, and check that only the chunk gives it. A question with a gap knows what it left
        out, and the model must find that."""
        if question.references:
            found = question
            if not contains_answer(await self._said(question.text, [chunk]), found.references):
                return None
        else:
            answer = await self._stands(question.text, [chunk])
            if answer is None or contains_answer(question.text, [answer]):
                return None
            found = replace(question, references=(answer,))
        return await self._earned(found)

    async def _earned(self, question: DrawnQuestion) -> DrawnQuestion | None:
        """The question, unless the model knows its answer without any document."""
        known = self._gives(await self._said(question.text, []), question.references)
        return None if known else question

    async def _stands(self, question: str, texts: Sequence[TitledText]) -> str | None:
        """The model's answer over the texts alone, without the sentence around it; None unless it is short
        and stands in one of them."""
        said = await self._said(question, texts)
        if is_refusal(said, [" "]):
            return None
        answer = standing(said, question, [_text(each) for each in texts])
        return answer if answer and count_words(normalise(answer)) <= _MOST_WORDS else None

    @staticmethod
    def _gives(answer: str, references: Sequence[str]) -> bool:
        return contains_answer(answer, references) or token_f1(answer, references) > _SAME

    async def _said(
        self,
        question: str,
        texts: Sequence[TitledText],
        system: str = SHORT,
        tokens: int = _SHORT_TOKENS,
        history: Sequence[Message] = (),
    ) -> str:
        documents = [PromptDocument("", each.title, each.text) for each in texts]
        room = self._room - tokens
        prompt = self._builder.build(
            question, documents, max_prompt_tokens=room, history=history, system=system
        )
        sampling = Sampling(max_new_tokens=tokens, stop=prompt.stop)
        request = GenerateRequest("tune", prompt.input_ids, self._namespace, sampling=sampling)
        return (await first_token(self._engine, request)).text

    async def _nearest(self, chunk: Chunk) -> RetrievedPassage | None:
        found = await self._search.search(self._namespace, chunk.text[:_SEARCHED_CHARS], SearchOptions(_BEST))
        others = [each for each in passages(found.passages) if each.chunk_id != chunk.chunk_id]
        return others[0] if others else None


def _text(chunk: TitledText) -> str:
    return f"{chunk.title} {chunk.text}"


def without_sentence(answer: str, question: str) -> str:
    """An answer without what it repeats of the question at its ends ("The officer is Ada Marsh." to who the
    officer is); as it is where nothing else is in it."""
    known, words = {*normalise(question).split(), *_FILLERS, ""}, answer.split()
    while words and normalise(words[0]) in known:
        words.pop(0)
    while words and normalise(words[-1]) in known:
        words.pop()
    return " ".join(words).rstrip(".,;:") or answer.strip()


def standing(answer: str, question: str, texts: Sequence[str]) -> str | None:
    """What of an answer stands in one of the texts, without the sentence around it: all of it, or the longest
    run of its words that does, where most of what it adds to the question is in that run ("Ada Marsh" of "Ada
    Marsh was then the officer"). None if there is no such."""
    whole = without_sentence(answer, question)
    known, words = {*normalise(question).split(), *_FILLERS, ""}, whole.split()
    new = [normalise(word) not in known for word in words]
    read = [f" {normalise(text)} " for text in texts]

    def stands(begin: int, end: int) -> bool:
        run = normalise(" ".join(words[begin:end]))
        return bool(run) and any(f" {run} " in text for text in read)

    for length in range(len(words), 0, -1):
        for begin in range(len(words) - length + 1):
            end = begin + length
            tells = new[begin] and new[end - 1] and 2 * sum(new[begin:end]) > sum(new)
            if (tells or length == len(words)) and stands(begin, end):
                return " ".join(words[begin:end]).strip(".,;:")
    return None


def scored(answer: str, question: DrawnQuestion) -> float:
    """The score of an answer, 0 to 1: the mean of its token F1 and of whether it contains a reference. Of a
    pair both references are wanted, and each that is contained counts half."""
    wanted = question.references
    if question.kind == "pair":
        contained = sum(contains_answer(answer, [each]) for each in wanted) / len(wanted)
        return (token_f1(answer, [" ".join(wanted)]) + contained) / 2
    return (token_f1(answer, wanted) + contains_answer(answer, wanted)) / 2


def differ(one: str, other: str) -> bool:
    """Tell whether two answers say different things."""
    return token_f1(one, [other]) <= _SAME
