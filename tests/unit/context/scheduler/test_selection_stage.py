"""The stage before admission: analyses are found, computed and stored."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.analysis import document_analysis
from sglang_ext.analysis.document_analysis import Analysis, Cut
from sglang_ext.context.compose.request import ComposedContext
from sglang_ext.context.scheduler.selection_stage import SelectionStage
from sglang_ext.context.selection.base import ModelShape
from sglang_ext.context.selection.strategies import partial_selection
from sglang_ext.documents.tier_store import TierStore
from sglang_ext.protocol import ContextPlan, Span
from sglang_ext.ranks import Ranks
from tests.unit.context.selection.test_samkv import LAYERS, analysis_of
from tests.unit.documents.document_samples import Sample, files_of, flushed, opened

BLOCK = 8
SYSTEM, DOCUMENT = Sample(1, 10), Sample(2, 50)


class Step:
    """A scheduler step's own object."""


class Analyser:
    """Draws analyses; ``heads``, ``basis`` as a start of the engine finds them."""

    cut = Cut(BLOCK)

    def __init__(self, heads: Sequence[tuple[int, int]] = ((0, 1), (2, 0)), basis: str = "tokenizer") -> None:
        self.heads, self.basis = heads, basis

    def block_of(self, n: int, cut: Cut) -> int:
        return cut.block

    def analyse(self, ids: Sequence[int], cut: Cut) -> Analysis:
        made = analysis_of(len(ids), cut.block, torch.Generator().manual_seed(len(ids)))
        heads = torch.tensor(self.heads, dtype=torch.uint8)
        return replace(made, basis=self.basis, heads=heads)


def stage_of(store: TierStore, analyser: Analyser) -> SelectionStage:
    parts: dict[str, Any] = {
        "locator": SimpleNamespace(resolve=lambda context: [], unlock=lambda context: None),
        "analyser": analyser,
        "query_pass": None,
        "selector": SimpleNamespace(select=lambda *args: None),
        "tiers": store,
        "ranks": Ranks(),
    }
    return SelectionStage(SimpleNamespace(device="cpu"), memory_bytes=2**20, **parts)


def answered(stage: SelectionStage, store: TierStore) -> None:
    """Take a request that needs the document's analysis through the stage."""
    spans = (Span(0, 10), Span(10, 60))
    plan = ContextPlan("compose", "default", "concat", spans, {"recompute": "sensitivity", "share": 0.2})
    ids = array("q", [*SYSTEM.ids, *DOCUMENT.ids, 7, 8, 9])
    partial = partial_selection(plan, ModelShape(LAYERS, cut=Analyser.cut))
    context = ComposedContext(plan, ids, (SYSTEM.key, DOCUMENT.key), partial)
    assert partial.needs_analysis
    stage.add(context)
    for _ in range(2):  # the second time the analysis has been read from disk
        step = Step()
        stage.advance(step)
        assert store.flush(30)
    assert len(context.selection.recomputed) == 10


def computed(folder: Path, analyser: Analyser) -> int:
    """Start on this folder and answer one request; the number of analyses that had to be computed."""
    with opened(folder) as store:
        DOCUMENT.put(store)
        flushed(store)
        stage = stage_of(store, analyser)
        answered(stage, store)
        return stage.stat()["computed"]


def upgraded(monkeypatch: pytest.MonkeyPatch) -> Analyser:
    monkeypatch.setattr(document_analysis, "VERSION", document_analysis.VERSION + 1)
    return Analyser()


@pytest.mark.parametrize(
    "changed",
    [lambda patch: Analyser(heads=[(1, 0)]), lambda patch: Analyser(basis="another"), upgraded],
    ids=["other retrieval heads", "another tokenizer", "an upgrade"],
)
def test_an_analysis_that_cannot_be_used_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: Callable[[pytest.MonkeyPatch], Analyser]
) -> None:
    assert computed(tmp_path, Analyser()) == 1
    assert computed(tmp_path, Analyser()) == 0
    analyser = changed(monkeypatch)
    assert computed(tmp_path, analyser) == 1
    assert computed(tmp_path, analyser) == 0


def test_a_damaged_analysis_is_replaced(tmp_path: Path) -> None:
    assert computed(tmp_path, Analyser()) == 1
    path = files_of(tmp_path)[0]
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    assert computed(tmp_path, Analyser()) == 1
    assert computed(tmp_path, Analyser()) == 0
