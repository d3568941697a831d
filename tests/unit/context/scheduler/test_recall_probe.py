"""Probes of `ragserve calibrate`, on a model of attention alone: recall as it is defined, by
the engine's own selection.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sglang_ext.analysis.analyser import Analyser
from sglang_ext.analysis.document_analysis import Cut
from sglang_ext.analysis.stability import outlying
from sglang_ext.analysis.texts import Texts
from sglang_ext.context.scheduler.recall_probe import ProbeEngine, answer
from sglang_ext.context.selection.base import ModelShape
from sglang_ext.context.selection.choose import Selector
from sglang_ext.context.selection.profile import Profile
from sglang_ext.ranks.ranks import Ranks
from sglang_ext.tensors.rope import Rotation
from sglang_ext.wire.protocol import PlanError
from tests.unit.context.selection.test_samkv import analysis_of
from tests.unit.context.small_model import DIM, KV_HEADS, LAYERS, runner_of

END, RARE, QUESTION = 40, 45, 46  # tokens: ends a sentence, stands in one sentence only, begins the question
SPANS = [(0, 6), (6, 126), (126, 246), (246, 366)]
NEEDED = (185, 195)


@pytest.fixture(scope="module")
def engine() -> ProbeEngine:
    runner = runner_of(200, seed=1)
    runner.token_to_kv_pool.head_num, runner.token_to_kv_pool.dtype = KV_HEADS, torch.float32
    rotation = Rotation(torch.rand(DIM // 2), DIM, neox=True)
    ends = torch.zeros(50, dtype=torch.bool)
    ends[END] = True
    unrelated = [torch.randint(0, 40, (100,)).tolist() for _ in range(2)]
    analyser = Analyser(runner, lambda: Texts(unrelated, ends), Cut(), rotation=rotation)
    shape = ModelShape(LAYERS, 4, profile=Profile(selection="none"))
    selector = Selector(rotation, analyser, Ranks())
    return ProbeEngine(runner, rotation, analyser, selector, lambda _, ids: analyser.analyse(ids), shape)


def body_of(**more: Any) -> dict[str, Any]:
    """Three documents of sentences of ten tokens; the question's rare token is in one, which is needed."""
    ids = torch.randint(0, 40, (SPANS[-1][1],), generator=torch.Generator().manual_seed(2))
    ids[SPANS[0][1] + 9 :: 10] = END
    ids[NEEDED[0] + 3] = RARE
    question = {"ids": [QUESTION, RARE, QUESTION], "needed": [list(NEEDED)]}
    return {
        "ids": ids.tolist(),
        "spans": [list(span) for span in SPANS],
        "questions": [question, question],
        **more,
    }


def measure(engine: ProbeEngine, **more: Any) -> dict[str, Any]:
    return answer(engine, body_of(**more))


def test_recall_is_the_share_of_needed_tokens_that_is_kept(
    engine: ProbeEngine,
) -> None:
    found = measure(engine, stable=[0])["proportion"]
    assert set(found) == {"built_in", "found"}, "whatever the running engine's profile says"
    for row in found.values():
        assert row["recall"][0] == row["recall"][1], "the same question twice"
        assert 0 <= row["recall"][0] <= 1
        assert 0 < row["kept"] <= 1
    built_in = measure(engine, stable=[LAYERS - 1])["proportion"]
    assert built_in["found"] == built_in["built_in"] == found["built_in"]


def test_a_survey_covers_every_head_and_layer(engine: ProbeEngine) -> None:
    survey = measure(engine)
    assert torch.tensor(survey["heads"]).shape == (2, LAYERS, KV_HEADS)
    assert survey["heads"][0] == survey["heads"][1], "the same question twice"
    assert len(survey["built_in"]["heads"]) == 1
    assert survey["built_in"]["stable"] == [LAYERS - 1]


def test_attention_is_the_signal_of_every_sentence(engine: ProbeEngine) -> None:
    first, second = measure(engine, attention=True)["attention"]
    assert first == pytest.approx(second, abs=1e-5), "the same question twice"
    assert len(first) == 36, "of ten tokens each"
    assert max(first) == pytest.approx(1.0)
    assert min(first) >= 0.0


def test_what_selections_keep_is_shown(engine: ProbeEngine) -> None:
    sentences = {"keep": 0.25, "experimental": {"retrieval_weight": 1.0, "feedback_weight": 0.0}}
    first = {"documents": [0.9, 0.1, 0.1], "sentences": [[], [], []]}
    body = {"selections": [sentences, {"selection": "shared", "keep": 0.5}], "scores": first}
    by_score, by_blocks = measure(engine, **body)["kept"]
    assert by_score[0] == by_score[1], "the same question twice"
    assert len(by_score[0]) == 90
    assert max(by_score[0]) < SPANS[1][1], "the best document, by the retriever"
    assert len(by_blocks[0]) == 180
    other = {"documents": [0.1, 0.1, 0.9], "sentences": [[], [], []]}
    assert min(measure(engine, **body | {"scores": other})["kept"][0][0]) >= SPANS[3][0]
    with pytest.raises(PlanError, match="the same in all layers"):
        measure(engine, selections=[{"selection": "layers", "keep": 0.5}])


def test_a_probe_without_documents_or_questions_is_refused(
    engine: ProbeEngine,
) -> None:
    for missing in ({"spans": [[0, SPANS[-1][1]]]}, {"questions": []}, {"spans": [[0, 6], [6, 20]]}):
        with pytest.raises(PlanError, match="a probe needs"):
            measure(engine, **missing)


def test_layers_that_agree_with_the_model_on_a_block_stand_out() -> None:
    analysis = analysis_of(160, 8, torch.Generator().manual_seed(0))
    exponent = 1 + 0.1 * torch.rand(LAYERS, 20, generator=torch.Generator().manual_seed(1))
    exponent[:, 7] = torch.tensor(
        [1.02, 0.5, 0.5]
    )  # the first layer ranks it high, too, but it is one of many there
    exponent[:, [0, 19]] = 0.1  # initial and local blocks
    analysis = replace(analysis, exponent=exponent.half())
    sigmas = outlying(analysis)
    assert sigmas is not None
    assert bool((sigmas[1:] > 3).all())
    assert float(sigmas[0]) < 2
    assert outlying(analysis_of(48, 8, torch.Generator().manual_seed(0))) is None, "three middle blocks"
