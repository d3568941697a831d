"""Compressed turns: what stays is whole sentences in their order, within the budget, and the last turn is
whole; a dialogue within its budget stays as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from ragserve.answering.prompt import Message, PromptBuilder, PromptDocument, load_tokenizer
from ragserve.answering.results import RetrievedPassage
from ragserve.answering.sessions.past_turns import PastTurn, SessionKv, ids_of
from ragserve.answering.sessions.turn_compression import TurnCompressor
from ragserve.engine.base import GenerateRequest
from sglang_ext.wire.protocol import session_key
from tests.conftest import MODEL
from tests.unit.answering.test_dialogue_prompt import BRACKETS
from tests.unit.answering.test_prompt import LLAMA, NO_SYSTEM

TEMPLATES = {"own": "", "brackets": BRACKETS, "messages": LLAMA, "no system role": NO_SYSTEM, "none": None}
TOWER = (
    "The tower of Skerryvore stands on a reef. Its builder was Alan Stevenson. Seals sleep on the rocks. "
    "The lamp was lit in 1844. Nobody lives there now."
)
SOUP = "Leeks are washed. They boil for an hour. Salt comes last. Bread is served with the soup."
BELL = "Bell Rock is older. Robert Stevenson built it. It stands off Angus."
Spoken = tuple[Sequence[tuple[str, str]], str, str]
TALK: tuple[Spoken, ...] = (
    ([("Skerryvore", TOWER), ("Soup", SOUP)], "What is Skerryvore?", " A tower. It stands on a reef."),
    ([("Bell Rock", BELL)], "Which one is older?", " Bell Rock is the older one. It stands off Angus."),
    ([], "Is there bread?", " Yes."),
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(str(MODEL))


@pytest.fixture(scope="module")
def builder(tokenizer: Any) -> PromptBuilder:
    return PromptBuilder(tokenizer)


def spoken(builder: PromptBuilder, talk: Sequence[Spoken], **first: Any) -> list[PastTurn]:
    """The turns of a dialogue; ``first``: further fields of the first one."""
    past: list[PastTurn] = []
    for texts, question, answer in talk:
        documents = [PromptDocument("", title, text) for title, text in texts]
        ids = ids_of(past)
        if past:
            prompt = builder.follow_up(ids, question, documents, max_prompt_tokens=9999)
        else:
            prompt = builder.build(
                question, documents, max_prompt_tokens=9999, history=first.get("history", ())
            )
        passages = tuple(RetrievedPassage(index=1, title=title, text=text) for title, text in texts)
        turn = PastTurn.of(prompt, builder.plain_ids(answer), behind=len(ids))
        past.append(replace(turn, passages=passages, question=question, **({} if past else first)))
    return past


def said(builder: PromptBuilder, turns: Sequence[PastTurn]) -> str:
    return str(builder.tokenizer.decode(ids_of(turns)))


def test_within_the_budget_nothing_changes(builder: PromptBuilder) -> None:
    past = spoken(builder, TALK)
    sizes = [len(past[0].ids) - past[0].spans[0].end, len(past[1].ids), len(past[2].ids)]
    same = TurnCompressor(builder).shorten(past, "Who built it?", sum(sizes[:2]))
    assert list(same.turns) == past
    assert [(one.tokens, one.tokens_kept) for one in same.report] == [(size, size) for size in sizes]
    assert {one.reason for one in same.report} == {"the earlier turns are within the budget"}
    assert [passage.title for passage in same.passages] == ["Skerryvore", "Soup", "Bell Rock"]
    assert same.whole == 3
    less = TurnCompressor(builder).shorten(past, "Who built it?", sum(sizes[:2]) - 1)
    assert len(ids_of(less.turns)) < len(ids_of(past))


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("budget", [40, 80, 120])
def test_whole_sentences_stay_in_their_order(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, template: str, budget: int
) -> None:
    if template != "own":
        monkeypatch.setattr(tokenizer, "chat_template", TEMPLATES[template])
    builder = PromptBuilder(tokenizer)
    past = spoken(builder, TALK)
    found = TurnCompressor(builder).shorten(past, "Who was the builder of Skerryvore?", budget)
    earlier, last = found.turns
    assert earlier.is_text
    assert [one.tokens_kept for one in found.report[2:]] == [len(past[2].ids)]
    left = sum(one.tokens_kept for one in found.report[:2])
    assert left == len(earlier.ids) - earlier.spans[0].end
    assert left <= budget
    text = said(builder, found.turns)
    assert "Its builder was Alan Stevenson." in text, "the sentence with the question's words"
    sentences = [f"{part}." for whole in (TOWER, SOUP, BELL) for part in whole[:-1].split(". ")]
    places = [text.index(sentence) for sentence in sentences if sentence in text]
    assert places == sorted(places)
    rest = text
    for sentence in sentences:
        rest = rest.replace(sentence, "")
    words = ("builder was", "Seals", "lamp", "Nobody", "Leeks", "boil", "Salt", "Bread", "Robert")
    assert not [word for word in words if word in rest], "a sentence stays whole, or not at all"
    assert list(last.answer) == list(past[2].answer), "the last answer as it was generated"
    assert text.rstrip().endswith("Yes.")
    assert "Is there bread?" in text


def test_the_last_turn_keeps_its_documents_whole(builder: PromptBuilder) -> None:
    past = spoken(builder, TALK[:2])
    found = TurnCompressor(builder).shorten(past, "Who was the builder of Skerryvore?", 24)
    earlier, last = found.turns
    assert [passage.title for passage in found.passages] == ["Skerryvore", "Bell Rock"]
    assert found.whole == 1
    [place] = last.spans[1:]
    assert list(last.ids[place.start : place.end]) == builder.document_ids("Bell Rock", BELL)
    assert [one.reason for one in found.report] == [
        "its best sentences for this question stay",
        "the last turn stays whole",
    ]
    request = SessionKv(found.turns, session_key("n", "s")).request(
        GenerateRequest("r", [], "n", "concat", spans=())
    )
    assert request.session is not None
    assert request.session.held == len(earlier.ids) + place.end
    assert request.earlier is not None
    again = request.earlier()
    assert again.input_ids == [*earlier.ids, *last.ids[: last.asked]]
    assert again.input_ids[again.spans[1].start : again.spans[1].end] == builder.document_ids(
        "Bell Rock", BELL
    )
    assert again.session is not None
    assert again.session.held == len(earlier.ids), "all of the text that is left"
    assert again.earlier is not None
    text = again.earlier()
    assert (text.input_ids, text.spans) == (list(earlier.ids), earlier.spans), "over the system text alone"
    assert text.session is not None
    assert (text.session.held, text.earlier) == (0, None)


def test_without_room_for_a_sentence_the_last_turn_stands_alone(builder: PromptBuilder) -> None:
    past = spoken(builder, TALK[:2])
    found = TurnCompressor(builder).shorten(past, "Who built it?", 1)
    [last] = found.turns
    own = [PromptDocument("", "Bell Rock", BELL)]
    alone = builder.build("Which one is older?", own, max_prompt_tokens=999)
    assert list(last.ids[: last.asked]) == alone.input_ids
    assert last.spans == alone.spans
    assert [one.tokens_kept for one in found.report] == [0, len(past[1].ids)]
    assert found.report[0].reason == "none of its sentences is among the best for this question"


def test_a_passage_that_comes_again_leaves_its_earlier_turn(builder: PromptBuilder) -> None:
    past = spoken(builder, (*TALK[:2], ([("Soup", SOUP)], "And the soup?", " Leeks.")))
    found = TurnCompressor(builder).shorten(
        past, "Who was the builder of Skerryvore?", 100, found={("Skerryvore", TOWER)}
    )
    text = said(builder, found.turns)
    assert "Alan Stevenson" not in text, "it comes with the question"
    assert text.count("Salt comes last.") == 1, "the last turn has it"
    assert [passage.title for passage in found.passages] == ["Bell Rock", "Soup"]
    assert "2 of its passages stand elsewhere in the prompt" in found.report[0].reason


def test_messages_before_the_first_question_are_turns_as_well(builder: PromptBuilder) -> None:
    history = (
        Message("assistant", "Good day."),
        Message("user", "My boat is called Skua."),
        Message("user", "It is blue."),
        Message("assistant", "A fine name for a boat."),
    )
    past = spoken(builder, TALK, history=history)
    found = TurnCompressor(builder).shorten(past, "What is the name of my boat?", 60)
    text = said(builder, found.turns)
    assert "My boat is called Skua.\n\nIt is blue." in text, "questions are whole"
    assert "A fine name for a boat." in text
    assert sum(one.tokens_kept for one in found.report[:2]) <= 60


def test_a_long_text_without_sentences_is_cut_between_characters(builder: PromptBuilder) -> None:
    text = "\u0e01\u0e32" * 40 + " boat of Skua " + "\u0e01\u0e32" * 40
    past = spoken(builder, (([("Boats", text)], "What is this?", " Boats."), *TALK[1:2]))
    found = TurnCompressor(builder).shorten(past, "Where is the boat of Skua?", 110)
    shown = said(builder, found.turns)
    assert "Skua" in shown
    assert "\ufffd" not in shown
    assert 0 < found.report[0].tokens_kept < found.report[0].tokens
