"""Rule `sentences` on the real engine: it chooses by its definition, and restores answers that reuse alone
gets wrong.
"""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from ragserve.answering.prompt import PromptBuilder
from tests.conftest import EXHAUSTIVE, MODEL
from tests.integration.context_client import NEW, composed, report, result
from tests.integration.prompts import prompt, rows
from tests.integration.reference import Reference, chosen_sentences

SHARE = 0.1
NAMESPACE = "sentences"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


def test_the_engine_chooses_what_transformers_and_the_definition_say(
    quick_server: Any, quick_reference: Reference, builder: PromptBuilder, tokenizer: Any
) -> None:
    """The chosen tokens show in the answer: bit for bit that of a request that names them."""
    ids, spans = prompt(builder, rows("crossdoc")[0], 4)
    first, end = spans[0][1], spans[-1][1]
    wanted = chosen_sentences(quick_reference, tokenizer, ids, spans, SHARE)
    by_rule = composed(
        quick_server.client, ids, spans, "concat", NAMESPACE, recompute="sentences", share=SHARE
    )
    by_name = composed(quick_server.client, ids, spans, "concat", NAMESPACE, recompute=wanted)
    assert result(by_rule) == result(by_name)
    fewer = composed(quick_server.client, ids, spans, "concat", NAMESPACE, recompute=wanted[1:])
    assert result(by_rule) != result(fewer), "the test must tell them apart"
    said = report(by_rule)
    assert said["recomputed"] == report(by_name)["recomputed"] == len(wanted) == round(SHARE * (end - first))
    assert said["recompute_ms"] > said["ask_ms"] > 0


def test_a_tenth_recomputed_answers_what_reuse_alone_gets_wrong(
    server: Any, builder: PromptBuilder, tokenizer: Any
) -> None:
    right: dict[str, int] = {"concat": 0, "sentences": 0}
    questions = rows("crossdoc")[slice(0, 8) if EXHAUSTIVE else slice(3, 4)]  # reuse gets those before right
    for row in questions:
        ids, spans = prompt(builder, row, len(row["docs"]))
        for name, options in (("concat", {}), ("sentences", {"recompute": "sentences", "share": SHARE})):
            answer = result(
                composed(server.client, ids, spans, "concat", NAMESPACE, n_new=2 * NEW, **options)
            )
            text = tokenizer.decode(answer.ids).split("<|eos|>")[0].strip()
            right[name] += text in row["answers"]
    assert right["sentences"] == len(questions) > right["concat"]


def test_questions_of_one_step_are_asked_together_and_answered_as_alone(
    quick_server: Any, builder: PromptBuilder
) -> None:
    from concurrent.futures import ThreadPoolExecutor

    prompts = [prompt(builder, row, n) for row, n in zip(rows("crossdoc"), (4, 3, 1, 2, 4), strict=False)]
    options: list[dict[str, Any]] = [
        {"recompute": "sentences"},
        {"recompute": "sentences", "share": 1.0},
        {"recompute": "sentences"},
        {},
        {"recompute": "anchors", "share": 0.2},
    ]

    def ask(i: int) -> tuple[list[int], int]:
        ids, spans = prompts[i]
        answer = composed(quick_server.client, ids, spans, "concat", NAMESPACE, **options[i])
        return result(answer).ids, report(answer)["recomputed"]

    alone = [ask(i) for i in range(5)]
    _, spans = prompts[4]
    assert alone[4][1] == round(0.2 * (spans[-1][1] - spans[0][1]))
    with ThreadPoolExecutor(5) as pool:
        assert list(pool.map(ask, range(5))) == alone
