"""Programs with a session budget: the state's text is what a session of the server would be, and states that
hold other text are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ragserve.answering.prompt import load_tokenizer
from ragserve.answering.sessions.past_turns import PastTurn, ids_of
from ragserve.answering.sessions.turn_compression import TurnCompressor
from ragserve.errors import InvalidRequest
from ragserve.programs.prompt_text import PromptText
from ragserve.programs.rag import Rag
from ragserve.setting_groups.per_namespace import NamespaceSettings
from tests.unit.answering.sessions.test_turn_compression import BELL, SOUP, TALK, TOWER, spoken

QUESTION = "Who was the builder of Skerryvore?"
ANSWERS = {"one": TALK[0][2], "two": TALK[1][2], "three": TALK[2][2], "four": " Alan Stevenson."}


class Executor:
    def __init__(self) -> None:
        self.text_ = ""


class State:
    """A program's state whose answers are known; it takes what SGLang's takes."""

    def __init__(self) -> None:
        self.stream_executor = Executor()
        self._variables: dict[str, Any] = {}

    def __iadd__(self, other: Any) -> State:
        if not isinstance(other, str):
            self._variables[other.name] = ANSWERS[other.name]
            other = ANSWERS[other.name]
        self.stream_executor.text_ += other
        return self

    def __contains__(self, name: str) -> bool:
        return name in self._variables

    def __getitem__(self, name: str) -> Any:
        return self._variables[name]

    get_var = __getitem__

    def set_var(self, name: str, value: Any) -> None:
        self._variables[name] = value

    def text(self) -> str:
        return self.stream_executor.text_

    def sync(self) -> None:
        """Everything is there at once."""


@pytest.fixture
def layout(model_path: Path) -> PromptText:
    return PromptText(load_tokenizer(str(model_path)), 8192)


@pytest.fixture
def rag(layout: PromptText, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(PromptText, "of", lambda *_: layout)
    monkeypatch.setattr("ragserve.client.Client.info", lambda self: self)
    monkeypatch.setattr("ragserve.client.Client.model_dump", dict, raising=False)
    monkeypatch.setattr("ragserve.client.Client.namespace_settings", lambda *_: NamespaceSettings())
    made = Rag()
    yield made
    made.close()


def led(rag: Rag) -> tuple[State, Any]:
    """A state with the turns of `TALK`."""
    s = State()
    context = rag.insert(s, TALK[0][0])
    rag.answer(s, TALK[0][1], "one")
    context = rag.follow_up(s, TALK[1][1], "two", TALK[1][0], context=context)
    return s, rag.follow_up(s, TALK[2][1], "three", context=context)


def written(layout: PromptText, turns: list[PastTurn], question: str = QUESTION) -> str:
    """Text of the next turn's prompt as a session has it, with the answer."""
    prompt = layout.builder.follow_up(ids_of(turns), question, (), max_prompt_tokens=9999)
    return layout.written(prompt.input_ids) + ANSWERS["four"]


@pytest.mark.parametrize("budget", [40, 80])
def test_a_budget_leaves_what_a_session_would_leave(rag: Rag, layout: PromptText, budget: int) -> None:
    s, context = led(rag)
    assert s.text().count("Skerryvore") > 1
    found = rag.follow_up(s, QUESTION, "four", context=context, session_budget=budget)
    wanted = TurnCompressor(layout.builder).shorten(spoken(layout.builder, TALK), QUESTION, budget)
    assert s.text() == written(layout, list(wanted.turns))
    assert list(found.earlier) == wanted.report
    assert [passage.title for passage in found.passages] == [p.title for p in wanted.passages]
    assert [passage.index for passage in found.passages] == list(range(1, len(found.passages) + 1))
    assert [one.rule for one in found.earlier] == ["words", "words", None]


def test_what_was_left_out_comes_back(rag: Rag, layout: PromptText) -> None:
    s, context = led(rag)
    short = rag.follow_up(s, QUESTION, "four", context=context, session_budget=40)
    assert BELL not in s.text()
    back = rag.follow_up(s, "Which one is older?", "two", context=short, session_budget=0)
    assert all(text in s.text() for text in (TOWER, SOUP, BELL, QUESTION))
    assert [passage.title for passage in back.passages] == ["Skerryvore", "Soup", "Bell Rock"]
    assert back.earlier == ()


def test_within_the_budget_the_state_only_grows(rag: Rag) -> None:
    s, context = led(rag)
    before = s.text()
    found = rag.follow_up(s, QUESTION, "four", context=context, session_budget=5000)
    assert s.text().startswith(before)
    assert all(one.tokens == one.tokens_kept for one in found.earlier)


def test_a_passage_of_the_last_turn_is_not_added_twice(rag: Rag) -> None:
    s, context = led(rag)
    context = rag.follow_up(s, "And the soup?", "four", [("Soup", SOUP)], context=context, session_budget=60)
    assert s.text().count("Salt comes last.") == 1, "it came with the question, and left its turn"
    again = rag.follow_up(s, "With salt?", "two", [("Soup", SOUP)], context=context, session_budget=60)
    assert s.text().count("Salt comes last.") == 1
    assert [passage.title for passage in again.passages].count("Soup") == 1


def test_text_of_documents_stays_plain(rag: Rag, layout: PromptText) -> None:
    s, special = State(), layout.builder.tokenizer.all_special_tokens[0]
    context = rag.insert(s, [("Skerryvore", f"Its builder was {special} Alan."), ("Soup", SOUP)])
    rag.answer(s, "What is it?", "one")
    context = rag.follow_up(s, "And?", "two", context=context)
    count = s.text().count(special)
    rag.follow_up(s, QUESTION, "four", context=context, session_budget=30)
    assert "Its builder was" in s.text()
    assert s.text().count(special) <= count + 1, "the document's is none"
    after = s.text().partition("Its builder was")[2].partition("Alan.")[0]
    assert special not in after


def test_states_with_other_text_are_refused(rag: Rag) -> None:
    s, context = led(rag)
    with pytest.raises(InvalidRequest, match="counts tokens"):
        rag.follow_up(s, QUESTION, "four", context=context, session_budget=-1)
    s += "By hand."
    with pytest.raises(InvalidRequest, match="Rag has written"):
        rag.follow_up(s, QUESTION, "four", context=context, session_budget=40)
    with pytest.raises(InvalidRequest, match="Rag has written"):
        rag.follow_up(State(), QUESTION, "four", session_budget=40)
