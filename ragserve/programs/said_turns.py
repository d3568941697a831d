"""The turns that `Rag` has written into a program's state, and the state without what a question does not
need of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ragserve.answering.prompt import PromptDocument
from ragserve.answering.results import RetrievedPassage
from ragserve.answering.sessions.past_turns import PastTurn, ids_of
from ragserve.answering.sessions.turn_compression import ShortenedDialogue, TurnCompressor
from ragserve.errors import InvalidRequest

if TYPE_CHECKING:
    from ragserve.programs.prompt_text import PromptText

_VARIABLE = "ragserve turns"
_UNLIMITED = 10**9


@dataclass(frozen=True, slots=True)
class SaidTurn:
    """A question with the passages that came with it; ``name``: the variable of its answer. While there is
    no question yet, both are empty."""

    passages: tuple[RetrievedPassage, ...]
    question: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class SaidTurns:
    """What a state holds. ``texts``: before each answer that is still in it, from the state's beginning on;
    ``names``: of these answers' variables. Forks of a state have a copy."""

    turns: tuple[SaidTurn, ...] = ()
    texts: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, s: Any) -> SaidTurns:
        """Those of a state; none where `Rag` has not begun it."""
        found: SaidTurns = s.get_var(_VARIABLE) if _VARIABLE in s else cls()
        return found

    def begun(self, text: str, passages: Sequence[RetrievedPassage]) -> SaidTurns:
        """The state has the text of these passages now, before its first question."""
        return SaidTurns((SaidTurn(tuple(passages)),), (text,), ())

    def asked(self, text: str, question: str, name: str, passages: Sequence[RetrievedPassage]) -> SaidTurns:
        """A question's ``text`` follows, and its answer."""
        turns, texts = self.turns, self.texts
        if turns and not turns[-1].name:  # the passages of the state's beginning
            passages, turns = (*turns[-1].passages, *passages), turns[:-1]
            text, texts = texts[-1] + text, texts[:-1]
        turn = SaidTurn(tuple(passages), question, name)
        return SaidTurns((*turns, turn), (*texts, text), (*self.names, name))

    def keep(self, s: Any) -> None:
        """Keep them with the state."""
        s.set_var(_VARIABLE, self)

    def shorten(
        self,
        s: Any,
        layout: PromptText,
        question: str,
        budget: int,
        found: Sequence[tuple[str, str]],
    ) -> tuple[SaidTurns, ShortenedDialogue]:
        """Leave at most ``budget`` tokens of the turns before the last one in the state, 0 for all, and wait
        for its answers; see `TurnCompressor.shorten`. Raises InvalidRequest for a state that holds other
        text."""
        if budget < 0:
            raise InvalidRequest("session_budget counts tokens; 0 is no limit.", param="session_budget")
        answers = [str(s[turn.name]) for turn in self.turns if turn.name]
        text = "".join(
            part for each in zip(self.texts, map(s.get_var, self.names), strict=False) for part in each
        )
        if not answers or len(answers) < len(self.turns) or s.text() != text:
            raise InvalidRequest(
                "A session_budget needs a state whose text Rag has written: passages, questions and answers.",
                hint="Begin it with context or insert and answer, and add nothing by hand.",
                param="session_budget",
            )
        past: list[PastTurn] = []
        for turn, answer in zip(self.turns, answers, strict=True):
            past.append(_past(layout, past, turn, answer))
        compressor = TurnCompressor(layout.builder)
        shortened = compressor.shorten(past, question, budget or _UNLIMITED, found=found)
        if shortened.turns == tuple(past) and len(self.texts) == len(past):
            return self, shortened
        before = layout.written(ids_of(shortened.turns)[: -len(past[-1].answer) or None])
        _replace_text(s, before + answers[-1])
        return replace(self, texts=(before,), names=self.names[-1:]), shortened


def _past(layout: PromptText, before: Sequence[PastTurn], turn: SaidTurn, answer: str) -> PastTurn:
    documents = [PromptDocument("", each.title, each.text) for each in turn.passages]
    builder, ids = layout.builder, ids_of(before)
    if before:
        prompt = builder.follow_up(ids, turn.question, documents, max_prompt_tokens=_UNLIMITED)
    else:
        prompt = builder.build(turn.question, documents, max_prompt_tokens=_UNLIMITED)
    found = PastTurn.of(prompt, builder.answer_ids((), answer), behind=len(ids))
    return replace(found, passages=turn.passages, question=turn.question)


def _replace_text(s: Any, text: str) -> None:
    """Give a state another text; its variables stay. SGLang has no call for it."""
    s.sync()
    s.stream_executor.text_ = text
