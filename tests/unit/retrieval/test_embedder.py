"""The embedder: normalised, deterministic whatever the batch, safe in threads, and plain about what it cannot
load.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ragserve.config import Settings
from ragserve.errors import InvalidRequest
from ragserve.retrieval.embedder import Embedder, canonical_name, embedder_name
from tests.unit.retrieval.tiny_models import LENGTH
from tests.unit.retrieval.tiny_models import embedder as embedder_in

TEXTS = [
    "The harbour froze in January.",
    "short",
    "A long sentence about many things. " * 20,
    "Reykjavik is the capital of Iceland.",
    "",
]


def test_vectors_are_normalised_float32_in_the_order_given(embedder: Embedder) -> None:
    together = embedder.encode(TEXTS)
    assert (together.dtype, together.shape, embedder.dim) == (np.float32, (5, 384), 384)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-5)
    for i, text in enumerate(TEXTS):
        np.testing.assert_allclose(embedder.encode([text])[0], together[i], atol=1e-5)


def test_no_texts_give_no_vectors(embedder: Embedder) -> None:
    assert embedder.encode([]).shape == (0, 384)


def test_a_question_is_nearest_to_its_answer(embedder: Embedder) -> None:
    scores = embedder.encode(TEXTS) @ embedder.encode_queries(["What is the capital of Iceland?"])[0]
    assert int(np.argmax(scores)) == 3


def test_threads_get_the_vectors_of_their_own_texts(embedder: Embedder) -> None:
    expected = embedder.encode(TEXTS)
    with ThreadPoolExecutor(len(TEXTS)) as pool:
        for i, vectors in enumerate(
            pool.map(lambda i: [embedder.encode([TEXTS[i]])[0] for _ in range(5)], range(len(TEXTS)))
        ):
            for vector in vectors:
                np.testing.assert_allclose(vector, expected[i], atol=1e-5)


def test_a_model_that_is_not_there_is_said_plainly(tmp_path: Path) -> None:
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    (tmp_path / "empty").mkdir()
    for name in ("nobody/has-this-model", str(tmp_path / "empty")):
        with pytest.raises(InvalidRequest, match="could not be loaded") as caught:
            Embedder(name)
        assert caught.value.code == "embedder_not_found"


def test_spellings_of_one_model_are_one_embedder(tmp_path: Path) -> None:
    assert (
        canonical_name("sentence-transformers/all-MiniLM-L6-v2")
        == canonical_name("all-MiniLM-L6-v2")
        == "all-MiniLM-L6-v2"
    )
    assert canonical_name("BAAI/bge-small-en-v1.5") == "BAAI/bge-small-en-v1.5"
    (tmp_path / "a").mkdir()
    assert canonical_name(f"{tmp_path}/a/../a") == str(tmp_path / "a")


def test_the_end_of_a_long_text_is_embedded(embedder: Embedder) -> None:
    filler = "The committee met on Monday and talked about the budget of the town at length. " * 20
    answer = "Reykjavik is the capital of Iceland."
    with_answer = embedder.encode([filler + answer])[0]
    assert not np.allclose(with_answer, embedder.encode([filler])[0], atol=1e-3)
    windows = embedder.windows(filler + answer)
    assert "".join(windows) == filler + answer
    assert len(windows) > 1
    mean = np.mean([embedder.encode([window])[0] for window in windows], axis=0)
    np.testing.assert_allclose(with_answer, mean / np.linalg.norm(mean), atol=1e-5)
    mixed = embedder.encode(["short", filler + answer, TEXTS[0]])
    np.testing.assert_allclose(
        mixed, [embedder.encode(["short"])[0], with_answer, embedder.encode(TEXTS)[0]], atol=1e-5
    )
    assert embedder.windows(TEXTS[2]) == [TEXTS[2]]


def test_a_window_is_read_whole(embedder: Embedder) -> None:
    windows = embedder.windows("antidisestablishmentarianism, x1y2z3; " * 40)
    assert len(windows) > 2
    for window in windows[:2]:
        changed = window[:-6] + " lamps"
        assert not np.allclose(embedder.encode([window]), embedder.encode([changed]), atol=1e-4)


@pytest.mark.parametrize(
    "text", ["\u6d77\u6e2f\u51ac\u5929\u7ed3\u51b0" * 2, "\U0001f600" * 9], ids=["chinese", "emoji"]
)
def test_a_character_may_be_several_tokens(tmp_path: Path, text: str) -> None:
    model = Embedder(embedder_in(tmp_path, {}, byte_level=True))
    windows = model.windows(text)
    assert "".join(windows) == text
    assert max(model.count_tokens([window]) for window in windows) <= LENGTH < model.count_tokens([text])
    changed = text[:-1] + "\u0431"
    assert not np.allclose(model.encode([text]), model.encode([changed]), atol=1e-4)


def test_both_sides_have_their_prompts_in_every_window(tmp_path: Path) -> None:
    prompted = embedder_in(tmp_path, {"query": "query: ", "passage": "passage: "})
    model, plain = Embedder(prompted), Embedder(prompted, query_prompt="", passage_prompt="")
    text = "the lighthouse of skerryvore was built by alan stevenson on a reef " * 2
    long = model.windows(text)
    assert len(long) > len(plain.windows(text)) > 1
    np.testing.assert_allclose(model.encode_queries(["who"]), plain.encode_queries(["query: who"]), atol=1e-5)
    each = plain.encode([f"passage: {window}" for window in long])
    mean = each.mean(0)
    np.testing.assert_allclose(model.encode([text])[0], mean / np.linalg.norm(mean), atol=1e-5)
    assert not np.allclose(model.encode(["reef"]), plain.encode(["reef"]), atol=1e-3)
    assert model.name == prompted
    assert plain.name == f"{prompted}, passage prompt ''", "other vectors, another embedder"
    settings = Settings(embedder=prompted, passage_prompt="")
    assert embedder_name(settings) == plain.name == Embedder.of(settings).name
