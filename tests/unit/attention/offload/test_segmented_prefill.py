"""Requests whose prompt the pool cannot take: what SGLang sees of them, when they are prefilled by segments,
and that nothing stays behind of those that fail or leave."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_policy import AddReqResult

from sglang_ext.attention.decode.decode_state import DecodeState
from sglang_ext.attention.decode.step_planner import StepPlanner
from sglang_ext.attention.offload import segmented_prefill
from sglang_ext.attention.offload.segmented_prefill import SegmentedPrefill
from sglang_ext.kv_offload.host_admission import HostAdmission
from sglang_ext.stages import stages
from sglang_ext.state import current
from sglang_ext.wire.attention_config import AttentionConfig
from sglang_ext.wire.protocol import DecodeOptions
from tests.unit.kv_offload.offloaded_bench import DIM, HEADS, LAYERS, POOL, Bench

PAGE = 16
LONG = POOL * PAGE + 5
HOST = 2 * POOL  # pages


class Request(SimpleNamespace):
    """SGLang's, as far as admission needs it."""

    def __init__(self, tokens: int, **options: Any) -> None:
        offloading = {
            "mode": "hierarchical",
            "budget": 4 * PAGE,
            "dense_below": 0,
            "offloaded": True,
        } | options
        super().__init__(
            rid="r",
            origin_input_ids=array("q", range(tokens)),
            output_ids=[],
            sampling_params=SimpleNamespace(max_new_tokens=8, custom_params=None),
            ragserve_decode=DecodeState(DecodeOptions(**offloading)),
            return_logprob=False,
            logprob_start_len=-1,
            return_hidden_states=False,
            input_embeds=None,
            multimodal_inputs=None,
            session=None,
            to_finish=None,
            full_untruncated_fill_ids=array("q"),
            finished=lambda: False,
        )
        self.origin_input_ids_unpadded = self.origin_input_ids

    def init_next_round_input(self, tree: Any) -> None:
        self.full_untruncated_fill_ids = self.origin_input_ids + array("q", self.output_ids)


class Segments:
    """Four units, in place of a model's; K is the token's id in every layer, V its negative."""

    def __init__(self, runner: Any, ids: torch.Tensor, chunk: int, write: Callable[..., None]) -> None:
        self.ids, self.write, self.left = ids, write, 4

    def advance(self, tokens: int) -> None:
        if self.left == 4:
            k = self.ids.float()[:, None, None].expand(-1, HEADS, DIM).contiguous()
            for layer in range(LAYERS):
                self.write(layer, 0, k, -k)
        self.left -= 1


class Scheduler:
    """SGLang's queue of one request, over a bench; ``running``: others that hold the pool."""

    def __init__(
        self, req: Request, monkeypatch: pytest.MonkeyPatch, host: int = HOST, **config: Any
    ) -> None:
        monkeypatch.setattr(segmented_prefill, "LayerSegments", Segments)
        monkeypatch.setattr(current, "runtime", SimpleNamespace(composition=object()))
        self.bench, self.req = Bench(host=host), req
        runner = SimpleNamespace(
            device="cpu",
            server_args=SimpleNamespace(chunked_prefill_size=64),
            model_config=SimpleNamespace(context_len=8192),
        )
        planner = StepPlanner(AttentionConfig(offload_bytes=1), PAGE, 8192)
        self.segments = SegmentedPrefill(planner, self.bench.rows, self.bench.tree, runner, None)
        self.queue = [req]
        self.admission = HostAdmission(self.bench.rows, self.bench.tree)
        self.added: list[int] = []

    def admit(self, result: AddReqResult = AddReqResult.NO_TOKEN, *, running: bool = True) -> Any:
        """``result``: of SGLang's own admission."""

        def add() -> AddReqResult:
            self.added.append(len(self.req.full_untruncated_fill_ids))
            if result is AddReqResult.CONTINUE:
                adder.can_run_list.append(self.req)
            return result

        batch = SimpleNamespace(is_empty=lambda: not running)
        adder = SimpleNamespace(can_run_list=[], running_batch=batch)
        self.req.init_next_round_input(None)
        return self.segments.admit(adder, self.req, add)

    def schedule(self) -> bool:
        complete = self.segments.before_schedule(self.queue)
        self.admission.drop_gone(self.queue)
        self.bench.rows.check()
        return complete


def test_a_prompt_larger_than_the_pool_is_shown_by_its_end_and_prefilled_before_it_is_admitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    req = Request(LONG)
    engine = Scheduler(req, monkeypatch)
    assert engine.segments.show_end(req) is None
    assert list(req.origin_input_ids) == [LONG - 1]
    assert req.ragserve_on_host, "it has nothing to find in the prefix cache"
    req.return_logprob, req.logprob_start_len = True, 1  # as SGLang sets it for the answer's
    assert engine.admit() is AddReqResult.CONTINUE, "others may go first"
    assert engine.added == []
    assert (len(req.origin_input_ids), req.logprob_start_len) == (LONG, LONG)
    rounds = 0
    while not engine.schedule():
        assert engine.admit() is AddReqResult.CONTINUE
        assert engine.segments.running == 1
        rounds += 1
    assert rounds == 4
    assert engine.segments.running == 0
    assert engine.admit() is None, "its KV is on the host: see `OffloadedRequests.admit`"
    prefix = req.ragserve_decode.offload.prefix
    assert (prefix.tokens, prefix.tail, prefix.pages) == (POOL * PAGE, [], POOL)
    assert req.ragserve_decode.counts.segmented_tokens == prefix.tokens
    k = engine.bench.pages.pool[prefix.numbers][:, 0, LAYERS - 1, HEADS - 1, :, DIM - 1]
    assert k.flatten().tolist() == list(range(POOL * PAGE))
    assert (req.already_computed, req._cache_breakdown_computed) == (POOL * PAGE, True), "no cache hits"


def test_what_fits_is_prefilled_by_segments_only_where_the_pool_has_no_room_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for offloaded, result, begins in (
        (True, AddReqResult.NO_TOKEN, True),
        (True, AddReqResult.CONTINUE, False),
        (True, AddReqResult.OTHER, False),
        ("auto", AddReqResult.NO_TOKEN, False),  # those that run leave the pool to it
        (False, AddReqResult.NO_TOKEN, False),
    ):
        req = Request(20 * PAGE, offloaded=offloaded)
        engine = Scheduler(req, monkeypatch)
        assert engine.segments.show_end(req) is None
        got = engine.admit(result)
        assert engine.segments.running == begins, (offloaded, result)
        if begins:
            assert got is AddReqResult.CONTINUE
        else:
            assert got is (result if offloaded is True else None), "as SGLang says, or not asked"
        assert engine.bench.pages.used == 19 * begins, "its last token is left to SGLang"
    few = Request(5 * PAGE)  # no more pages than its resident blocks
    engine = Scheduler(few, monkeypatch)
    assert engine.admit() is AddReqResult.NO_TOKEN
    assert (engine.bench.pages.used, few.ragserve_decode.prompt.segmented) == (0, False)


def test_segments_follow_the_copies_of_those_who_had_the_host_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads write to host pages, and copies of a request that has left may still be under way there."""
    engine, order = Scheduler(Request(LONG), monkeypatch), []
    join, allocate = engine.bench.rows.copies.join, engine.bench.pages.allocate
    monkeypatch.setattr(engine.bench.rows.copies, "join", lambda: (order.append("join"), join()))
    monkeypatch.setattr(
        engine.bench.pages, "allocate", lambda *args: (order.append("allocate"), allocate(*args))[1]
    )
    monkeypatch.setattr(
        Segments, "advance", lambda self, _: (order.append("segment"), setattr(self, "left", self.left - 1))
    )
    engine.segments.show_end(engine.req)
    engine.admit()
    engine.schedule()
    assert order == ["allocate", "join", "segment"]


@pytest.mark.parametrize("after", [0, 1, 3])
def test_one_that_leaves_the_queue_leaves_nothing(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    req = Request(LONG)
    engine = Scheduler(req, monkeypatch)
    engine.segments.show_end(req)
    engine.admit()
    for _ in range(after):
        assert not engine.schedule()
    assert engine.bench.pages.used == POOL
    engine.queue.clear()
    assert not engine.schedule()
    assert (engine.segments.running, engine.bench.pages.used) == (0, 0)


@pytest.mark.parametrize("begins", [True, False], ids=["beginning", "segment"])
def test_one_that_fails_ends_with_an_error_and_its_host_pages_are_free(
    monkeypatch: pytest.MonkeyPatch, begins: bool
) -> None:
    req = Request(LONG)
    engine = Scheduler(req, monkeypatch)
    engine.segments.show_end(req)
    monkeypatch.setenv(stages.FAULTS_VARIABLE, "1")
    if not begins:
        engine.admit()
        engine.schedule()
    stages.inject("segments")
    if not begins:
        assert not engine.schedule()
        assert engine.segments.running == 0
    assert engine.admit(AddReqResult.CONTINUE) is AddReqResult.CONTINUE
    assert engine.added == [1], "SGLang reports it with a prompt of one token"
    assert "'segments'" in req.to_finish.message
    assert req.to_finish.status_code == 500
    assert (engine.bench.pages.used, req.ragserve_on_host) == (0, False)
    engine.schedule()


def test_without_host_pages_it_waits_for_those_of_others_and_ends_where_there_are_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    req = Request(LONG)
    engine = Scheduler(req, monkeypatch, host=POOL - 1)
    engine.segments.show_end(req)
    assert engine.admit(running=True) is AddReqResult.CONTINUE
    assert (engine.added, engine.segments.running, req.to_finish) == ([], 0, None)
    engine.admit(AddReqResult.CONTINUE, running=False)
    assert engine.added == [1]
    assert f"the prompt takes {LONG} tokens" in req.to_finish.message
    assert "raise kv_offload_bytes" in req.to_finish.message


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        ({"ragserve_prefill": object()}, "sparse prefill"),
        ({"return_hidden_states": True}, "hidden states"),
        ({"input_embeds": [0.0]}, "input embeddings"),
        ({"session": object()}, "a session"),
    ],
)
def test_what_segments_cannot_give_is_refused(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], what: str
) -> None:
    req, short = Request(LONG), Request(20 * PAGE)
    vars(req).update(asked)
    vars(short).update(asked)
    engine = Scheduler(req, monkeypatch)
    reason = engine.segments.show_end(req)
    assert reason is not None
    assert what in reason
    assert len(req.origin_input_ids) == LONG
    assert engine.segments.show_end(short) is None, "the pool may take it"


def test_log_probabilities_of_the_prompt_are_refused_once_they_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    req = Request(LONG)
    req.return_logprob, req.logprob_start_len = True, 0  # SGLang's default for a new request
    engine = Scheduler(req, monkeypatch)
    assert engine.segments.show_end(req) is None
    engine.admit(AddReqResult.CONTINUE)
    assert "log-probabilities of the prompt" in req.to_finish.message
    assert req.to_finish.status_code == 400


def test_it_is_one_prompt_at_a_time_and_only_offloaded_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    req, other = Request(LONG), Request(LONG)
    engine = Scheduler(req, monkeypatch)
    for each in (req, other):
        engine.segments.show_end(each)
    engine.admit()
    engine.req = other
    assert engine.admit() is AddReqResult.CONTINUE, "it waits for its turn"
    assert other.ragserve_decode.offload.prefix is None
    for plain in (
        Request(LONG, offloaded=False),
        Request(LONG, mode="dense"),
        Request(LONG, dense_below=LONG + 1),
    ):
        assert engine.segments.show_end(plain) is None
        assert len(plain.origin_input_ids) == LONG, "SGLang refuses it"
    composed = Request(LONG)
    composed.ragserve = object()
    assert engine.segments.show_end(composed) is None
    assert len(composed.origin_input_ids) == LONG
