"""The stage before admission: analyses are found, computed and stored."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

from sglang_ext.analysis import document_analysis
from sglang_ext.analysis.document_analysis import Analysis, Cut
from sglang_ext.analysis.texts import Texts
from sglang_ext.context.compose.request import ComposedContext
from sglang_ext.context.scheduler import composition, document_analyses
from sglang_ext.context.scheduler.composition import Composition
from sglang_ext.context.scheduler.document_analyses import DocumentAnalyses
from sglang_ext.context.scheduler.selection_stage import SelectionStage
from sglang_ext.context.scheduler.sglang_req import DocumentRequest
from sglang_ext.context.selection.anchors import anchors_of
from sglang_ext.context.selection.base import ModelShape
from sglang_ext.context.selection.recompute_rules import Kept
from sglang_ext.context.selection.strategies import partial_selection
from sglang_ext.documents.tier_store import TierStore
from sglang_ext.ranks.ranks import Ranks
from sglang_ext.stages import stages
from sglang_ext.wire.protocol import ContextPlan, Span
from tests.unit import request_shapes
from tests.unit.context.selection.test_samkv import LAYERS, analysis_of
from tests.unit.documents.document_samples import Sample, files_of, flushed, opened

BLOCK = 8
SYSTEM, DOCUMENT = Sample(1, 10), Sample(2, 50)


class Analyser:
    """Draws analyses; ``heads``, ``basis`` as a start of the engine finds them."""

    cut = Cut(BLOCK)
    texts = Texts([], torch.zeros(1, dtype=torch.bool))

    def __init__(self, heads: Sequence[tuple[int, int]] = ((0, 1), (2, 0)), basis: str = "tokenizer") -> None:
        self.heads, self.basis = heads, basis
        self.passes: list[list[int]] = []  # tokens of the documents of each
        self.broken: set[int] = set()  # tokens of documents that cannot be analysed
        self.pieces = 0  # that were done
        self.freed: list[list[int]] = []  # passes that were not done to their end

    def block_of(self, n: int, cut: Cut) -> int:
        return cut.block

    def analyse(self, ids: Sequence[int], cut: Cut) -> Analysis:
        made = analysis_of(len(ids), cut.block, torch.Generator().manual_seed(len(ids)))
        heads = torch.tensor(self.heads, dtype=torch.uint8)
        return replace(made, basis=self.basis, heads=heads)

    def analyse_all(
        self, documents: Sequence[Sequence[int]], cut: Cut, keep: Any = None, *, whole: bool = True
    ) -> list[Analysis]:
        self.passes.append([len(ids) for ids in documents])
        if any(len(ids) in self.broken for ids in documents):
            raise ValueError("no such row")
        found = [self.analyse(ids, cut) for ids in documents]
        return found if whole else [each.part() for each in found]

    def in_pieces(
        self, documents: Sequence[Sequence[int]], cut: Cut, *, whole: bool = True
    ) -> Generator[float, None, list[Analysis]]:
        """A piece a token."""
        found = self.analyse_all(documents, cut, whole=whole)
        try:
            for _ in range(sum(map(len, documents))):
                self.pieces += 1
                yield 1.0
        except GeneratorExit:
            self.freed.append([len(ids) for ids in documents])
            raise
        return found


def selector(begin: Callable[..., Any] = lambda *args: lambda: None) -> SimpleNamespace:
    """One without signals."""
    return SimpleNamespace(read=lambda *args: None, begin=begin)


def stage_of(
    store: TierStore,
    analyser: Any,
    ranks: Ranks | None = None,
    *,
    complete: bool = True,
    memory_bytes: int = 2**20,
) -> SelectionStage:
    ranks = ranks or Ranks()
    analyses = DocumentAnalyses(
        analyser, store, ranks, device="cpu", memory_bytes=memory_bytes, complete=complete
    )
    parts: dict[str, Any] = {
        "locator": SimpleNamespace(resolve=lambda context: [], unlock=lambda context: None),
        "analyser": analyser,
        "query_pass": None,
        "selector": selector(),
        "tiers": store,
        "ranks": ranks,
    }
    return SelectionStage(SimpleNamespace(device="cpu"), analyses=analyses, **parts)


def waiting() -> ComposedContext:
    """A request that needs the document's analysis."""
    spans = (Span(0, 10), Span(10, 60))
    plan = ContextPlan("compose", "default", "concat", spans, {"recompute": "sensitivity", "share": 0.2})
    ids = array("q", [*SYSTEM.ids, *DOCUMENT.ids, 7, 8, 9])
    partial = partial_selection(plan, ModelShape(LAYERS, cut=Analyser.cut))
    assert partial.needs_analysis
    return ComposedContext(plan, ids, (SYSTEM.key, DOCUMENT.key), partial)


def answered(stage: SelectionStage, store: TierStore) -> list[int]:
    """Take a request that needs the document's analysis through the stage; the tokens it recomputes."""
    context = waiting()
    stage.add(context)
    for _ in range(2):  # the second time the analysis has been read from disk
        stage.advance()
        assert store.flush(30)
    recomputed: list[int] = context.selection.recomputed.tolist()
    assert len(recomputed) == 10
    return recomputed


def computed(folder: Path, analyser: Analyser) -> int:
    """Start on this folder and answer one request; the number of analyses that had to be computed."""
    with opened(folder) as store:
        DOCUMENT.put(store)
        flushed(store)
        stage = stage_of(store, analyser)
        answered(stage, store)
        return stage.analyses.stat()["computed"]


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


class Headless(Analyser):
    """Meets an error where it looks for its heads."""

    def __init__(self) -> None:
        self.basis, self.passes, self.broken = "tokenizer", [], set()

    @property
    def heads(self) -> Any:  # type: ignore[override]
        raise ValueError("no such row")


def test_a_rank_that_fails_alone_in_the_search_for_heads_ends_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stages, "_alike", lambda error: False)  # the other ranks are in a collective
    with opened(None) as store:
        DOCUMENT.put(store)
        with pytest.raises(stages.RanksDivided):
            answered(stage_of(store, Headless()), store)
        with pytest.raises(stages.RanksDivided):
            stage_of(store, Headless()).analyses.stored({DOCUMENT.key: len(DOCUMENT.ids)})


def test_a_rank_that_fails_alone_in_a_selection_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: Any) -> None:
        raise ValueError("no such row")

    monkeypatch.setattr(stages, "_alike", lambda error: False)  # the other ranks are in a collective
    with opened(None) as store:
        DOCUMENT.put(store)
        stage = stage_of(store, Analyser())
        monkeypatch.setattr(stage, "_selector", selector(failing))
        with pytest.raises(stages.RanksDivided):
            answered(stage, store)


class ByRank(Analyser):
    """Sensitivities that differ between ranks in their last bits, as those of two computations do."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def analyse(self, ids: Sequence[int], cut: Cut) -> Analysis:
        rising = 1 + torch.arange(len(ids)) * torch.finfo(torch.float32).eps
        return replace(super().analyse(ids, cut), sensitivity=rising.flip(0) if self._rank else rising)


def one_of_two(rank: int, folder: Path) -> None:
    """A rank's process: write down what it recomputes, alone and together with the other."""
    store_file = f"file://{folder / 'rendezvous'}"
    distributed.init_process_group("gloo", init_method=store_file, rank=rank, world_size=2)
    world = distributed.group.WORLD
    group = SimpleNamespace(world_size=2, rank_in_group=rank, cpu_group=world, device_group=world)
    for name, ranks in (("alone", Ranks()), ("together", Ranks(group))):
        with opened(None) as store:
            DOCUMENT.put(store)
            found = answered(stage_of(store, ByRank(rank), ranks), store)
        (folder / f"{name}-{rank}").write_text(str(found))
    distributed.destroy_process_group()


def test_ranks_whose_analyses_differ_choose_the_same_tokens(
    two_ranks: Callable[..., None], tmp_path: Path
) -> None:
    two_ranks(one_of_two, tmp_path)
    alone, together = (
        [(tmp_path / f"{name}-{rank}").read_text() for rank in range(2)] for name in ("alone", "together")
    )
    assert alone[0] != alone[1], "else the test shows nothing"
    assert together == [alone[0]] * 2


def test_selections_all_begin_before_one_waits_for_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as store:
        DOCUMENT.put(store)
        flushed(store)
        stage = stage_of(store, Analyser())
        told: list[str] = []

        def begin(*args: Any) -> Callable[[], None]:
            told.append("begins")
            return lambda: told.append("ends")

        monkeypatch.setattr(stage, "_selector", selector(begin))
        contexts = [waiting() for _ in range(3)]
        for context in contexts:
            stage.add(context)
        stage.advance()
        assert told == ["begins"] * 3 + ["ends"] * 3
        assert all(context.decided is not None for context in contexts)


DOCUMENTS = [Sample(3 + n, tokens) for n, tokens in enumerate((24, 40, 50))]


def about(*documents: Sample, rule: str = "sensitivity") -> ComposedContext:
    """A request with these documents that recomputes by a rule."""
    spans, ids = [Span(0, 10)], [*SYSTEM.ids]
    for document in documents:
        spans.append(Span(len(ids), len(ids) + len(document.ids)))
        ids += document.ids
    plan = ContextPlan("compose", "default", "concat", tuple(spans), {"recompute": rule, "share": 0.2})
    partial = partial_selection(plan, ModelShape(LAYERS, cut=Analyser.cut))
    keys = (SYSTEM.key, *(document.key for document in documents))
    return ComposedContext(plan, array("q", [*ids, 7, 8, 9]), keys, partial)


def advanced(stage: SelectionStage, *contexts: ComposedContext) -> None:
    for context in contexts:
        stage.add(context)
    for _ in range(2):
        stage.advance()


def test_documents_are_analysed_in_one_pass_and_a_broken_one_fails_its_own_requests_alone() -> None:
    with opened(None) as store:
        for document in DOCUMENTS:
            document.put(store)
        analyser = Analyser()
        good, other, bad = about(*DOCUMENTS[:2]), about(DOCUMENTS[1]), about(DOCUMENTS[0], DOCUMENTS[2])
        analyser.broken = {50}
        advanced(stage_of(store, analyser), good, other, bad)
        assert analyser.passes[:4] == [[24, 40, 50], [24], [40], [50]]
        assert (good.failure, other.failure) == (None, None)
        assert good.decided is not None
        assert "no such row" in str(bad.failure)


def test_more_documents_than_a_pass_may_have_take_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_analyses, "TOGETHER", 70)
    with opened(None) as store:
        for document in DOCUMENTS:
            document.put(store)
        analyser = Analyser()
        context = about(*DOCUMENTS)
        advanced(stage_of(store, analyser), context)
        assert analyser.passes == [[24, 40], [50]]
        assert context.decided is not None


def test_rule_sentences_does_without_a_sensitivity_that_is_not_known_yet() -> None:
    with opened(None) as store:
        for document in DOCUMENTS:
            document.put(store)
        analyser = Analyser()
        stage = stage_of(store, analyser, complete=False)
        known = DOCUMENTS[0]
        whole = analyser.analyse(known.ids, analyser.cut)
        store.put_summary(known.key, whole.encode())
        store.put_summary(DOCUMENTS[1].key, analyser.analyse(DOCUMENTS[1].ids, analyser.cut).part().encode())
        context = about(*DOCUMENTS, rule="sentences")
        advanced(stage, context)
        assert context.failure is None
        assert context.decided is not None
        assert context.unknown == [2, 3]
        assert not analyser.passes, "nothing was computed for it"
        known_tokens = len(known.ids)
        own = Kept(context.plan, context.selection.kept, context.in_order).sensitivity
        assert torch.equal(own[:known_tokens], whole.sensitivity)
        torch.testing.assert_close(own[known_tokens:], whole.sensitivity.mean().expand(90))
        needs_it = about(*DOCUMENTS, rule="sensitivity")
        advanced(stage, needs_it)
        assert sorted(itertools.chain(*analyser.passes)) == [40, 50], "this rule knows nothing else"
        assert needs_it.unknown == []


@pytest.mark.parametrize("measured", [True, False])
def test_rule_sentences_waits_for_it_where_answers_are_measured_or_the_server_is_told_so(
    measured: bool,
) -> None:
    with opened(None) as store:
        DOCUMENTS[0].put(store)
        analyser = Analyser()
        context = about(DOCUMENTS[0], rule="sentences")
        context.complete = measured
        advanced(stage_of(store, analyser, complete=not measured), context)
        assert analyser.passes == [[24]]
        assert context.unknown == []


def ingested(stage: SelectionStage) -> list[Any]:
    """Complete the prefill of all documents, which are to be analysed. Return their requests."""
    contexts: Any = Composition.__new__(Composition)
    contexts.analyses, contexts._timer = stage.analyses, None
    contexts.composer = SimpleNamespace(gather=SimpleNamespace(finish=lambda: None))
    contexts._documents = SimpleNamespace(follow=lambda batch: [], run=None)
    own = [DocumentRequest(each.key, "default", array("q", each.ids), analyse=True) for each in DOCUMENTS]
    reqs = [request_shapes.request(end=len(each.ids), ragserve=each) for each in own]
    contexts.after_forward(SimpleNamespace(reqs=reqs))
    return reqs


@pytest.mark.parametrize("rule", ["sentences", "sensitivity"])
def test_a_cpu_computes_the_sensitivity_of_long_documents_for_rules_only_that_know_nothing_else(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document_analyses, "_LONGEST_ON_CPU", 30)
    monkeypatch.setattr(composition, "TOGETHER", 30)  # of the step that prefills a document
    with opened(None) as store:
        for document in DOCUMENTS:
            document.put(store)
        analyser = Analyser()
        stage = stage_of(store, analyser)
        ingested(stage)
        assert analyser.passes == [[24]], "the others have 40 and 50 tokens"
        context = about(*DOCUMENTS, rule=rule)
        advanced(stage, context)
        assert context.decided is not None
        assert sorted(itertools.chain(*analyser.passes)) == ([24] if rule == "sentences" else [24, 40, 50])
        assert context.unknown == ([2, 3] if rule == "sentences" else [])


def analysed(store: TierStore, *documents: Sample) -> None:
    """Put documents with their analyses into the tiers."""
    for document in documents:
        document.put(store)
        store.put_summary(document.key, Analyser().analyse(document.ids, Analyser.cut).encode())


@pytest.mark.parametrize("rule", ["sensitivity", "sentences", "anchors"])
def test_a_request_with_its_selection_keeps_nothing_on_the_device(rule: str) -> None:
    """It may wait for room for long, and many of them."""
    with opened(None) as store:
        analysed(store, *DOCUMENTS)
        analyser: Any = Analyser()
        analyser.critical_layers = (1,)
        context = about(*DOCUMENTS, rule=rule)
        advanced(stage_of(store, analyser), context)
    assert context.decided is not None
    assert context.selection.needs_question_attention == (rule != "sensitivity")
    if rule == "sensitivity":
        assert context.in_order == []
        return
    whole = [analyser.analyse(each.ids, Analyser.cut) for each in DOCUMENTS]
    for own in context.in_order:
        for name in ("mean_k", "mean_k_scale", "local_q", "local_q_scale", "token_k", "token_k_scale"):
            assert not getattr(own, name).nbytes, name
    kept, wanted = (Kept(context.plan, context.selection.kept, each) for each in (context.in_order, whole))
    for got, want in zip(anchors_of(kept, LAYERS), anchors_of(wanted, LAYERS), strict=True):
        assert torch.equal(got, want)
    attention = torch.rand(114, generator=torch.Generator().manual_seed(1))
    got, want = (
        context.partial.recomputed(context.selection.kept, each, attention)
        for each in (context.in_order, whole)
    )
    assert torch.equal(got, want)
