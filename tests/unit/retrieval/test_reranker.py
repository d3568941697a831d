"""A CrossEncoder orders passages: loaded once, when it is needed, beside the event loop, and refused plainly
where it is none."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from ragserve.errors import InvalidRequest
from ragserve.retrieval import reranker
from ragserve.retrieval.reranker import CrossEncoderReranker, check_cross_encoder
from ragserve_index.types import Chunk
from tests.unit.retrieval.tiny_models import cross_encoder

QUESTION = "Who built the lighthouse?"


def chunk(number: int, title: str, text: str) -> Chunk:
    return Chunk(number, "d", number, text, 0, len(text), None, len(text.split()), "s", title, {})


CHUNKS = [
    chunk(1, "Skerryvore", "The lighthouse was built by Alan Stevenson."),
    chunk(2, "", "A soup of leeks."),
    chunk(3, "Bell rock", "The lighthouse was built by Robert Stevenson."),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return cross_encoder(tmp_path_factory.mktemp("reranker") / "model")


def test_scores_are_the_models_and_it_is_loaded_once_beside_the_loop(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sentence_transformers import CrossEncoder

    pairs = [(QUESTION, f"{c.title}\n{c.text}" if c.title else c.text) for c in CHUNKS]
    expected = CrossEncoder(model, device="cpu").predict(pairs, show_progress_bar=False)
    assert len(set(expected.tolist())) == len(CHUNKS)
    threads: list[int] = []
    load = reranker.load_model

    def load_model(*args: str, **options: str) -> object:
        threads.append(threading.get_ident())
        return load(*args, **options)

    monkeypatch.setattr(reranker, "load_model", load_model)

    async def ask() -> list[Sequence[float | None]]:
        ranker = CrossEncoderReranker(model, device="cpu", batch_size=2)
        assert not threads, "nothing is loaded before the first question"
        try:
            return await asyncio.gather(*(ranker.scores("n", QUESTION, CHUNKS) for _ in range(3)))
        finally:
            await ranker.close()

    for scores in asyncio.run(ask()):
        assert scores == pytest.approx(expected.tolist(), abs=1e-5)
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()


def test_a_damaged_model_is_refused_when_it_is_loaded(model: str, tmp_path: Path) -> None:
    damaged = shutil.copytree(model, tmp_path / "damaged")
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])

    async def load() -> None:
        ranker = CrossEncoderReranker(str(damaged), device="cpu")
        try:
            await ranker.load()
        finally:
            await ranker.close()

    with pytest.raises(InvalidRequest, match="could not be loaded"):
        asyncio.run(load())


def test_what_is_no_reranker_is_said_before_it_is_loaded(model: str, tmp_path: Path) -> None:
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    check_cross_encoder(model)
    (tmp_path / "empty").mkdir()
    config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    for name, changes in (
        ("bert", {"architectures": ["BertModel"]}),
        ("pairs", {"id2label": {0: "a", 1: "b"}}),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
    for name, says in (
        ("nobody/has-this-model", "was not found"),
        ("no such name!", "was not found"),
        (str(tmp_path / "empty"), "was not found"),
        (str(tmp_path / "bert"), "has BertModel"),
        (str(tmp_path / "pairs"), "gives 2 scores"),
    ):
        with pytest.raises(InvalidRequest, match=says) as caught:
            CrossEncoderReranker(name)
        assert (caught.value.code, caught.value.param) == ("reranker_not_found", "rerank")
