"""Analyses that take several scheduler steps: what they leave to other requests, and when they end early."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.analysis.document_analysis import Analysis, Cut
from sglang_ext.context.compose.request import ComposedContext
from sglang_ext.context.scheduler import document_analyses
from sglang_ext.context.scheduler.composition import Composition
from sglang_ext.context.scheduler.document_analyses import WantedAnalysis
from sglang_ext.context.scheduler.release_queue import ReleaseQueue
from sglang_ext.context.scheduler.selection_stage import SelectionStage
from sglang_ext.context.selection.base import Wanted
from sglang_ext.documents.tier_store import TierStore
from sglang_ext.process import hook_functions
from tests.unit.context.scheduler.test_selection_stage import (
    DOCUMENT,
    DOCUMENTS,
    Analyser,
    about,
    analysed,
    stage_of,
)
from tests.unit.documents.document_samples import Sample, opened

A_STEP = 7  # tokens
LENGTH = 101
LONG = Sample(9, LENGTH)


@pytest.fixture(autouse=True)
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_analyses, "_CPU_STEP_TOKENS", A_STEP)


def begun(store: TierStore, analyser: Analyser, *contexts: ComposedContext) -> SelectionStage:
    """A stage in which the analyses of these requests have had one step."""
    stage = stage_of(store, analyser)
    for context in contexts:
        stage.add(context)
    stage.advance()
    assert stage.analyses._passes
    return stage


def finished(stage: SelectionStage) -> int:
    """Advance until nobody waits; the number of steps."""
    for count in range(1, 100):
        stage.advance()
        if not stage.waits:
            return count
    raise AssertionError("it does not end")


def test_a_step_does_so_many_tokens_and_other_requests_go_on() -> None:
    with opened(None) as store:
        LONG.put(store)
        analysed(store, DOCUMENT)
        analyser, slow = Analyser(), about(LONG)
        stage = begun(store, analyser, slow)
        assert analyser.pieces == A_STEP
        other = about(DOCUMENT)
        stage.add(other)
        stage.advance()
        assert other.decided is not None
        assert slow.decided is None
        assert analyser.pieces == 2 * A_STEP
        assert finished(stage) == -(-LENGTH // A_STEP) - 2
        assert slow.decided is not None
        assert analyser.passes == [[LENGTH]]
        assert stage.analyses.stat() | {"computed": 1, "whole": 1} == stage.analyses.stat()
        assert not stage.analyses._passes


def test_short_documents_do_not_wait_for_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """While both kinds wait a step is divided between them, so that a long one does not wait for ever."""
    monkeypatch.setattr(document_analyses, "TOGETHER", 60)
    with opened(None) as store:
        short = [Sample(30, 10), DOCUMENTS[0]]
        for document in (LONG, *short, DOCUMENTS[2]):
            document.put(store)
        analyser, slow = Analyser(), about(LONG)
        stage = begun(store, analyser, slow)
        for document in short:
            other = about(document)
            stage.add(other)
            steps = 0
            while other.decided is None:
                before = analyser.pieces
                stage.advance()
                steps += 1
                assert analyser.pieces - before <= A_STEP
            assert steps == len(document.ids) // (A_STEP // 2) + 1
            assert slow.decided is None
        assert analyser.passes == [[LENGTH], [10], [24]]
        stage.add(about(DOCUMENTS[2]))
        for _ in range(12):
            stage.advance()
        assert slow.decided is not None
        assert stage.waits
        finished(stage)
        assert not stage.analyses._passes


def test_an_analysis_goes_on_while_sglang_has_no_room_for_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang offers no request for admission while the batch is full: of a step only its hook runs."""
    with opened(None) as store:
        LONG.put(store)
        analyser, context = Analyser(), about(LONG)
        composition: Any = Composition.__new__(Composition)
        composition.releases, composition.stage = ReleaseQueue(), stage_of(store, analyser)
        composition.stage.add(context)
        monkeypatch.setattr(hook_functions.current, "runtime", SimpleNamespace(composition=composition))
        monkeypatch.setattr(hook_functions.current, "attention", None)
        grammars = SimpleNamespace(grammar_queue=[])
        queue = [SimpleNamespace(ragserve=context)]
        scheduler = SimpleNamespace(waiting_queue=queue, grammar_manager=grammars)
        for step in range(1, LENGTH // A_STEP + 1):
            hook_functions.before_schedule(scheduler, None)
            assert (analyser.pieces, context.decided) == (step * A_STEP, None)
        hook_functions.before_schedule(scheduler, None)
        assert context.decided is not None


def test_what_was_analysed_in_steps_is_stored() -> None:
    with opened(None) as store:
        LONG.put(store)
        analyser = Analyser()
        finished(begun(store, analyser, about(LONG)))
        context = about(LONG)
        stage = stage_of(store, analyser)
        stage.add(context)
        stage.advance()
        assert context.decided is not None
        assert analyser.passes == [[LENGTH]], "another start reads it"


def test_several_short_documents_share_a_step() -> None:
    with opened(None) as store:
        short = [Sample(20 + n, 2) for n in range(3)]
        for document in short:
            document.put(store)
        analyser, context = Analyser(), about(*short)
        stage = stage_of(store, analyser)
        stage.add(context)
        stage.advance()
        assert context.decided is not None
        assert analyser.passes == [[2, 2, 2]]


def test_a_part_does_not_replace_a_whole_analysis_that_came_meanwhile() -> None:
    with opened(None) as store:
        LONG.put(store)
        analyses = stage_of(store, Analyser()).analyses
        name = LONG.key, Analyser.cut.block, Analyser.cut.local_blocks
        wanted = {name: WantedAnalysis(LONG.ids, Analyser.cut, Wanted.KEYS)}
        assert analyses.find(wanted, lambda name, message: None) == {}
        whole = analyses.analyse(LONG.key, LONG.ids)  # with a warm-up, which stores it
        store.put_summary(LONG.key, whole.encode())
        while analyses._passes:
            analyses.find({}, lambda name, message: None)
        assert analyses._cache.get(*name) is whole
        assert Analysis.decode(store.summary(LONG.key).data or b"", LENGTH).is_whole


Leave = Callable[[SelectionStage, ComposedContext], None]


def aborted(stage: SelectionStage, context: ComposedContext) -> None:
    stage.drop_gone([])


def retracted(stage: SelectionStage, context: ComposedContext) -> None:
    stage.drop(context)


def removed(stage: SelectionStage, context: ComposedContext) -> None:
    stage.analyses.forget([LONG.key])


def evicted(stage: SelectionStage, context: ComposedContext) -> None:
    """In no tier any more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage._locator, "resolve", lambda context: [1])
        stage.advance()


@pytest.mark.parametrize("leave", [aborted, retracted, removed, evicted])
def test_an_analysis_that_nobody_needs_any_more_frees_what_it_has_done(leave: Leave) -> None:
    with opened(None) as store:
        for document in (LONG, DOCUMENT):
            document.put(store)
        analyser, context = Analyser(), about(LONG)
        stage = begun(store, analyser, context)
        leave(stage, context)
        assert analyser.freed == [[LENGTH]]
        assert not stage.analyses._passes
        stage.drop_gone([])
        other = about(DOCUMENT)
        stage.add(other)
        finished(stage)
        assert other.decided is not None


def test_an_analysis_that_another_request_needs_goes_on() -> None:
    with opened(None) as store:
        LONG.put(store)
        analyser, gone, stays = Analyser(), about(LONG), about(LONG)
        stage = begun(store, analyser, gone, stays)
        stage.drop(gone)
        finished(stage)
        assert stays.decided is not None
        assert analyser.passes == [[LENGTH]]


@pytest.mark.parametrize("keys", [[DOCUMENTS[0].key], None], ids=["one", "any"])
def test_an_analysis_of_a_document_that_is_removed_meanwhile_is_not_kept(keys: list[str] | None) -> None:
    with opened(None) as store:
        for document in DOCUMENTS[:2]:
            document.put(store)
        context = about(*DOCUMENTS[:2])
        stage = begun(store, Analyser(), context)
        store.remove(DOCUMENTS[0].key, "default")
        stage.analyses.forget(keys)
        finished(stage)
        assert context.decided is not None, "here its KV was found all the same"
        kept = {name[0] for name in stage.analyses._cache._entries}
        assert kept == ({DOCUMENTS[1].key} if keys else set())
        assert store.summary(DOCUMENTS[0].key).data is None
        assert store.summary(DOCUMENTS[1].key).data is not None


class Failing(Analyser):
    """Fails in the middle of a pass with a document of 50 tokens."""

    def in_pieces(
        self, documents: Sequence[Sequence[int]], cut: Cut, *, whole: bool = True
    ) -> Generator[float, None, list[Analysis]]:
        made = super().in_pieces(documents, cut, whole=whole)
        for done in range(1000):
            if done == 2 * A_STEP + 1 and 50 in map(len, documents):
                raise MemoryError("no room")
            try:
                yield next(made)
            except StopIteration as end:
                found: list[Analysis] = end.value
                return found
        raise AssertionError("it has more pieces than tokens")


def test_a_failure_in_a_later_step_fails_that_analysis_alone() -> None:
    with opened(None) as store:
        for document in (*DOCUMENTS, LONG):
            document.put(store)
        analyser = Failing()
        good, bad, later = about(*DOCUMENTS[:2]), about(DOCUMENTS[0], DOCUMENTS[2]), about(LONG)
        stage = begun(store, analyser, good, bad, later)
        finished(stage)
        assert (good.failure, later.failure) == (None, None)
        assert good.decided is not None
        assert later.decided is not None
        assert "out of memory" in str(bad.failure)
        assert not stage.analyses._passes
        assert not stage.analyses._alone
