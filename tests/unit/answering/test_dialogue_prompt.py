"""The next turn of a session: the dialogue so far as it is, then new documents, then the question."""

from __future__ import annotations

from typing import Any

import pytest

from ragserve.answering.prompt import PromptBuilder, PromptDocument, load_tokenizer
from ragserve.errors import InvalidRequest, PromptTooLong
from tests.conftest import MODEL
from tests.unit.answering.test_prompt import LLAMA, NO_SYSTEM

NEW = [PromptDocument("", "New", "Text.")]
BRACKETS = (
    "{% if documents %}{% for d in documents %}[{{d['title']}}: {{d['text']}}]\n{% endfor %}{% endif %}"
    "{% for m in messages %}<{{m['role']}}>{{m['content']}}</>\n{% endfor %}<assistant>"
)
FORGETFUL = {
    "all but the last": "{{messages[-1]['content']}}",
    "answers": "{% for m in messages %}{% if m['role'] == 'user' %}{{m['content']}}\n{% endif %}{% endfor %}",
}
LAYOUTS = {
    "own documents": (
        "{tiny}",
        "<|eos|>",
        "<|doc|>New\nText.\n",
        "<|question|>Two?\n<|answer|>",
    ),
    "documents in text": (BRACKETS, "</>\n<user>", "[New: Text.]\n", "Two?</>\n<assistant>"),
    "messages": (
        LLAMA,
        "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nDocuments:\n\n",
        "### New\nText.\n\n",
        "Question: Two?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "no system role": (
        NO_SYSTEM,
        "<end_of_turn>\n<start_of_turn>user\nDocuments:\n\n",
        "### New\nText.\n\n",
        "Question: Two?<end_of_turn>\n<start_of_turn>model",
    ),
    "none": (None, "\n\n", "### New\nText.\n\n", "Question: Two?\n\nAnswer:"),
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(str(MODEL))


@pytest.mark.parametrize("name", LAYOUTS)
def test_new_documents_stand_between_the_answer_and_the_question(
    name: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    template, glue, document, question = LAYOUTS[name]
    if template != "{tiny}":
        monkeypatch.setattr(tokenizer, "chat_template", template)
    builder = PromptBuilder(tokenizer)
    first = builder.build("One?", [PromptDocument("", "Old", "Text.")], max_prompt_tokens=500)
    dialogue = [*first.input_ids, *builder.answer_ids((), " first")]
    prompt = builder.follow_up(dialogue, "Two?", NEW, max_prompt_tokens=500)
    assert prompt.input_ids[: len(dialogue)] == dialogue
    said = [tokenizer.decode(prompt.input_ids[max(s.start, len(dialogue)) : s.end]) for s in prompt.segments]
    assert said == [glue, document, question]
    span = prompt.spans[1]
    assert prompt.input_ids[span.start : span.end] == builder.document_ids("New", "Text."), "the cached ids"
    alone = builder.follow_up(dialogue, "Two?", [], max_prompt_tokens=500)
    added = tokenizer.decode(alone.input_ids[len(dialogue) :])
    assert (
        added == (glue + question).replace("Documents:\n\n", "").replace("Question: ", "") or name == "none"
    )
    assert [s.end for s in alone.spans] == [len(dialogue)]


def test_what_ended_an_answer_is_no_part_of_it(tokenizer: Any) -> None:
    builder = PromptBuilder(tokenizer)

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    said = " It was Alan Stevenson."
    assert builder.answer_ids([*ids(said), 2], said) == ids(said), "the end-of-text token"
    assert builder.answer_ids(ids(said), said) == ids(said), "cut by max_new_tokens"
    assert builder.answer_ids(ids(said + "\n\nQuestion:"), said) == ids(said), "a stop text"
    assert builder.answer_ids([2], "") == []
    odd = [*ids(" It was"), *ids(" Alan"), *ids(" Ste"), *ids("venson.")]
    assert builder.answer_ids([*odd, 2], said) == odd, "as generated, however the tokenizer would cut it"
    assert builder.answer_ids([5, 6, 7], said) == ids(said), "of another text"


def test_documents_that_do_not_fit_leave_the_question(tokenizer: Any) -> None:
    builder = PromptBuilder(tokenizer)
    dialogue = builder.build("One?", NEW, max_prompt_tokens=500).input_ids
    alone = builder.follow_up(dialogue, "Two?", [], max_prompt_tokens=500)
    room = len(alone.input_ids)
    prompt = builder.follow_up(dialogue, "Two?", NEW, max_prompt_tokens=room)
    assert prompt.input_ids == alone.input_ids
    assert (prompt.documents_kept, prompt.tokens_kept) == (0, 0)
    assert prompt.tokens_retrieved == len(builder.document_ids("New", "Text."))
    with pytest.raises(PromptTooLong):
        builder.follow_up(dialogue, "Two?", NEW, max_prompt_tokens=room - 1)


@pytest.mark.parametrize("drops", FORGETFUL)
def test_a_template_that_drops_earlier_answers_has_no_sessions(
    drops: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", FORGETFUL[drops])
    with pytest.raises(InvalidRequest, match="drops earlier answers"):
        PromptBuilder(tokenizer).follow_up([1, 2], "Two?", [], max_prompt_tokens=500)
