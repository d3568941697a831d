"""Judge one answer: its passages, its citations and its words, by whatever labels the question has."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ragserve.answering.results import Answer, Passage
from ragserve.eval.ir_metrics import ndcg, recall, reciprocal_rank
from ragserve.eval.own_questions import OwnQuestion
from ragserve.retrieval.near_copies import shingles
from ragserve.verification.metrics import contains_answer, exact_match, token_f1

METRICS = {
    "recall": "Recall@k",
    "ndcg": "nDCG@k",
    "mrr": "MRR",
    "answer_found": "Answer in the passages",
    "f1": "Answer F1",
    "em": "Exact match",
    "contains": "Contains an answer",
    "citation_precision": "Citation precision",
    "citation_recall": "Citation recall",
}
"""Metrics of an answer, each between 0 and 1, or None without the labels that it needs."""
_MARKER = re.compile(r"(?<!\s)\s*+\[\d{1,3}\]")  # of a citation: no word of the answer
_HELD = 0.5  # of a gold passage's word triples: chunk borders may cut it


def is_from(passage: Passage, name: str) -> bool:
    """Whether a passage is of the document that a question set calls ``name``."""
    source = passage.source or ""
    return name in (source, passage.doc_id) or source.endswith(f"/{name}")


def holds(text: str, gold: str) -> bool:
    """Whether a passage's text has at least half of a gold passage's word triples."""
    wanted = shingles(gold)
    if len(wanted) == 1:  # at most three words
        return contains_answer(text, [gold])
    return len(wanted & shingles(text)) >= _HELD * len(wanted)


def gold_of(passage: Passage, question: OwnQuestion) -> list[str]:
    """The gold passages that a passage holds or, where none are known, the gold documents that it is of."""
    if question.passages:
        return [gold for gold in question.passages if holds(passage.text, gold)]
    return [name for name in question.documents if is_from(passage, name)]


def supports(passage: Passage, question: OwnQuestion, passages: Sequence[Passage]) -> bool | None:
    """Whether a passage supports the right answer; None if no label says so.

    It holds a gold passage, if those are known. Else it is of a gold document and holds an accepted answer,
    as far as either is known. Answers such as "yes" are in no text: if none of ``passages`` of a gold
    document holds one, the document alone counts."""
    if question.passages:
        return bool(gold_of(passage, question))
    if not question.documents:
        return contains_answer(passage.text, question.answers) if question.answers else None
    if not gold_of(passage, question):
        return False
    literal = any(contains_answer(p.text, question.answers) for p in passages if gold_of(p, question))
    return not literal or contains_answer(passage.text, question.answers)


def ranking_of(passages: Sequence[Passage], question: OwnQuestion) -> list[str]:
    """The passages as a ranked list of what was to be found: gold passages, or documents, each at its first
    place, between others."""
    ranking: list[str] = []
    for passage in passages:
        other = f"\0{passage.index}" if question.passages else f"\0{passage.source}"
        ranking += [each for each in gold_of(passage, question) or [other] if each not in ranking]
    return ranking


def judged(question: OwnQuestion, passages: Sequence[Passage], answer: Answer, k: int) -> dict[str, Any]:
    """The metrics of an answer, and ``gold_ranks``, the place of each thing to be found, from 1, None if it
    was not found. ``passages``: all that the search returned, best first, of the ``k`` that it was asked
    for."""
    found = missed(question)
    if gold := question.passages or question.documents:
        ranking, relevant = ranking_of(passages, question), dict.fromkeys(gold, 1)
        found["gold_ranks"] = [ranking.index(each) + 1 if each in ranking else None for each in relevant]
        found["recall"] = recall(ranking, relevant, len(ranking))
        # Not at the ranking's own length: with all passages of one document that is 1.
        found["ndcg"] = ndcg(ranking, relevant, max(k, len(passages), len(ranking)))
        found["mrr"] = reciprocal_rank(ranking, relevant)
    if question.answers:
        said = _MARKER.sub("", answer.answer)
        found["answer_found"] = float(any(contains_answer(p.text, question.answers) for p in passages))
        found["f1"] = token_f1(said, question.answers)
        found["em"] = exact_match(said, question.answers)
        found["contains"] = float(contains_answer(said, question.answers))
    return found | _citations(question, passages, answer)


def missed(question: OwnQuestion) -> dict[str, Any]:
    """The same of a question that got no answer: 0 in each metric that its labels allow."""
    gold = dict.fromkeys(question.passages or question.documents)
    labelled = {
        **dict.fromkeys(("recall", "ndcg", "mrr"), bool(gold)),
        **dict.fromkeys(("answer_found", "f1", "em", "contains"), bool(question.answers)),
        **dict.fromkeys(("citation_precision", "citation_recall"), bool(gold or question.answers)),
    }
    return {name: 0.0 if labelled[name] else None for name in METRICS} | {"gold_ranks": [None] * len(gold)}


def _citations(question: OwnQuestion, passages: Sequence[Passage], answer: Answer) -> dict[str, float | None]:
    """Precision: the share of the cited passages that support the right answer; None if nothing is cited.
    Recall: the share of the gold passages or documents, or of the one answer, that cited passages support."""
    verdicts = [(cited, supports(cited, question, passages)) for cited in answer.citations]
    if not (question.passages or question.documents or question.answers):
        return {}
    good = [cited for cited, right in verdicts if right]
    gold = dict.fromkeys(question.passages or question.documents)
    covered = {name for cited in good for name in gold_of(cited, question)}
    return {
        "citation_precision": len(good) / len(verdicts) if verdicts else None,
        "citation_recall": len(covered) / len(gold) if gold else float(bool(good)),
    }


def cause_of(row: Mapping[str, Any]) -> str | None:
    """Where an answer was lost; None without accepted answers."""
    if row.get("error"):
        return "failed"
    if row["contains"] is None:
        return None
    if row["contains"]:
        return "right"
    return "read wrongly" if row["answer_found"] else "not retrieved"
