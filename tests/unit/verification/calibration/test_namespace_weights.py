"""Weights that are learned on a namespace: its passages, and the engine's attention to their sentences."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from ragserve.answering.prompt import load_tokenizer
from ragserve.bench.retrieval import document_of
from ragserve.commands import calibrate
from ragserve.config import DEFAULT_MODEL, Settings
from ragserve.errors import InvalidRequest, NotFound
from ragserve.verification.calibration import namespace_weights, signal_weights
from ragserve.verification.calibration.namespace_weights import NamespacePassage, drawn_passages, learn_on
from ragserve_index import IndexStore
from sglang_ext.analysis.texts import Texts
from tests.unit.index.postgres_server import PostgresServer
from tests.unit.verification.calibration.test_signal_weights import FakeEmbedder, noise, passages_of


def written(passage: Any) -> tuple[Any, list[Any], Any]:
    document, chunks = document_of(passage.title, passage.text)
    return replace(document, title=passage.title), chunks, np.full((1, 4), 0.5, dtype=np.float32)


def test_passages_are_drawn_without_copies(tmp_path: Path) -> None:
    passages = passages_of(6)
    copy = replace(passages[0], title="Another")
    with IndexStore(tmp_path) as store:
        store.ensure_namespace("own", embedder="fake", dim=4)
        store.replace_documents("own", [written(each) for each in [*passages, copy]])
        found = drawn_passages(store, "own")
        assert {each.text for each in found} == {each.text for each in passages}
        assert {each.title for each in found} <= {each.title for each in [*passages, copy]}
        assert found == drawn_passages(store, "own"), "the same every time"
        assert len(drawn_passages(store, "own", most=2)) == 2
        with pytest.raises(NotFound):
            drawn_passages(store, "unknown")


class Seeing:
    """An engine whose attention sees the sentence that answers."""

    info = SimpleNamespace(tokenizer=DEFAULT_MODEL, max_prompt_tokens=4096)

    def __init__(self) -> None:
        tokenizer = load_tokenizer(DEFAULT_MODEL)
        self._texts = Texts.of(tokenizer, len(tokenizer))

    async def control(self, operation: str, **body: Any) -> dict[str, Any]:
        assert operation == "probe"
        assert body["attention"]
        first, last = body["questions"][0]["needed"][0]
        begins = [
            span[0] + int(place)
            for span in body["spans"][1:]
            for place in self._texts.begins(body["ids"][span[0] : span[1]]).nonzero()
        ]
        ends = [*begins[1:], len(body["ids"])]
        seen = [float(a < last and b > first) for a, b in zip(begins, ends, strict=True)]
        return {"attention": [seen]}


def test_the_engines_attention_is_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespace_weights.Embedder, "of", lambda settings: FakeEmbedder(noise))
    monkeypatch.setattr(namespace_weights, "PROBES", 16)
    monkeypatch.setattr(signal_weights, "LEAST", 16)
    monkeypatch.setattr(signal_weights, "_STEPS", (0.3,))  # which saves most of the time
    monkeypatch.setattr(namespace_weights, "_DEPTH", 4)
    passages = [NamespacePassage(each.title, each.text) for each in passages_of(16)]
    lines: list[str] = []
    found = asyncio.run(learn_on(Settings(), Seeing(), passages, lines.append))  # type: ignore[arg-type]
    weights = found.figures["weights"]
    assert weights["attention"] == max(weights.values())
    assert found.figures["used"]
    assert found.options["lexical_weight"] < 0.5
    assert any("attention of 16 of 16 probes" in line for line in lines)
    assert "used" in "\n".join(found.lines())


def test_the_command_learns_for_the_samkv_profile_only(tmp_path: Path) -> None:
    app = typer.Typer()
    calibrate.register(app)
    app.command("other")(lambda: None)
    for part, error in (("costs", InvalidRequest), ("samkv", NotFound)):
        asked = ["calibrate", "--part", part, "-n", "own", "--data-dir", str(tmp_path)]
        assert isinstance(CliRunner().invoke(app, asked).exception, error)


def test_the_command_reads_the_registry_of_the_settings(
    tmp_path: Path, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = postgres.database()
    with IndexStore(tmp_path, registry_url=url) as store:
        store.ensure_namespace("own", embedder="fake", dim=4)
        store.replace_documents("own", [written(each) for each in passages_of(6)])
        store.save()
    before = sorted((tmp_path / "indexes").glob("ns-*"))
    monkeypatch.setenv("RAGSERVE_REGISTRY_URL", url)
    app = typer.Typer()
    calibrate.register(app)
    app.command("other")(lambda: None)
    asked = ["calibrate", "--part", "samkv", "-n", "absent", "--data-dir", str(tmp_path)]
    assert isinstance(CliRunner().invoke(app, asked).exception, NotFound)
    assert before
    assert sorted((tmp_path / "indexes").glob("ns-*")) == before, "another registry would know none of them"
    postgres.give_back(url)
