"""Requests that wait for their selection: those that have left SGLang's queue, and those that fail."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.context.compose.request import ComposedContext
from sglang_ext.context.scheduler.document_analyses import DocumentAnalyses
from sglang_ext.context.scheduler.selection_stage import SelectionStage
from sglang_ext.context.selection.base import ModelShape
from sglang_ext.context.selection.strategies import partial_selection
from sglang_ext.documents.summaries import SummaryTicket
from sglang_ext.process import hook_functions
from sglang_ext.ranks.ranks import Ranks
from sglang_ext.wire.protocol import ContextPlan, Span
from tests.unit.context.scheduler.test_selection_stage import (
    DOCUMENT,
    DOCUMENTS,
    Analyser,
    about,
    advanced,
    analysed,
    ingested,
    stage_of,
)
from tests.unit.documents.document_samples import opened


class Bench:
    """A stage over tiers that are still reading every stored analysis."""

    def __init__(self, *names: str) -> None:
        self.located: list[str] = []
        self.read: list[str] = []
        self.broken: set[str] = set()
        locator: Any = SimpleNamespace(resolve=self.resolve, unlock=lambda context: None)
        tiers: Any = SimpleNamespace(summary=self.summary)
        analyser: Any = SimpleNamespace(heads=[], cut=None, block_of=lambda n, cut: 4)
        nothing: Any = SimpleNamespace(batches=lambda contexts: iter(contexts))
        self.stage = SelectionStage(
            SimpleNamespace(device="cpu"),
            locator=locator,
            tiers=tiers,
            analyser=analyser,
            query_pass=nothing,
            selector=nothing,
            ranks=Ranks(),
            analyses=DocumentAnalyses(analyser, tiers, Ranks(), device="cpu", memory_bytes=2**20),
        )
        plan = ContextPlan("compose", "n", "samkv", (Span(0, 4), Span(4, 20)), {})
        self.requests = {}
        for name in names:
            context = ComposedContext(
                plan, array("q", range(23)), ("system", name), partial_selection(plan, ModelShape(2))
            )
            self.requests[name] = SimpleNamespace(ragserve=context)
            self.stage.add(context)

    def resolve(self, context: ComposedContext) -> list[int]:
        self.located.append(context.keys[1])
        if context.keys[1] in self.broken:
            raise OSError("the disk is gone")
        return []

    def summary(self, key: str) -> SummaryTicket:
        self.read.append(key)
        if key in self.broken:
            raise OSError("the disk is gone")
        return SummaryTicket()

    def step(self) -> None:
        self.located.clear()
        self.read.clear()
        self.stage.advance()


def test_an_error_outside_a_stage_fails_those_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or they would meet it again in every step."""
    bench = Bench("one")
    runtime = SimpleNamespace(composition=SimpleNamespace(stage=bench.stage, before_schedule=lambda _: 1 / 0))
    monkeypatch.setattr(hook_functions.current, "runtime", runtime)
    monkeypatch.setattr(hook_functions.current, "attention", None)
    hook_functions.before_schedule(None, None)
    assert "ZeroDivisionError" in str(bench.requests["one"].ragserve.failure)


def test_requests_that_left_the_queue_are_worked_for_no_longer() -> None:
    bench = Bench("stays", "leaves")
    bench.step()
    assert bench.located == bench.read == ["stays", "leaves"]
    bench.stage.drop_gone([bench.requests["stays"], SimpleNamespace()])
    bench.step()
    assert bench.located == ["stays"]
    bench.stage.drop_gone([SimpleNamespace()])
    assert not bench.stage.waits, "nothing keeps what nobody waits for"


def test_a_read_that_only_they_wanted_is_forgotten() -> None:
    bench = Bench("shared", "shared", "alone")
    bench.step()
    assert bench.read == ["shared", "alone"]
    bench.stage.drop_gone([bench.requests["shared"]])
    assert set(bench.stage.analyses._reads) == {"shared"}


@pytest.mark.parametrize("where", ["documents", "analyses"])
def test_a_request_that_fails_leaves_the_others_alone(where: str) -> None:
    bench = Bench("good", "bad")
    bench.broken = {"bad"}
    if where == "analyses":
        bench.resolve = lambda context: []  # type: ignore[method-assign]
        bench = bench_with_documents(bench)
    bench.step()
    good, bad = (bench.requests[name].ragserve for name in ("good", "bad"))
    assert good.failure is None
    assert "the disk is gone" in str(bad.failure)
    bench.stage.drop_gone(bench.requests.values())
    bench.step()
    assert "bad" not in bench.located, "a failed request is not worked for again"
    assert bench.stage.waits


def bench_with_documents(bench: Bench) -> Bench:
    """The same, with documents that are found."""
    bench.stage._locator.resolve = lambda context: bench.located.append(context.keys[1]) or []  # type: ignore[func-returns-value,method-assign]
    return bench


def test_a_document_whose_analysis_fails_is_prefilled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass of the analysis has two copies of it, which may be out of memory."""

    def failing(key: str, ids: Any) -> None:
        raise torch.OutOfMemoryError

    with opened(None) as store:
        analyser = Analyser()
        stage = stage_of(store, analyser)
        monkeypatch.setattr(stage.analyses, "analyse", failing)
        for req in ingested(stage):
            assert req.ragserve.analysis is None
            assert getattr(req, "to_finish", None) is None
            assert not getattr(req, "ragserve_private", False), "its KV is cached"
        for document in DOCUMENTS:
            document.put(store)
        context = about(*DOCUMENTS, rule="sensitivity")
        advanced(stage, context)
        assert (context.failure, context.unknown) == (None, [])


def test_waiting_requests_hold_no_more_analyses_than_the_budget() -> None:
    """The first one goes on in any case, and each that has its selection makes room for the next."""
    with opened(None) as store:
        analysed(store, *DOCUMENTS, DOCUMENT)
        stage = stage_of(store, Analyser(), memory_bytes=1)
        contexts = [about(*DOCUMENTS[:2]), about(DOCUMENTS[2]), about(DOCUMENT)]
        for context in contexts:
            stage.add(context)
        for settled in (1, 2, 3):
            stage.advance()
            assert [context.decided is not None for context in contexts] == [n < settled for n in range(3)]
        assert not stage.waits


def test_what_a_request_waits_with_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(None) as store:
        analysed(store, *DOCUMENTS, DOCUMENT)
        analyser = Analyser()
        nbytes = [analyser.analyse(each.ids, Analyser.cut).nbytes for each in DOCUMENTS]
        stage = stage_of(store, analyser, memory_bytes=nbytes[0] + nbytes[1])
        read = store.summary
        slow = [DOCUMENTS[2].key]
        monkeypatch.setattr(store, "summary", lambda key: SummaryTicket() if key in slow else read(key))
        waits, second, last = about(DOCUMENTS[2]), about(*DOCUMENTS), about(DOCUMENT)
        advanced(stage, waits, second, last)
        assert len(second.in_order) == 2
        assert last.in_order == []
        assert last.decided is None, "the second holds all that the budget has"
        slow.clear()
        stage.analyses.work_for(())  # begins to read again
        for _ in range(3):
            stage.advance()
        assert all(each.decided is not None for each in (waits, second, last))
