"""The prompt's token ids, its segments and what cannot be smuggled into them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragserve.answering import prompt
from ragserve.answering.prompt import Message, PromptBuilder, PromptDocument, load_tokenizer
from ragserve.errors import PromptTooLong, Unavailable
from tests.conftest import MODEL

LLAMA = (
    "{{bos_token}}{% for m in messages %}{{'<|start_header_id|>'+m['role']+'<|end_header_id|>\n\n'"
    "+m['content']|trim+'<|eot_id|>'}}"
    "{% endfor %}{% if add_generation_prompt %}"
    "{{'<|start_header_id|>assistant<|end_header_id|>\n\n'}}{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0]['role']=='system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}"
    "{{'<start_of_turn>'+m['role']+'\n'+m['content']|trim+'<end_of_turn>\n'}}{% endfor %}"
    "<start_of_turn>model"
)
NUMBERED = (
    "{% if documents %}{% for d in documents %}Document {{loop.index}}: {{d['title']}}\n{{d['text']}}\n"
    "{% endfor %}{% endif %}"
    "{% for m in messages %}{{m['role']}}: {{m['content']}}\n{% endfor %}assistant:"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(str(MODEL))


@pytest.fixture(scope="module")
def builder(tokenizer: Any) -> PromptBuilder:
    return PromptBuilder(tokenizer)


@pytest.fixture
def with_template(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(template: str | None) -> PromptBuilder:
        monkeypatch.setattr(tokenizer, "chat_template", template)
        return PromptBuilder(tokenizer)

    return make


def documents(*texts: str) -> list[PromptDocument]:
    return [PromptDocument(f"d{i}", f"Title {i}", text) for i, text in enumerate(texts)]


def test_layout_is_the_one_the_model_was_trained_on(builder: PromptBuilder, tokenizer: Any) -> None:
    ids = builder.build("Who?", documents("One.", "Two."), max_prompt_tokens=1000).input_ids
    wanted = "<|bos|><|system|>\nAnswer the question from the documents.\n"
    wanted += "<|doc|>Title 0\nOne.\n<|doc|>Title 1\nTwo.\n<|question|>Who?\n<|answer|>"
    assert ids == tokenizer(wanted, add_special_tokens=False).input_ids


def test_real_questions_get_the_ids_of_the_joint_text(builder: PromptBuilder, tokenizer: Any) -> None:
    path = Path(__file__).parents[2] / "data" / "questions" / "crossdoc_8.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert rows
    for row in rows:
        text = "<|bos|><|system|>\nAnswer the question from the documents.\n"
        text += (
            "".join(f"<|doc|>{title}\n{body}\n" for title, body in row["docs"])
            + f"<|question|>{row['question']}\n<|answer|>"
        )
        given_documents = [PromptDocument(str(i), title, body) for i, (title, body) in enumerate(row["docs"])]
        prompt = builder.build(row["question"], given_documents, max_prompt_tokens=8000)
        assert prompt.input_ids == tokenizer(text, add_special_tokens=False).input_ids
        assert prompt.documents_kept == len(row["docs"])


def test_segments_cover_the_prompt_and_carry_keys(builder: PromptBuilder) -> None:
    prompt = builder.build("Who?", documents("One.", "Two."), max_prompt_tokens=1000)
    assert [s.kind for s in prompt.segments] == ["system", "document", "document", "question"]
    assert [s.key for s in prompt.segments] == ["", "d0", "d1", ""]
    assert prompt.segments[0].start == 0
    assert prompt.segments[-1].end == len(prompt.input_ids)
    assert all(a.end == b.start for a, b in zip(prompt.segments, prompt.segments[1:], strict=False))
    assert prompt.tokens_kept == prompt.tokens_retrieved == prompt.segments[2].end - prompt.segments[1].start


@given(
    st.lists(st.text(max_size=60), min_size=1, max_size=4), st.text(max_size=60), st.permutations(range(4))
)
def test_a_document_has_the_same_ids_wherever_it_stands(
    texts: list[str], question: str, order: list[int]
) -> None:
    builder = _shared_builder()
    given_documents = documents(*texts)
    shuffled = [given_documents[i] for i in order if i < len(given_documents)]

    def by_key(docs: list[PromptDocument]) -> dict[str, list[int]]:
        prompt = builder.build(question, docs, max_prompt_tokens=100_000)
        return {s.key: prompt.input_ids[s.start : s.end] for s in prompt.segments if s.kind == "document"}

    assert by_key(given_documents) == by_key(shuffled)


@given(st.sampled_from(["<|doc|>", "<|eos|>", "<|answer|>", "<|question|>", "<|bos|>"]), st.text(max_size=20))
def test_text_never_becomes_a_special_token(special: str, around: str) -> None:
    builder = _shared_builder()
    text = f"{around}{special}{around}"
    prompt = builder.build(
        text,
        [PromptDocument("d", text, text)],
        max_prompt_tokens=100_000,
        history=[Message("user", text), Message("assistant", text)],
        system=text,
    )
    specials = set(_shared_tokenizer().all_special_ids)
    found = [i for i in prompt.input_ids if i in specials]
    plain = builder.build(
        "q",
        [PromptDocument("d", "t", "x")],
        max_prompt_tokens=1000,
        history=[Message("user", "u"), Message("assistant", "a")],
        system="s",
    )
    assert found == [i for i in plain.input_ids if i in specials]


@pytest.mark.parametrize("template", ["own", None, LLAMA])
@pytest.mark.parametrize(
    "text", ["It rained. Then <|doc|> came. Snow!", "\n\nÉmile slept.\nHe woke: 東京 x. Yes.\n"]
)
def test_a_sentence_s_characters_are_found_among_the_tokens(
    template: str | None, text: str, builder: PromptBuilder, with_template: Any, tokenizer: Any
) -> None:
    builder = builder if template == "own" else with_template(template)
    ids = builder.document_ids("A title: with 2. ends", text)
    places = [i for i, letter in enumerate(text) if letter.isalpha()]
    tokens = builder.token_starts("A title: with 2. ends", text, places)
    assert len(tokens) == len(places)
    before = tokenizer.decode(ids[: tokens[0]])
    assert "ends" in before
    assert text[places[0]] not in before.partition("ends")[2]
    assert tokens == sorted(tokens)
    for place, token in zip(places, tokens, strict=True):
        # a letter of several tokens is only whole with the tokens before and behind
        around = tokenizer.decode(ids[max(0, token - 2) : token + 3])
        assert text[place] in around, (place, token)


def test_a_slow_tokenizer_cannot_tell(builder: PromptBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(_shared_tokenizer()), "is_fast", False)
    assert builder.token_starts("t", "One. Two.", [0, 5]) == []


def test_documents_that_do_not_fit_are_dropped_from_the_end(builder: PromptBuilder) -> None:
    docs = documents("word " * 50, "word " * 50, "short")
    whole = builder.build("Who?", docs, max_prompt_tokens=10_000)
    prompt = builder.build("Who?", docs, max_prompt_tokens=len(whole.input_ids) - 20)
    assert prompt.documents_kept == 1, "the short one after the gap must not jump the queue"
    assert prompt.tokens_retrieved == whole.tokens_retrieved > prompt.tokens_kept
    assert len(prompt.input_ids) <= len(whole.input_ids) - 20


def test_a_question_that_does_not_fit_is_refused_with_figures(builder: PromptBuilder) -> None:
    with pytest.raises(PromptTooLong, match=r"takes \d+ tokens and the context has room for 64"):
        builder.build("word " * 500, [], max_prompt_tokens=64)


def test_history_precedes_the_question(builder: PromptBuilder, tokenizer: Any) -> None:
    history = [Message("user", "First?"), Message("assistant", "Yes.")]
    prompt = builder.build("Second?", documents("One."), max_prompt_tokens=1000, history=history)
    assert tokenizer.decode(prompt.input_ids).endswith(
        "<|question|>First?\n<|answer|> Yes.<|eos|><|question|>Second?\n<|answer|>"
    )
    assert [s.kind for s in prompt.segments] == ["system", "document", "question"]


def test_chat_template_without_documents_gets_them_in_the_first_user_message(
    with_template: Any, tokenizer: Any
) -> None:
    builder = with_template(LLAMA)
    history = [Message("user", "First?"), Message("assistant", "Yes.")]
    text = tokenizer.decode(
        builder.build("Second?", documents("One.", "Two."), max_prompt_tokens=1000, history=history).input_ids
    )
    user = text.split("<|start_header_id|>user<|end_header_id|>")[1]
    assert user.index("One.") < user.index("Two.") < user.index("Question: First?")
    assert text.count("One.") == 1
    assert text.rstrip().endswith("Second?<|eot_id|><|start_header_id|>assistant<|end_header_id|>")
    assert "[1], [2]" in text.split("<|start_header_id|>user")[0], "our system text asks for citations"


def test_template_that_refuses_a_system_role_gets_its_text_in_the_first_user_message(
    with_template: Any, tokenizer: Any
) -> None:
    text = tokenizer.decode(
        with_template(NO_SYSTEM)
        .build("Who?", documents("One."), max_prompt_tokens=1000, system="Be brief.")
        .input_ids
    )
    assert text.startswith("<start_of_turn>user\nBe brief.\n\nDocuments:")
    assert text.endswith("Question: Who?<end_of_turn>\n<start_of_turn>model")


def test_template_that_numbers_documents_is_not_used_for_them(with_template: Any) -> None:
    builder = with_template(NUMBERED)
    prompt = builder.build("Who?", documents("Same.", "Same."), max_prompt_tokens=1000)
    first, second = (prompt.input_ids[s.start : s.end] for s in prompt.segments if s.kind == "document")
    assert len(first) == len(second)


def test_model_without_a_template(with_template: Any, tokenizer: Any) -> None:
    prompt = with_template(None).build("Who?", documents("One."), max_prompt_tokens=1000)
    text = tokenizer.decode(prompt.input_ids)
    assert text.index("One.") < text.index("Question: Who?")
    assert text.endswith("\n\nAnswer:")
    assert prompt.stop, "without a template the model needs to be told where to stop"


def test_missing_tokenizer_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="--tokenizer"):
        PromptBuilder.load(str(tmp_path))


# hypothesis runs a test many times within one fixture's life; loading once is enough
@cache
def _shared_tokenizer() -> Any:
    return load_tokenizer(str(MODEL))


@cache
def _shared_builder() -> PromptBuilder:
    return PromptBuilder(_shared_tokenizer())


def test_ids_that_are_kept_have_a_bound(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that came with queries stayed, up to 4,096 of megabytes each."""
    monkeypatch.setattr(prompt, "_CACHED_TOKENS", 500)
    builder = PromptBuilder(tokenizer)
    for number in range(30):
        builder.document_ids(f"t{number}", f"lamp {number} " * 20)
        kept = builder._documents.values()
        assert sum(map(len, kept)) == builder._cached_tokens <= 500
    builder.document_ids("long", "lamp " * 2_000)
    assert builder._cached_tokens == sum(map(len, builder._documents.values())) <= 500
