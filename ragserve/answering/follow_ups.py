"""Find out what a follow-up asks for: "And who is the king there?" after a question about Norway.

Either the serving model rewrites it as a question that stands alone, or the search uses it together with the
turn before. A rewrite is used only if it keeps the follow-up's words and adds none but the dialogue's. Models
that cannot rewrite (two test dialogues show it, once for each server) are not asked again. Typing errors of
the user are corrected before."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from ragserve import tracing
from ragserve.answering.messages import Message, spoken
from ragserve.answering.prompt import PromptBuilder
from ragserve.answering.results import (
    AnswerEvidence,
    Correction,
    Reranking,
    RetrievalTimings,
    RetrievedPassage,
    SearchedFor,
)
from ragserve.engine.base import Engine, GenerateChunk, GenerateRequest, Sampling
from ragserve.errors import RagserveError
from ragserve.retrieval.spelling import Corrected
from ragserve.setting_groups.answering import FollowUps, Retrieval

if TYPE_CHECKING:
    from ragserve.retrieval.passage_search import FoundPassage, PassageSearch
    from ragserve.retrieval.retriever import SentenceScores
    from ragserve.retrieval.search_options import SearchOptions
    from ragserve.retrieval.spelling import SpellingCorrector
    from ragserve_index.types import Chunk, Hit

log = logging.getLogger(__name__)

_CONTEXT_CHARS = 300  # of an earlier message in a search: an embedder reads little, the question comes last
_MESSAGES = 6  # of the dialogue that the model reads
_MESSAGE_CHARS = 500
_MARKED = 4  # characters read for one that is kept: the others are citation markers and blanks
_MAX_NEW_TOKENS = 64
_MAX_CHARS = 400  # of a rewrite
_REWRITTEN = 4 * _MAX_CHARS  # characters of a question of which a rewrite may keep half of the words
_KEPT = 0.5  # share of the follow-up's words that a rewrite keeps: "that country" becomes a name

_SYSTEM = (
    "Rewrite the last question of a dialogue so that it can be understood without the dialogue. Keep its "
    "language and its words, and put the names from the dialogue in place of words like it, she or there. "
    "If it can be understood alone, repeat it. Write the question and nothing else."
)
_SHOTS = (
    (("Who wrote Dracula?", "Bram Stoker."), "And when was he born?", "When was Bram Stoker born?"),
    (
        ("How tall is the Eiffel Tower?", "330 metres."),
        "What does a ticket for the Louvre cost?",
        "What does a ticket for the Louvre cost?",
    ),
    (
        ("Was kostet das Modell X200?", "499 Euro."),
        "Und wie schwer ist es?",
        "Wie schwer ist das Modell X200?",
    ),
)
# A model can rewrite if it names these subjects.
_TESTS = (
    (("Where was Marie Curie born?", "In Warsaw."), "Which prizes did she win in her life?", "curie"),
    (
        ("What is the capital of Bolivia?", "Sucre."),
        "Which large rivers flow through the country?",
        "bolivia",
    ),
)

_UNABLE = (
    "The model cannot rewrite questions, as two test dialogues have shown: the question is searched for with "
    "the turn before it, as with follow_ups=context."
)
_WORD = re.compile(r"\w+")
_MARKER = re.compile(r"(?<!\s)\s*+\[\d{1,3}\]")
_SHORT_WORD = 3  # letters up to which any word is free: of, the, in, der, est
# Longer words without a subject of their own. Rewrites in other languages pass if they need no new ones.
_FREE = frozenset(
    _WORD.findall(
        "about above after also because been before being below between both could does doing down during "
        "each else from further give have having here hers herself himself into itself just know latter like "
        "made many more most much must need only other ours over please same says shall should some such "
        "tell than thanks that their theirs them then there these they thing things this those through under "
        "until upon very want were what when where whether which while whom whose will with within without "
        "would your yours former"
    )
)


@dataclass(frozen=True, slots=True)
class DialogueText:
    """A question after earlier messages."""

    question: str
    history: tuple[Message, ...] = ()

    @property
    def typed(self) -> list[str]:
        """The question, and the user's earlier messages."""
        return [self.question, *(message.content for message in self.history if message.role == "user")]

    def corrected(self, found: Corrected) -> DialogueText:
        """The same, with the texts of ``typed`` as they are corrected."""
        question, *earlier = found.texts
        texts = iter(earlier)
        history = [
            replace(message, content=next(texts)) if message.role == "user" else message
            for message in self.history
        ]
        return DialogueText(question, tuple(history))


@dataclass(frozen=True, slots=True)
class Found:
    """Passages, best first, with their sentences' scores, and the dialogue as the model ``reads`` it."""

    passages: list[RetrievedPassage]
    version: int | None
    timings: RetrievalTimings
    sentences: list[SentenceScores]
    searched_for: SearchedFor | None  # None for a question without earlier ones that is searched as it is
    reads: DialogueText
    reranking: Reranking | None = None  # None without a reranker
    evidence: AnswerEvidence | None = None
    by_words_alone: str | None = None  # why a hybrid search was lexical
    versions: Mapping[str, int] | None = None

    def searched_by(self, options: SearchOptions) -> Retrieval:
        """The search that found the passages."""
        return options.retrieval if self.by_words_alone is None else "lexical"

    @property
    def notes(self) -> list[str]:
        """Remarks for the caller on what was not done."""
        notes = []
        if self.by_words_alone is not None:
            notes.append(f"Searched by words alone: {self.by_words_alone}")
        if self.reranking is not None and not self.reranking.scored and self.reranking.note:
            notes.append(f"Not reranked: {self.reranking.note}")
        return notes


class DialogueSearch:
    """Searches for the last question of a dialogue, with one engine. Belongs to one event loop."""

    def __init__(
        self,
        engine: Engine,
        search: PassageSearch,
        prompts: PromptBuilder,
        spelling: SpellingCorrector | None = None,
    ) -> None:
        """Without ``spelling``, nothing is corrected."""
        self._search, self.hides = search, search.hides
        self._spelling = spelling
        self._rewriter = Rewriter(engine, prompts)

    async def search(
        self,
        question: str,
        options: SearchOptions,
        *,
        namespace: str,
        request_id: str,
        history: Sequence[Message] = (),
        sentences: bool = False,
        was_read: bool = False,
        spend: Callable[[int], None] = lambda tokens: None,
    ) -> Found:
        """Find the best passages; with ``sentences``, score those of them, too. ``was_read``: the model has
        read the history, and will not read it again. ``spend`` is called with numbers of tokens, those that
        rewriting the question takes.

        Raises as ``PassageSearch.search``; a rewrite that fails is noted."""
        typed = DialogueText(question, tuple(history))
        started = time.perf_counter()
        corrected = await self._corrected(typed, options, namespace)
        meant = typed.corrected(corrected)
        spelling_ms = (time.perf_counter() - started) * 1e3
        asked, rewrite_ms = None, None
        if any(message.role == "user" for message in history):
            started = time.perf_counter()
            asked = await self._asked(meant, options.follow_ups, namespace, request_id, spend)
            if options.follow_ups == "rewrite":
                rewrite_ms = (time.perf_counter() - started) * 1e3
        elif corrected.corrections:
            asked = SearchedFor(question=meant.question, variants=[], follow_up=None)
        found = await self._search.search(
            namespace,
            asked.question if asked else question,
            options,
            variants=asked.variants if asked else (),
            sentences=sentences,
        )
        timings = RetrievalTimings(
            rewrite_ms=rewrite_ms,
            embed_ms=found.embed_ms,
            search_ms=spelling_ms + found.search_ms,
            rerank_ms=found.rerank_ms,
        )
        reranking = None
        if found.reranked is not None:
            reranking = Reranking.of(options.rerank, found.reranked, found.not_reranked)
        reads = typed
        if asked is not None and corrected.corrections:
            read = Corrected.nothing(typed.typed)
            if options.spelling == "on":
                texts = (f"{each.chunk.title} {each.chunk.text}" for each in found.passages)
                read = corrected.found_in(texts, first_only=was_read)
            reads = typed.corrected(read)
            asked = asked.model_copy(update=_said(corrected, read))
        evidence = None
        if found.evidence is not None:
            evidence = AnswerEvidence.model_validate(found.evidence, from_attributes=True)
        return Found(
            passages(found.passages),
            found.version,
            timings,
            found.sentences,
            asked,
            reads,
            reranking,
            evidence,
            found.by_words_alone,
            found.versions,
        )

    async def _corrected(self, typed: DialogueText, options: SearchOptions, namespace: str) -> Corrected:
        if self._spelling is None or options.spelling == "off":
            return Corrected.nothing(typed.typed)
        with tracing.span("spelling"):
            return await self._spelling.correct(namespace, typed.typed, options.viewer)

    async def _asked(
        self,
        dialogue: DialogueText,
        how: FollowUps,
        namespace: str,
        request_id: str,
        spend: Callable[[int], None],
    ) -> SearchedFor:
        question, history = dialogue.question, spoken(dialogue.history)
        if how == "alone":
            return SearchedFor(question=question, variants=[], follow_up="alone")
        note = None
        if how == "rewrite":
            with tracing.span("rewrite"):
                rewrite, note = await self._rewriter.rewrite(question, history, namespace, request_id, spend)
            if rewrite is not None:
                return SearchedFor(question=rewrite, variants=[], follow_up="rewrite")
        return SearchedFor(
            question=question, variants=variants(question, history), follow_up="context", note=note
        )


def _said(corrected: Corrected, read: Corrected) -> dict[str, Any]:
    """The fields of `SearchedFor` about corrections; ``read``: those for the model."""
    pairs = set(read.corrections)
    return {
        "corrections": [
            Correction(original=original, replacement=word, read=(original, word) in pairs)
            for original, word in corrected.corrections
        ],
        "model_reads": read.texts[0] if read.replacements[0] else None,
    }


def passages(found: Sequence[Hit | FoundPassage]) -> list[RetrievedPassage]:
    """Number what a search has found from 1."""
    return [
        RetrievedPassage(
            index=index,
            score=each.score,
            cosine=each.cosine,
            bm25=each.bm25,
            search_rank=getattr(each, "search_rank", None),
            rerank_score=getattr(each, "rerank_score", None),
            **_fields(each.chunk),
        )
        for index, each in enumerate(found, 1)
    ]


def _fields(chunk: Chunk) -> dict[str, Any]:
    fields = asdict(chunk)
    fields["metadata"].pop("page_names", None)  # one for each page of the document; the own one is below
    own = ("header_chars", "first_page", "page_kind", "page_name")
    return fields | {name: getattr(chunk, name) for name in own}


class Rewriter:
    """Lets one engine's model rewrite follow-ups. Belongs to one event loop."""

    def __init__(self, engine: Engine, prompts: PromptBuilder) -> None:
        self._engine = engine
        self._prompts = prompts
        self._able: bool | None = None  # None: not tested yet
        self._testing = asyncio.Lock()

    async def rewrite(
        self,
        question: str,
        history: Sequence[Message],
        namespace: str,
        request_id: str,
        spend: Callable[[int], None],
    ) -> tuple[str, None] | tuple[None, str]:
        """Return the question that stands alone, or why there is none. ``spend``: see `DialogueSearch`; the
        server's own tests are not counted."""
        try:
            if not await self._can_rewrite(namespace, request_id):
                return None, _UNABLE
            rewrite = await self._rewritten(question, history, namespace, request_id, spend)
        except RagserveError as error:
            return None, f"The question was not rewritten: {error}"
        if is_usable(rewrite, question, history):
            return rewrite, None
        return None, f"The model's rewrite is not usable: {rewrite[:_MAX_CHARS]!r}"

    async def _can_rewrite(self, namespace: str, request_id: str) -> bool:
        async with self._testing:
            if self._able is None:
                self._able = await self._passes_tests(namespace, request_id)
                log.info("the model %s rewrite follow-up questions", "can" if self._able else "cannot")
            return self._able

    async def _passes_tests(self, namespace: str, request_id: str) -> bool:
        for turn, question, subject in _TESTS:
            history = _messages(turn)
            rewrite = await self._rewritten(question, history, namespace, request_id)
            if subject not in rewrite.casefold() or not is_usable(rewrite, question, history):
                return False
        return True

    async def _rewritten(
        self,
        question: str,
        history: Sequence[Message],
        namespace: str,
        request_id: str,
        spend: Callable[[int], None] = lambda tokens: None,
    ) -> str:
        """Return the first line that the model writes."""
        shots = [
            message
            for turn, follow_up, rewrite in _SHOTS
            for message in _messages((_dialogue(_messages(turn), follow_up), rewrite))
        ]
        prompt = self._prompts.build(
            _dialogue(history, question),
            [],
            max_prompt_tokens=self._engine.info.max_prompt_tokens - _MAX_NEW_TOKENS,
            history=shots,
            system=_SYSTEM,
        )
        request = GenerateRequest(
            f"{request_id}-rewrite",
            prompt.input_ids,
            namespace,
            sampling=Sampling(max_new_tokens=_MAX_NEW_TOKENS, stop=prompt.stop),
        )
        text, generated = "", 0
        spend(len(prompt.input_ids))
        # The protocol's iterators are generators: closing them aborts the request.
        chunks = cast("AsyncGenerator[GenerateChunk, None]", self._engine.generate(request))
        async with aclosing(chunks):
            async for chunk in chunks:
                text += chunk.text
                spend(max(0, chunk.usage.completion - generated))
                generated = chunk.usage.completion
                if "\n" in text.strip():
                    break
        return text.strip().partition("\n")[0].strip()


def variants(question: str, history: Sequence[Message]) -> list[str]:
    """The question after the user's previous turn, and after the beginning of the answer to it.

    The turn names the subject of most follow-ups, the answer that of others ("Who built it?" "Alan
    Stevenson." "When was he born?")."""
    found = []
    for role in ("user", "assistant"):
        earlier = next((_plain(m.content, _CONTEXT_CHARS) for m in reversed(history) if m.role == role), "")
        if earlier:
            found.append(f"{earlier}\n{question}")
    return found


def is_usable(rewrite: str, question: str, history: Sequence[Message]) -> bool:
    """Whether a rewrite keeps at least half of the question's words and adds none but those of the
    dialogue that the model has read.

    Words match if they share all but their ending; words of up to three letters and words without a subject
    are free."""
    if len(rewrite) > _MAX_CHARS or len(question) > _REWRITTEN:
        return False
    said, asked = _words(rewrite), _words(question)
    read = (_plain(message.content, _MESSAGE_CHARS) for message in history[-_MESSAGES:])
    known = asked.union(*map(_words, read))
    if not said or not all(_is_free(word) or _is_in(word, known) for word in said):
        return False
    telling = [word for word in asked if not _is_free(word)]
    return sum(_is_in(word, said) for word in telling) >= _KEPT * len(telling)


def _messages(turn: tuple[str, str]) -> list[Message]:
    return [Message("user", turn[0]), Message("assistant", turn[1])]


def _dialogue(history: Sequence[Message], question: str) -> str:
    lines = [f"{m.role.title()}: {_plain(m.content, _MESSAGE_CHARS)}" for m in history[-_MESSAGES:]]
    return "\n".join([*lines, f"Last question: {_plain(question, len(question))}"])


def _plain(text: str, chars: int) -> str:
    """The first ``chars`` characters in one line, without citation markers. A long text is cut before it is
    cleaned, because clients send megabytes."""
    return " ".join(_MARKER.sub("", text[: _MARKED * chars]).split())[:chars]


def _words(text: str) -> set[str]:
    return set(_WORD.findall(text.casefold()))


def _is_free(word: str) -> bool:
    return word in _FREE or (len(word) <= _SHORT_WORD and not any(c.isdigit() for c in word))


def _is_in(word: str, words: set[str]) -> bool:
    return word in words or any(_same_stem(word, other) for other in words)


def _same_stem(a: str, b: str) -> bool:
    if not (a.isalpha() and b.isalpha()):
        return False
    n = max(4, max(len(a), len(b)) - 3)
    return len(a) >= n and a[:n] == b[:n]
