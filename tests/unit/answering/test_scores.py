"""The retriever's scores of a prompt's passages: by token of their segments."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

from ragserve.answering.prompt import Prompt, PromptBuilder, PromptDocument, load_tokenizer
from ragserve.answering.results import RetrievedPassage
from ragserve.answering.scores import retrieval_scores
from sglang_ext.wire.protocol import ContextPlan, RetrievalScores
from tests.conftest import MODEL

TEXTS = ["It rained. Then snow came. It was cold.", "Nobody slept.", "A third one. It is long."]
SENTENCES = [[(0, 0.1), (11, 0.5), (27, 0.2)], [(0, 0.3)], [(0, 0.7), (13, 0.6)]]


@cache
def tokenizer() -> Any:
    return load_tokenizer(str(MODEL))


@cache
def builder() -> PromptBuilder:
    return PromptBuilder(tokenizer())


def passages(scores: list[float | None]) -> list[RetrievedPassage]:
    return [
        RetrievedPassage(index=i, title=f"T{i}", text=text, cosine=score)
        for i, (text, score) in enumerate(zip(TEXTS, scores, strict=True), 1)
    ]


def prompt(found: list[RetrievedPassage], limit: int = 1000) -> Prompt:
    given = [PromptDocument("", each.title, each.text) for each in found]
    return builder().build("Did it snow?", given, max_prompt_tokens=limit)


def test_scores_stand_where_their_sentences_begin() -> None:
    found = passages([0.9, 0.5, 0.1])
    made = prompt(found)
    scores = retrieval_scores(builder(), made, found, SENTENCES)
    assert scores is not None
    assert scores.documents == (0.9, 0.5, 0.1)
    for text, segment, own, pairs in zip(TEXTS, made.spans[1:], scores.sentences, SENTENCES, strict=True):
        ids = made.input_ids[segment.start : segment.end]
        assert [cosine for _, cosine in own] == [cosine for _, cosine in pairs]
        bounds = [token for token, _ in own] + [len(ids)]
        starts = [start for start, _ in pairs] + [len(text)]
        for (a, b), (c, d) in zip(pairwise(bounds), pairwise(starts), strict=True):
            written = tokenizer().decode(ids[a:b], skip_special_tokens=True)
            assert written.strip() == text[c:d].strip()
    plan = ContextPlan("compose", "n", "samkv", made.spans, {}, scores)
    assert ContextPlan.from_json(plan.to_json(), len(made.input_ids)).scores == scores


def test_dropped_and_cut_passages_and_those_without_scores() -> None:
    found = passages([0.9, None, 0.1])
    whole = prompt(found)
    short = prompt(found, len(whole.input_ids) - 3)
    assert short.documents_kept == 2
    scores = retrieval_scores(builder(), short, found, [SENTENCES[0], [], SENTENCES[2]])
    assert scores is not None
    assert scores.documents == (0.9, None)
    assert [len(own) for own in scores.sentences] == [3, 0]
    found[0] = found[0].model_copy(update={"text": TEXTS[0][:20]})
    cut = retrieval_scores(builder(), prompt(found), found, SENTENCES)
    assert cut is not None
    assert [cosine for _, cosine in cut.sentences[0]] == [0.1, 0.5]


def test_sentences_in_one_token_count_by_the_best() -> None:
    found = passages([0.9, 0.5, 0.1])
    scores = retrieval_scores(builder(), prompt(found), found, [[(0, 0.1), (1, 0.4)], [], []])
    assert scores is not None
    assert [cosine for _, cosine in scores.sentences[0]] in ([0.4], [0.1, 0.4])


def test_what_a_lexical_search_found_has_no_cosines() -> None:
    found = passages([None, None, None])
    assert retrieval_scores(builder(), prompt(found), found, [[], [], []]) is None
    some = retrieval_scores(builder(), prompt(found), found, [[], SENTENCES[1], []])
    assert some is not None
    assert some.documents == (None, None, None)
    assert [len(own) for own in some.sentences] == [0, 1, 0]
    assert RetrievalScores((), ()).to_lists() == {"documents": [], "sentences": []}
