"""Attention over earlier turns: parts are where their KV lies, what the engine finds decides with the words,
and words decide alone where it finds nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from ragserve.answering.prompt import PromptBuilder
from ragserve.answering.sessions.past_turns import PastTurn, ids_of
from ragserve.answering.sessions.turn_attention import TurnAttention
from ragserve.answering.sessions.turn_compression import TurnCompressor
from ragserve.engine.base import EngineInfo
from ragserve.engine.document_cache import ControlledCache
from ragserve.errors import EngineError
from tests.conftest import MODEL
from tests.unit.answering.sessions.test_turn_compression import BELL, SOUP, TALK, TOWER, said, spoken

KEY = "session:n:s"
QUESTION = "Where does somebody sleep?"  # a word of one sentence
LAMP = "The lamp was lit in 1844."


class Engine(ControlledCache):
    """Attends to the sentences with certain words, of the parts it holds."""

    def __init__(self, builder: PromptBuilder) -> None:
        self.info = EngineInfo("local", str(MODEL), str(MODEL), "0", "cpu", "", 8192, 8192, ("full",))
        self.words, self.lacks, self.fails = "1844", "", False
        self.asked: list[dict[str, Any]] = []
        self._builder = builder

    async def ready(self) -> bool:
        return True

    async def warm(self, request: Any) -> None:
        """Nothing is computed."""

    async def control(self, operation: str, **arguments: Any) -> dict[str, Any]:
        if self.fails:
            raise EngineError("no memory")
        assert operation == "attend"
        self.asked.append(arguments)
        return {"attention": [self._shares(arguments["prompts"], part) for part in arguments["parts"]]}

    def texts(self, prompts: Sequence[Sequence[int]], part: Sequence[Any]) -> list[str]:
        """The sentences of a part."""
        number, start, end, begins = part
        ids = prompts[number][start:end]
        bounds = zip(begins, [*begins[1:], end - start], strict=True)
        return [str(self._builder.tokenizer.decode(ids[a:b])).strip() for a, b in bounds]

    def _shares(self, prompts: Sequence[Sequence[int]], part: Sequence[Any]) -> list[float] | None:
        texts = self.texts(prompts, part)
        if self.lacks and any(self.lacks in text for text in texts):
            return None
        return [float(self.words in text) for text in texts]


@pytest.fixture(scope="module")
def builder() -> PromptBuilder:
    return PromptBuilder.load(str(MODEL))


@pytest.fixture
def engine(builder: PromptBuilder) -> Engine:
    return Engine(builder)


def prompts_of(past: Sequence[PastTurn]) -> list[tuple[PastTurn, ...]]:
    """Those of a dialogue that was never compressed."""
    return [tuple(past[:number]) for number in range(1, len(past) + 1)]


def shortened(
    engine: Any, builder: PromptBuilder, past: list[PastTurn], prompts: Any = None, budget: int = 40
) -> Any:
    compressor = TurnCompressor(builder, TurnAttention(engine, builder))
    asked = prompts_of(past) if prompts is None else prompts
    candidates = asyncio.run(compressor.attended(past, QUESTION, (), KEY, asked))
    return compressor.shorten(past, QUESTION, budget, candidates=candidates)


def test_what_the_question_attends_to_stays_though_it_shares_no_word(
    builder: PromptBuilder, engine: Engine
) -> None:
    past = spoken(builder, TALK)
    assert LAMP not in said(builder, TurnCompressor(builder).shorten(past, QUESTION, 40).turns)
    found = shortened(engine, builder, past)
    assert LAMP in said(builder, found.turns)
    first, second, last = found.report
    assert (first.rule, second.rule, last.rule) == ("attention", "attention", None)
    assert first.tokens_by_signal["attention"] > 0
    assert sum(first.tokens_by_signal.values()) + sum(second.tokens_by_signal.values()) <= 40


def test_parts_are_whole_sentences_at_their_places_in_the_prompts(
    builder: PromptBuilder, engine: Engine
) -> None:
    past = spoken(builder, TALK)
    shortened(engine, builder, past)
    [asked] = engine.asked
    assert asked["key"] == KEY
    assert asked["prompts"] == [ids_of(past)], "one prompt holds them all"
    tail = builder.follow_up(ids_of(past), QUESTION, (), max_prompt_tokens=9999).input_ids
    assert [*ids_of(past), *asked["question"]] == tail
    texts = [engine.texts(asked["prompts"], part) for part in asked["parts"]]
    bodies = [" ".join(own[1:]) for own in texts]
    assert bodies == [TOWER, SOUP, BELL, TALK[0][2].strip(), TALK[1][2].strip()]
    assert "Skerryvore" in texts[0][0]
    assert "What is Skerryvore?" in texts[3][0]


def test_turns_are_looked_for_in_the_prompt_that_went_on_from_them(
    builder: PromptBuilder, engine: Engine
) -> None:
    """The second turn was compressed: its prompt has none of the first, and begins with the second."""
    past = spoken(builder, (*TALK, ([], "Thanks?", " Fine.")))
    short = TurnCompressor(builder).shorten(past[:2], "Is there bread?", 30).turns
    assert len(short) == 2
    prompts = [(past[0],), (past[0], past[1]), (*short, past[2]), (*short, past[2], past[3])]
    shortened(engine, builder, past, prompts)
    [asked] = engine.asked
    assert asked["prompts"] == [ids_of(prompts[1]), ids_of(prompts[3])]
    texts = {
        part[0]: [
            text
            for own in asked["parts"]
            if own[0] == part[0]
            for text in engine.texts(asked["prompts"], own)
        ]
        for part in asked["parts"]
    }
    assert "Its builder was Alan Stevenson." in texts[0]
    assert "Robert Stevenson built it." in texts[1], "the second turn is whole in the third one's prompt"
    assert "Its builder was Alan Stevenson." not in texts[1]


def test_a_part_without_kv_is_chosen_by_words(builder: PromptBuilder, engine: Engine) -> None:
    past = spoken(builder, TALK)
    engine.lacks = "1844"
    found = shortened(engine, builder, past)
    assert LAMP not in said(builder, found.turns)
    assert [one.rule for one in found.report] == ["mixed", "attention", None]
    assert "Seals sleep on the rocks." in said(builder, found.turns)


def test_of_a_dialogue_that_is_too_long_the_oldest_prompts_are_left_out(
    builder: PromptBuilder, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    past = spoken(builder, (*TALK, ([], "Thanks?", " Fine.")))
    short = TurnCompressor(builder).shorten(past[:2], "Is there bread?", 30).turns
    prompts = [(past[0],), (past[0], past[1]), (*short, past[2]), (*short, past[2], past[3])]
    monkeypatch.setattr("ragserve.answering.sessions.turn_attention._MAX_TOKENS", len(ids_of(prompts[3])) + 1)
    found = shortened(engine, builder, past, prompts)
    assert [len(asked["prompts"]) for asked in engine.asked] == [1]
    assert [one.rule for one in found.report] == ["words", "attention", "attention", None]


@pytest.mark.parametrize("why", ["fails", "exact only", "elsewhere"])
def test_without_an_engine_that_can_tell_words_decide(
    builder: PromptBuilder, engine: Engine, why: str
) -> None:
    past = spoken(builder, TALK)
    by_words = TurnCompressor(builder).shorten(past, QUESTION, 40)
    engine.fails = why == "fails"
    if why == "exact only":
        engine.info = EngineInfo(
            "local", str(MODEL), str(MODEL), "0", "cpu", "", 8192, 8192, ("full",), only_exact="a model"
        )
    found = shortened(object() if why == "elsewhere" else engine, builder, past)
    assert ids_of(found.turns) == ids_of(by_words.turns)
    assert found.report == by_words.report
    assert {one.rule for one in found.report[:-1]} == {"words"}
