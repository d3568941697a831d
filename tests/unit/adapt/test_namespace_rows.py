"""Questions of a namespace, made by the model that is to be adapted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ragserve.adapt import greedy
from ragserve.adapt.batched_engine import BatchedEngine
from ragserve.adapt.low_rank import AdaptedModel
from ragserve.adapt.namespace_rows import make_rows
from ragserve.adapt.packing import TrainingSequence
from ragserve.adapt.training_rows import TrainingRow
from ragserve.answering.prompt import PromptBuilder
from ragserve.config import Settings
from ragserve.engine.base import GenerateRequest, Sampling
from ragserve.errors import RagserveError
from ragserve.retrieval.embedder import Embedder
from ragserve.verification.engine_run import first_token
from ragserve_index import IndexStore
from ragserve_index.types import NewChunk, NewDocument
from tests.unit.adapt.tiny_models import TOKENIZER, load, make_model, tokens
from tests.unit.verification.tuned_server import logged

TEXTS = {
    "Norway": "Norway is a country in the north of Europe with many fjords. The capital of Norway is Oslo.",
    "Sweden": "Sweden is a country in the north of Europe with lakes. The capital of Sweden is Stockholm.",
    "Kolstad": "The Kolstad observatory stands on a hill above the town of Kolstad. It is led by Mari Lund.",
}


@pytest.fixture(scope="module")
def reader() -> AdaptedModel:
    return load(TOKENIZER)


def test_rows_have_the_passage_that_answers_among_those_that_a_search_finds(
    reader: AdaptedModel, settings: Settings, embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Embedder, "of", lambda _: embedder)
    settings = settings.model_copy(update={"top_k": 2})
    with IndexStore(settings.data_dir) as store:
        ingest(store, embedder, TEXTS)
    rows, said = made(reader, settings)
    assert said == [f"{len(rows)} about 3 chunks and users' questions"]
    assert rows
    for row in rows:
        assert row.answer is not None
        assert row.gold
        assert any(row.answer in row.passages[at].text for at in row.gold)
        assert 2 <= len(row.passages) <= 3
        assert set(row.about) <= set(row.gold)
        assert len(row.about) == (not row.question.startswith("Answer both"))
    assert len({row.question for row in rows}) == len(rows)


def ingest(store: IndexStore, embedder: Embedder, texts: dict[str, str]) -> None:
    """Put each text into namespace `notes` as a document of one chunk."""
    store.ensure_namespace("notes", embedder=embedder.name, dim=embedder.dim)
    for name, text in texts.items():
        document = NewDocument(name, name, name, "text/plain", 1)
        chunk = NewChunk(text, 0, len(text), len(text.split()))
        store.replace_documents("notes", [(document, [chunk], embedder.encode([text]))])


def made(reader: AdaptedModel, settings: Settings) -> tuple[list[TrainingRow], list[str]]:
    """The rows of namespace `notes`, and what was said of the progress."""
    said: list[str] = []
    rows = make_rows(
        settings,
        "notes",
        reader,
        PromptBuilder(reader.tokenizer),
        400,
        10,
        lambda phase, counts: said.append(counts),
    )
    return rows, said


def test_chunks_and_questions_that_do_not_fit_are_left_out(
    reader: AdaptedModel, settings: Settings, embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the first that are tried: a question of a user, and a chunk that the model is to ask about."""
    monkeypatch.setattr(Embedder, "of", lambda _: embedder)
    settings = settings.model_copy(update={"top_k": 2})
    with IndexStore(settings.data_dir) as store:
        ingest(store, embedder, TEXTS)
        expected, _ = made(reader, settings)
        ingest(store, embedder, {"Long": f"{TEXTS['Norway']} {'Nothing is said here of it. ' * 99}"})
        asyncio.run(logged(settings.data_dir, store, ["What is the capital of Norway? " * 99]))
    rows, said = made(reader, settings)
    assert said == [f"{len(rows)} about 5 chunks and users' questions; 2 do not fit into 400 tokens"]
    assert {row.question for row in expected} <= {row.question for row in rows}


def test_a_namespace_without_passages(
    reader: AdaptedModel, settings: Settings, embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Embedder, "of", lambda _: embedder)
    with IndexStore(settings.data_dir) as store:
        store.ensure_namespace("n", embedder=embedder.name, dim=embedder.dim)
    builder = PromptBuilder(reader.tokenizer)
    with pytest.raises(RagserveError, match="no passages to ask about"):
        make_rows(settings, "n", reader, builder, 400, 10, lambda phase, counts: None)
    with pytest.raises(RagserveError, match="missing"):
        make_rows(settings, "missing", reader, builder, 400, 10, lambda phase, counts: None)


def test_requests_that_wait_together_are_answered_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(make_model(tmp_path))
    prompts = [tokens(size, size) for size in (5, 40, 17)]
    alone = [greedy.answers(model, [TrainingSequence(ids)], 4)[0] for ids in prompts]
    batches: list[int] = []
    answers = greedy.answers

    def counted(model: AdaptedModel, given: list[TrainingSequence], most: int) -> list[list[int]]:
        batches.append(len(given))
        return answers(model, given, most)

    monkeypatch.setattr(greedy, "answers", counted)
    engine = BatchedEngine(model)

    async def ask(ids: list[int], most: int = 4) -> list[int]:
        request = GenerateRequest("r", ids, "n", sampling=Sampling(max_new_tokens=most))
        return list((await first_token(engine, request)).last.output_ids)

    async def all_() -> list[list[int]]:
        return await asyncio.gather(*map(ask, prompts), ask(prompts[0], 2))

    assert asyncio.run(all_()) == [*alone, alone[0][:2]]
    assert batches == [4]

    def broken(*_: object) -> list[list[int]]:
        raise MemoryError("no room")

    monkeypatch.setattr(greedy, "answers", broken)

    async def both() -> list[object]:
        return await asyncio.gather(*map(ask, prompts[:2]), return_exceptions=True)

    assert [str(error) for error in asyncio.run(both())] == ["no room", "no room"]
