"""Control operation `score`: which documents have a score, what is waited for, and what a score finds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_ext.analysis.analyser import Analyser
from sglang_ext.analysis.document_analysis import Cut
from sglang_ext.analysis.texts import Texts
from sglang_ext.context.scheduler.document_analyses import DocumentAnalyses
from sglang_ext.context.scheduler.document_scorer import DocumentScorer
from sglang_ext.documents.summaries import SummaryTicket
from sglang_ext.ranks.ranks import Ranks
from sglang_ext.tensors.rope import Rotation
from sglang_ext.wire.protocol import PlanError, document_key
from tests.unit.context.small_model import DIM, KV_HEADS, ROTATION, runner_of

SYSTEM = [1, 2, 3, 4, 5]
RARE = 45
DOCUMENTS = [[i % 40 for i in range(seed, seed + 60)] for seed in (0, 7, 13)]
DOCUMENTS[1][30] = RARE


class Tiers:
    """Has the summaries of some documents; a ``slow`` one is never read."""

    def __init__(self) -> None:
        self.stored: dict[str, bytes] = {}
        self.slow: set[str] = set()

    def summary(self, key: str) -> SummaryTicket:
        return SummaryTicket() if key in self.slow else SummaryTicket.known(self.stored.get(key))


def key_of(ids: list[int]) -> str:
    return document_key("n", "print", ids)


@pytest.fixture
def tiers() -> Tiers:
    return Tiers()


@pytest.fixture
def scorer(tiers: Tiers) -> DocumentScorer:
    runner = runner_of(200, seed=1)
    runner.token_to_kv_pool.head_num, runner.token_to_kv_pool.dtype = KV_HEADS, torch.float32
    unrelated = [torch.randint(0, 40, (100,)).tolist() for _ in range(2)]
    texts = Texts(unrelated, torch.zeros(50, dtype=torch.bool))
    analyser = Analyser(runner, lambda: texts, Cut(), rotation=ROTATION)
    kept_in: Any = tiers
    analyses = DocumentAnalyses(analyser, kept_in, Ranks(), device="cpu", memory_bytes=2**20)
    for ids in DOCUMENTS[:2]:
        tiers.stored[key_of(ids)] = analyser.analyse(ids).encode()
    return DocumentScorer(runner, Rotation(torch.zeros(DIM // 2), DIM, neox=True), analyses, Ranks())


def ask(scorer: DocumentScorer, **more: Any) -> dict[str, Any]:
    asked = {"namespace": "n", "system": SYSTEM, "question": [RARE, 41], "documents": DOCUMENTS}
    body = {"now": 100.0, **asked, **more}
    return scorer.answer(body, "print")


def test_documents_without_an_analysis_have_no_score(scorer: DocumentScorer) -> None:
    first, second, none = ask(scorer)["scores"]
    assert none is None
    assert first != second
    again = ask(scorer, documents=[DOCUMENTS[2], DOCUMENTS[1], DOCUMENTS[1]])["scores"]
    assert again[0] is None
    assert again[1] == again[2], "one document, one score"
    assert ask(scorer, namespace="other")["scores"] == [None] * 3, "namespaces share nothing"
    assert ask(scorer, documents=[])["scores"] == []


def test_a_read_is_waited_for_and_given_up(scorer: DocumentScorer, tiers: Tiers) -> None:
    tiers.slow.add(key_of(DOCUMENTS[0]))
    waits = ask(scorer)
    assert set(waits) == {"pending"}
    assert ask(scorer, now=104.9, **waits) == waits, "the same end, however often it is asked"
    scores = ask(scorer, now=105.1, **waits)["scores"]
    assert [score is None for score in scores] == [True, False, True]


@pytest.mark.parametrize("more", ["documents", "system"])
def test_no_more_is_scored_in_one_step_than_others_can_wait_for(scorer: DocumentScorer, more: str) -> None:
    most: dict[str, Any] = {"documents": [[1] * 65_000, [2] * 536], "system": [1] * 4096}
    assert ask(scorer, **most)["scores"] == [None, None]
    with pytest.raises(PlanError, match="at most 65,536 tokens of documents and 4,096 of system text"):
        ask(scorer, **most | {more: [*most[more], [3] if more == "documents" else 3]})


def test_a_question_without_tokens_is_refused(scorer: DocumentScorer) -> None:
    with pytest.raises(PlanError, match="without tokens"):
        ask(scorer, question=[])
