"""Selection of whole sentences, against the same written out one sentence at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.analysis.document_analysis import Analysis
from sglang_ext.analysis.texts import Texts
from sglang_ext.context.selection import sentences
from sglang_ext.context.selection.base import ModelShape
from sglang_ext.context.selection.blocks import Blocks
from sglang_ext.context.selection.choose_sentences import choose_sentences
from sglang_ext.context.selection.sentences import Sentences
from sglang_ext.context.selection.signals import Evidence
from sglang_ext.context.selection.strategies import partial_selection
from sglang_ext.wire.protocol import ContextPlan
from sglang_ext.wire.request_options import MIN_TOKENS, SamKvExperiment, SamKvOptions
from tests.analyses import local_queries, mean_keys
from tests.unit.context.selection.signals.evidence import evidence_of
from tests.unit.context.selection.test_samkv import (
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    ROTATION,
    SYSTEM,
    analysis_of,
    plan_of,
    turned,
)


def words_of(texts: Sequence[Sequence[int]], question: Sequence[int]) -> list[float]:
    """The score of each sentence's words, from sets of tokens."""
    terms = [{t} for t in set(question)]
    found = [set(text) for text in texts]
    held = [sum(term <= terms_of for terms_of in found) for term in terms]
    return [
        sum(
            math.log(len(texts) / count)
            for term, count in zip(terms, held, strict=True)
            if count and term <= terms_of
        )
        for terms_of in found
    ]


@given(
    st.lists(st.integers(1, 70), min_size=1, max_size=5),
    st.integers(0, 10_000),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.floats(0.01, 1.0),
    st.booleans(),
    st.sampled_from(["keys", "attention"]),
    st.sampled_from([(1.0, 0.0), (0.5, 0.5), (0.0, 1.0)]),
)
def test_the_best_sentences_are_kept(
    sizes: list[int],
    seed: int,
    weight: float,
    keep: float,
    bias: bool,
    scoring: Literal["keys", "attention"],
    powers: tuple[float, float],
) -> None:
    generator = torch.Generator().manual_seed(seed)
    plan = plan_of(sizes)
    blocks = [4 if n < 40 else 8 for n in sizes]
    analyses = [analysis_of(n, block, generator) for n, block in zip(sizes, blocks, strict=True)]
    query = torch.randn(LAYERS, HEADS, DIM, generator=generator)
    total = sum(sizes)
    ids, question = (
        torch.randint(0, 40, (total,), generator=generator),
        torch.randint(0, 40, (6,), generator=generator),
    )
    options = SamKvOptions(
        personalised=bias,
        keep=keep,
        experimental=SamKvExperiment(
            scoring=scoring,
            lexical_weight=weight,
            feedback_weight=0.0,
            title_weight=0.0,
            attention_power=powers[0],
            length_penalty=powers[1],
        ),
    )
    tables = Blocks.build(plan.spans[1:], blocks, initial=0, local=0)
    found = choose_sentences(
        Evidence(
            options,
            tables,
            analyses,
            Sentences.of(analyses),
            ids,
            question,
            Texts.drawn(40),
            query,
            plan.question_start,
            ROTATION,
        )
    ).kept
    budget = max(1, round(keep * total))
    assert len(found) == budget
    assert found.tolist() == sorted(set(found.tolist()))
    # One sentence after the other: how much a head would look at the mean of each block that it touches.
    texts: list[list[int]] = []  # token numbers of each sentence
    queries = [query[n].double() for n in range(LAYERS)]
    place = 0
    logits: list[list[list[float]]] = [[] for _ in range(LAYERS)]  # by layer, block, head
    block_of: list[int] = []
    by_key: list[list[list[float]]] = [[], []]  # by retrieval head, token, head of its group
    for analysis, span, block in zip(analyses, plan.spans[1:], blocks, strict=True):
        for t in range(analysis.n_tokens):
            if t == 0 or analysis.begins[t]:
                texts.append([])
            texts[-1].append(place + t)
            block_of.append(len(logits[0]) + t // block)
        keys = mean_keys(analysis).double()
        for n in range(LAYERS):
            asked = queries[n] if not bias else personal(queries, analyses, plan, n, span.start)
            for b in range(analysis.blocks):
                key = turned(keys[n, b], span.start)
                length = min(block, analysis.n_tokens - b * block)
                own = [
                    float(asked[h] @ key[h * KV_HEADS // HEADS]) / math.sqrt(DIM) + math.log(length)
                    for h in range(HEADS)
                ]
                logits[n].append(own)
            for i, (layer, head) in enumerate(analysis.heads.tolist()):
                if layer == n:
                    for t in range(analysis.n_tokens):
                        key = turned(
                            (analysis.token_k[t, i].double() * analysis.token_k_scale[t, i].double())[None],
                            span.start,
                        )[0]
                        group = [h for h in range(HEADS) if h * KV_HEADS // HEADS == head]
                        by_key[i].append(
                            [float(asked[h] @ key) / math.sqrt(DIM) if t >= 3 else -1e9 for h in group]
                        )
        place += analysis.n_tokens
    if scoring == "keys":
        shares = [torch.tensor(rows, dtype=torch.float64).softmax(0).amax(1) for rows in by_key]
        inside = torch.cat([torch.arange(a.n_tokens) >= 3 for a in analyses])
        share = (torch.stack(shares).sum(0) * inside).tolist()
    else:
        late = [
            torch.tensor(logits[n], dtype=torch.float64).softmax(0).amax(1)
            for n in range(LAYERS // 2, LAYERS)
        ]
        share = torch.stack(late).sum(0)[block_of].tolist()
    attention = [max(share[t] for t in text) for text in texts]
    held = words_of([[int(ids[t]) for t in text] for text in texts], question.tolist())
    score = [
        (weight * w / max(max(held), 1e-9) + (1 - weight) * (a / max(*attention, 1e-9)) ** powers[0])
        / max(8, len(text)) ** powers[1]
        for w, a, text in zip(held, attention, texts, strict=True)
    ]
    kept = set((found - SYSTEM).tolist())
    taken = [len(kept & set(text)) for text in texts]
    partly = [i for i, text in enumerate(texts) if 0 < taken[i] < len(text)]
    assert len(partly) <= 1
    least = min(score[i] for i in range(len(texts)) if taken[i])
    assert all(score[i] <= least + 1e-5 for i in range(len(texts)) if taken[i] < len(texts[i]))


def personal(
    queries: list[torch.Tensor], analyses: Sequence[Analysis], plan: ContextPlan, n: int, start: int
) -> torch.Tensor:
    """Equation 1 for the document that begins at ``start``."""
    q, total, others = queries[n], torch.zeros_like(queries[n]), 0
    for analysis, span in zip(analyses, plan.spans[1:], strict=True):
        if span.start != start:
            local = turned(local_queries(analysis)[n].double(), span.start)
            total += (((q * local).sum() / (q.norm() * local.norm())).abs()) * local
            others += 1
    return q + total / others if others else q


def sentences_of(*documents: list[int]) -> Sentences:
    """Sentences of so many tokens each."""
    begins = [torch.zeros(sum(lengths), dtype=torch.uint8) for lengths in documents]
    for own, lengths in zip(begins, documents, strict=True):
        own[list(accumulate(lengths[:-1]))] = 1  # a document's first token begins one, marked or not
    return Sentences.of([Analysis.of_sentences(own, 8) for own in begins])


@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=4),
    st.data(),
)
def test_sentences_know_their_places(documents: list[list[int]], data: st.DataObject) -> None:
    found = sentences_of(*documents)
    lengths = [length for document in documents for length in document]
    assert len(found) == len(lengths)
    assert found.length.tolist() == lengths
    assert found.tokens == sum(lengths)
    assert found.counts.tolist() == [len(document) for document in documents]
    assert found.document.tolist() == [n for n, document in enumerate(documents) for _ in document]
    assert found.number.tolist() == [n for n, length in enumerate(lengths) for _ in range(length)]
    assert found.begin[found.opening].tolist() == found.first.tolist()
    # as many tokens as there is room for, sentence after sentence, the better ones first
    score = data.draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    budget = data.draw(st.integers(1, found.tokens + 3))
    ranked = sorted(range(found.tokens), key=lambda token: (-score[found.number[token]], token))
    taken = sentences.take_best(torch.tensor(score).float(), found, budget)
    assert taken.tolist() == sorted(ranked[:budget])
    token = torch.tensor(
        data.draw(st.lists(st.floats(0, 1, width=32), min_size=found.tokens, max_size=found.tokens))
    )
    assert found.best(token).tolist() == [float(token[found.number == n].max()) for n in range(len(found))]


def test_the_last_sentence_is_cut_and_equal_ones_stand_in_order() -> None:
    given = sentences_of([2, 3], [2, 1])
    assert sentences.take_best(torch.tensor([1.0, 2.0, 0.5, 0.5]), given, 4).tolist() == [0, 2, 3, 4]
    assert sentences.take_best(torch.tensor([0.0, 2.0, 0.5, 0.5]), given, 6).tolist() == [2, 3, 4, 5, 6, 7]
    assert sentences.take_best(torch.zeros(4), given, 99).tolist() == list(range(8))


def test_a_document_s_opening_counts_with_the_best_sentence_of_it_and_of_the_next() -> None:
    given = sentences_of([1, 2], [1], [2, 1])
    score = torch.tensor([0.1, 0.8, 0.3, 0.9, 0.2])
    assert sentences.lift_titles(score, given, 0.5).tolist() == pytest.approx([0.4, 0.8, 0.45, 0.9, 0.2])
    assert torch.equal(sentences.lift_titles(score, given, 0.0), score)


@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=9),
    st.floats(0, 1),
    st.integers(0, 2**31),
)
def test_a_document_s_opening_is_raised_to_the_bit_and_the_given_scores_stay(
    documents: list[list[int]], factor: float, seed: int
) -> None:
    made = sentences_of(*documents)
    score = torch.rand(len(made), generator=torch.Generator().manual_seed(seed))
    best = [part.max() for part in score.split([len(own) for own in documents])]
    expected, before = score.clone(), score.clone()
    for number, opening in enumerate(made.opening.tolist()):
        top = torch.stack(best[number : number + 2]).max()
        expected[opening] = torch.maximum(score[opening], factor * top)
    assert torch.equal(sentences.lift_titles(score, made, factor), expected)
    assert torch.equal(score, before)


def test_a_sentence_pays_for_its_length_and_one_of_few_tokens_counts_as_one_of_eight() -> None:
    given = sentences_of([2, 8, 32])
    assert sentences.penalize_length(torch.tensor([1.0, 1.0, 2.0]), given, 0.5).tolist() == pytest.approx(
        [8**-0.5, 8**-0.5, 8**-0.5]
    )
    assert sentences.penalize_length(torch.tensor([1.0, 2.0, 3.0]), given, 0.0).tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("options", "compact"),
    [({}, True), ({"kept_positions": "original"}, False), ({"selection": "shared"}, False)],
)
def test_chosen_sentences_move_together_unless_told_otherwise(options: dict[str, str], compact: bool) -> None:
    plan = plan_of([30, 40])
    made = partial_selection(
        ContextPlan(plan.operation, plan.namespace, "samkv", plan.spans, options), ModelShape(LAYERS)
    )
    assert made.compact == compact


@pytest.mark.parametrize(
    ("tokens", "options", "kept"),
    [
        (2000, {}, MIN_TOKENS),
        (8000, {}, 1200),
        (2000, {"keep": 0.15}, 300),
        (2000, {"keep": 0.15, "min_tokens": 400}, 400),
        (2000, {"min_tokens": 0}, 300),
        (MIN_TOKENS + 1, {}, MIN_TOKENS),
    ],
)
def test_of_short_contexts_so_many_tokens_are_kept_at_least(
    tokens: int, options: dict[str, Any], kept: int
) -> None:
    plan = plan_of([tokens - 99, 99])
    made = partial_selection(
        ContextPlan(plan.operation, plan.namespace, "samkv", plan.spans, options), ModelShape(LAYERS)
    )
    assert made.needs_query
    assert made.slots == SYSTEM + kept


@pytest.mark.parametrize(
    ("tokens", "options"), [(MIN_TOKENS, {}), (300, {"min_tokens": 300, "keep": 0.1}), (200, {"keep": 1.0})]
)
def test_where_all_is_kept_nothing_is_asked(tokens: int, options: dict[str, Any]) -> None:
    plan = plan_of([tokens - 99, 99])
    made = partial_selection(
        ContextPlan(plan.operation, plan.namespace, "samkv", plan.spans, options | {"recompute": "all"}),
        ModelShape(LAYERS),
    )
    assert not made.selects
    assert not made.needs_analysis
    assert made.settle().kept.tolist() == list(range(SYSTEM + tokens))


def test_words_alone_need_no_query() -> None:
    plan = plan_of([30, 40])
    options = {"experimental": {"lexical_weight": 1}, "keep": 0.2}
    plan = ContextPlan(plan.operation, plan.namespace, "samkv", plan.spans, options)
    made = partial_selection(plan, ModelShape(LAYERS))
    assert not made.needs_query
    assert made.selects
    assert made.needs_analysis
    assert made.slots == SYSTEM + 14
    assert made.kept.tolist() == list(range(SYSTEM))


def test_the_fewest_best_sentences_that_hold_a_share_of_the_weight() -> None:
    given = sentences_of([10, 20, 10, 5])
    score = torch.tensor([0.1, 0.2, 1.0, 0.0])
    # weights: tokens times the score's square: 0.1, 0.8, 10, 0 of 10.9
    assert sentences.tokens_of_weight(score, given, 0.9) == 10
    assert sentences.tokens_of_weight(score, given, 0.95) == 30
    assert sentences.tokens_of_weight(score, given, 1.0) == 40
    assert sentences.tokens_of_weight(torch.zeros(4), given, 0.5) == 10


@pytest.mark.parametrize(
    ("question", "options", "kept", "reason"),
    [
        ("klmno", {"top_p": 0.9}, 10, "they hold 0.9 of the weight"),
        ("klmno zzzzz", {"top_p": 0.9, "keep_least": 0.5}, 25, "the floor: fewer hold 0.9 of the weight"),
        ("klmno", {"top_p": 0.9, "min_tokens": 12}, 12, "the floor: fewer hold 0.9 of the weight"),
        ("abcde fghij klmno pqrst", {"top_p": 1.0, "keep": 0.4}, 20, "the ceiling: 80% would hold 1"),
        ("klmno", {"keep": 0.3}, 15, "option keep"),
        ("klmno", {"keep": 0.3, "min_tokens": 40}, 40, "option min_tokens"),
    ],
)
def test_the_kept_share_follows_from_the_scores(
    question: str, options: dict[str, Any], kept: int, reason: str
) -> None:
    texts = [["abcde... "], ["fghij... ", "klmno... "], ["pqrst... "], ["uvwxy... "]]
    experiment = {"lexical_weight": 1.0, "title_weight": 0.0}
    made = evidence_of([[t + " " for t in d] for d in texts], question, experimental=experiment, **options)
    chosen = choose_sentences(made)
    assert len(chosen.kept) == kept
    assert chosen.reason.startswith(reason)
    if "ceiling" in reason:
        return  # equal sentences in the order of the text
    [at] = [i for i, t in enumerate("".join("".join(d) for d in texts).split()) if t == "klmno..."]
    assert set(range(10 * at, 10 * at + 10)) <= set(chosen.kept.tolist())
