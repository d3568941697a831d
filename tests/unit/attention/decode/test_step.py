"""Around the kernels: a step's tables, captured variants, engine checks, and the account of reads."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ragserve_kernels.sparse_decode import FULL, SELECTED, STREAMING
from sglang_ext.attention.decode.decode_state import DecodeState, Row
from sglang_ext.attention.decode.observed_queries import ObservedQueries
from sglang_ext.attention.decode.prompt_queries import PromptQueries
from sglang_ext.attention.decode.step_planner import IDLE, Selects, Step, StepPlanner, Variant
from sglang_ext.attention.decode.tables import StepTables, TableShape
from sglang_ext.wire.attention_config import AttentionConfig
from sglang_ext.wire.protocol import DecodeOptions, PlanError
from tests.unit import request_shapes

SHAPE = TableShape(
    layers=2, heads=4, kv_heads=2, pages=20, capacity=9, page_size=16, head_dim=64, dtype=torch.float32
)
PATTERN = torch.tensor([[True, False], [False, False]])


def row(mode: str, *, sparse: bool = True, tokens: int = 300, **options: Any) -> Row:
    return Row(DecodeState(DecodeOptions(mode=mode, **options)), tokens, sparse)  # type: ignore[arg-type]


def tables() -> StepTables:
    return StepTables(6, SHAPE, torch.device("cpu"), PATTERN)


def test_dense_layers_read_everything_whatever_the_budget() -> None:
    shape = replace(SHAPE, layers=4, dense_layers=(0, -1))
    step = StepTables(2, shape, torch.device("cpu"), None)
    step.set_rows((row("hierarchical", budget=64), row("progressive")))
    assert step.kinds[:, 0].tolist() == [[FULL] * 2, [SELECTED] * 2, [SELECTED] * 2, [FULL] * 2]
    assert (step.kinds[:, 1] == SELECTED).all(), "ranked heads read what their threshold asks for"


def test_kinds_budgets_and_ranks_by_row() -> None:
    step = tables()
    step.set_rows(
        (
            row("dense", sparse=False),
            row("hierarchical", budget=64, streaming=True),
            row("progressive", threshold=0.5),
            row("progressive", streaming=True),
            row("hierarchical", budget=4096, sparse=False),
        )
    )
    assert step.kinds[0].tolist() == [
        [FULL] * 2,
        [STREAMING, SELECTED],
        [SELECTED] * 2,
        [STREAMING, SELECTED],
        [FULL] * 2,
        [FULL] * 2,
    ]
    assert step.kinds[1].tolist() == [
        [FULL] * 2,
        [SELECTED] * 2,
        [SELECTED] * 2,
        [SELECTED] * 2,
        [FULL] * 2,
        [FULL] * 2,
    ]
    assert step.by_rank[0].tolist() == [[0, 0], [0, 0], [1, 1], [0, 1], [0, 0], [0, 0]]
    assert step.budgets.tolist()[:2] == [8, 4], "2048 tokens are capped at the tables' width, 64 are 4 pages"
    assert step.thresholds.tolist()[2] == 0.5
    step.counts.fill_(3)
    step.set_rows((row("dense", sparse=False),), (-1,))
    assert not step.kinds.any()
    assert not step.counts.any(), "selections of other requests are forgotten"


def test_chosen_pages_move_with_their_rows_and_a_new_page_joins_them() -> None:
    step = tables()
    by_budget = row("hierarchical", budget=64)
    step.set_rows((row("dense", sparse=False), by_budget, by_budget))
    step.index.copy_(torch.arange(step.index.numel(), dtype=torch.int32).view_as(step.index))
    step.counts.fill_(4)
    before = step.index.clone()
    step.set_rows((by_budget, by_budget, row("progressive"), by_budget), (2, -1, -1, 1))
    assert step.counts[:, :4, 0].tolist() == [[4, 0, 0, 4]] * 2
    assert torch.equal(step.index[:, 0, :, :4], before[:, 2, :, :4])
    assert torch.equal(step.index[:, 3, :, :4], before[:, 1, :, :4])
    larger = StepTables(12, SHAPE, torch.device("cpu"), PATTERN)
    larger.adopt(step)
    assert torch.equal(larger.index[:, :6], step.index)
    assert torch.equal(larger.counts[:, :6], step.counts)
    step.open_pages({3: 17})
    assert step.counts[:, :4, 1].tolist() == [[4, 0, 0, 5]] * 2
    assert torch.equal(step.index[:, 3, :, :4], before[:, 1, :, :4])
    assert (step.index[:, 3, :, 4] == 17).all()


def test_lengths_and_pages_are_those_of_the_request_table() -> None:
    table = torch.zeros(4, 320, dtype=torch.int32)
    for request, first in ((1, 50), (3, 7)):
        table[request] = first * 16 + torch.arange(320)
    step = tables()
    step.set_rows((row("progressive"), row("hierarchical")))
    step.set_lengths(table, torch.tensor([3, 1]), torch.tensor([100, 40]), 100)
    assert step.lens.tolist()[:2] == [100, 40]
    assert step.ranked_lens.tolist()[:2] == [100, 0]
    assert step.pages[0, :7].tolist() == list(range(7, 14))
    assert step.pages[1, :3].tolist() == [50, 51, 52]
    step.set_lengths(table, torch.tensor([1]), torch.tensor([320]), None)
    assert step.pages[0].tolist() == list(range(50, 70))


def planned(*rows: Row, active: bool = True, kept: tuple[int, ...] = (), **more: Any) -> Step:
    selects = (Selects.NOW if active else Selects.NO,) * len(rows)
    whole = {"selects": selects, "opened": (False,) * len(rows), "kept": kept or (-1,) * len(rows)}
    return Step(rows=rows, changed=True, **(whole | more))


def test_means_of_queries_move_with_their_rows_and_begin_with_those_of_the_prompt() -> None:
    step = tables()
    plain, window = row("hierarchical", observe="last"), row("hierarchical", scores="exact")
    prompt = row("hierarchical", observe="prompt")
    prompt.state.queries.show(torch.randn(2, 4, 64), 5)
    step.set_step(planned(plain, window, shares=(1.0, 0.5)))
    assert (step.active[:2].tolist(), step.exact[:2].tolist()) == ([1, 0], [0, 1])
    assert step.shares[:, 0, 0].tolist() == [1, 0.5, 1, 1, 1, 1]
    seen = torch.randn(2, 2, 4, 64)
    step.queries[:, :2] = seen
    step.queries[:, 2:] = torch.nan  # what padding left
    step.set_step(planned(prompt, window, plain, active=False, kept=(-1, 1, -1), shares=(0.0, 0.25, 1.0)))
    assert torch.equal(step.queries[:, 0], prompt.state.queries.shown.mean)
    assert torch.equal(step.queries[:, 1], seen[:, 1])
    assert not step.queries[:, 2:].any()
    assert not step.active.any()
    assert not step.exact.any()
    larger = StepTables(12, SHAPE, torch.device("cpu"), PATTERN)
    larger.adopt(step)
    assert torch.equal(larger.queries[:, :6], step.queries)


def test_the_first_and_the_newest_pages_without_a_query() -> None:
    step = tables()
    recent = row("hierarchical", budget=64, observe="recent")
    recent.state.selection.newest = 18
    young = row("hierarchical", budget=64, observe="recent")
    young.state.selection.newest = 2
    step.set_step(planned(recent, young, shares=(1.0, 1.0)))
    assert step.counts[:, :2, 0].tolist() == [[4, 3]] * 2
    assert step.index[1, 0, 1, :4].tolist() == [0, 16, 17, 18]
    assert step.index[0, 1, 0, :3].tolist() == [0, 1, 2]
    assert not step.active.any(), "no kernel chooses for them"


@pytest.mark.parametrize("flat", [True, False])
def test_the_mean_of_the_prompts_last_queries(flat: bool) -> None:
    queries, noted = PromptQueries(SHAPE, torch.device("cpu")), [ObservedQueries() for _ in range(2)]
    q = torch.randn(2, 23, 4, 64)  # of 7 and 13 new tokens, and padding
    queries.begin(((noted[0], 0, 7), (noted[1], 9, 11)))
    for layer in range(2):
        assert noted[0].shown is None, "not before all layers have run"
        queries.observe(q[layer].flatten(1) if flat else q[layer], layer)
    for each, part in zip(noted, (q[:, :7], q[:, 9:20]), strict=True):
        assert each.shown is not None
        assert each.shown.count == part.shape[1]
        torch.testing.assert_close(each.shown.mean, part.mean(1))
    queries.begin(())
    kept = noted[0].shown
    queries.observe(q[0], 1)
    assert noted[0].shown is kept, "a pass without them"


class Backend:
    """The part of a backend that the runtime uses; ``steps`` are those it was given, without idle ones."""

    graph_size = rank = 0
    dense_share = 0.0
    prefill = None

    def __init__(self, streaming_share: float = 0.0) -> None:
        self.streaming_share = streaming_share
        self.step = IDLE
        self.steps: list[Step] = []
        self.use = torch.zeros(2, 0)

    @property
    def variant(self) -> Variant:
        return self.step.variant

    def begin(self, step: Step) -> None:
        self.step = step
        if step != IDLE:
            self.steps.append(step)

    def progressive_use(self, n: int) -> torch.Tensor:
        return self.use


class Statistics:
    """Notes what it is told."""

    page_size, bytes = 16, 0

    def __init__(self) -> None:
        self.extended: list[Any] = []
        self.ended: list[Any] = []

    def after_extend(self, spans: Any) -> None:
        self.extended.append(list(spans))

    def after_request(self, row: int, tokens: int) -> None:
        self.ended.append((row, tokens))

    def follow(self) -> None:
        pass


def runtime_of(config: AttentionConfig | None = None) -> tuple[Any, Backend, Statistics]:
    from sglang_ext.attention.decode_runtime import DecodeRuntime

    config = config or AttentionConfig()
    backend, statistics = Backend(), Statistics()
    runtime = DecodeRuntime(config, StepPlanner(config, 16, 8192), statistics, backend)
    return runtime, backend, statistics


def batch(
    reqs: list[Any],
    lengths: list[int],
    *,
    decode: bool = True,
    prefix: list[int] | None = None,
    mixed: int = 0,
) -> Any:
    """``mixed``: how many of the requests, the last ones, decode in an extend."""
    mode = SimpleNamespace(is_decode=lambda: decode, is_extend=lambda: not decode, is_mixed=lambda: mixed > 0)
    seq_lens = torch.tensor(lengths)
    return SimpleNamespace(
        forward_mode=mode,
        reqs=reqs,
        seq_lens_cpu=seq_lens,
        prefix_lens=prefix,
        decoding_reqs=reqs[len(reqs) - mixed :],
    )


def request(runtime: Any, rid: str, options: str | None = None) -> Any:
    params = SimpleNamespace(custom_params={"ragserve_decode": options} if options else None)
    req = request_shapes.request(
        row=1,
        rid=rid,
        sampling_params=params,
        extra_key=None,
        customized_info=None,
        output_ids_through_stop=[7, 8, 9],
    )
    assert runtime.on_request(req) is None
    return req


def test_what_was_read_is_accounted_and_reported() -> None:
    from sglang_ext.wire.protocol import DecodeReport

    config = AttentionConfig(options=DecodeOptions(mode="hierarchical", budget=64, dense_below=0), heads=None)
    runtime, backend, statistics = runtime_of(config)
    by_budget = request(runtime, "a")
    by_threshold = request(runtime, "b", '{"mode": "progressive"}')
    dense = request(runtime, "c", '{"mode": "dense"}')
    backend.use = torch.tensor([[0.0, 5.0, 0.0], [1.0, 0.9, 1.0], [0.0, 0.0, 0.0]])
    for length in (160, 161):
        runtime.before_forward(batch([by_budget, by_threshold, dense], [length, 80, 32]))
        runtime.after_forward()
    for req in (by_budget, by_threshold, dense):
        runtime.on_finished(req, 160)
    said = [
        req.customized_info and DecodeReport.from_json(req.customized_info["ragserve_decode"][-1])
        for req in (by_budget, by_threshold)
    ]
    assert said[0] == DecodeReport("hierarchical", 2, 2, 4.5, 10.5, 9 / 21, None), (
        "in the second step a page begins and joins the others"
    )
    assert said[1] is not None
    assert (said[1].pages, said[1].pages_held, round(said[1].weight or 0, 6)) == (5.0, 5.0, 0.9)
    assert len(by_budget.customized_info["ragserve_decode"]) == 3, (
        "one place per token, the report in the last"
    )
    assert dense.customized_info is None
    assert statistics.ended == [(1, 160)] * 3


def test_dense_layers_count_as_read_whole_and_go_with_budgets_only() -> None:
    options = DecodeOptions(mode="hierarchical", budget=64, dense_below=0)
    runtime, backend, _ = runtime_of(AttentionConfig(options=options, dense_layers=[0]))
    backend.dense_share = 0.5
    req = request(runtime, "a")
    runtime.before_forward(batch([req], [160]))
    runtime.after_forward()
    runtime.on_finished(req, 160)
    assert json.loads(req.customized_info["ragserve_decode"][-1])["pages"] == (4 + 10) / 2
    config = AttentionConfig(options=options, dense_layers=[0], offload_bytes=1)
    with pytest.raises(PlanError, match="dense_layers are for measuring budgets"):
        StepPlanner(config, 16, 8192).check(options.updated({"lag": 2}))


def test_an_extend_writes_from_its_prefix_and_leaves_chosen_pages_alone() -> None:
    runtime, backend, statistics = runtime_of(
        AttentionConfig(options=DecodeOptions(mode="hierarchical", budget=64, reuse=4, dense_below=0))
    )
    req = request(runtime, "a")
    for length in (101, 102):
        runtime.before_forward(batch([req], [length]))
        runtime.after_forward()
    runtime.before_forward(batch([request(runtime, "b"), req], [40, 103], decode=False, prefix=[16, 102]))
    runtime.after_forward()
    assert statistics.extended == [[(1, 16, 40), (1, 102, 103)]]
    assert backend.steps[-1].prefixes == ((1, 16), (1, 102))
    runtime.before_forward(batch([req], [104]))
    variants = [step.variant for step in backend.steps if step.rows]
    assert variants == [Variant.SELECTED, Variant.REUSED, Variant.REFRESHED]


def test_decode_rows_of_a_prefill_batch_are_dense_steps() -> None:
    from sglang_ext.wire.protocol import DecodeReport

    runtime, _, statistics = runtime_of(
        AttentionConfig(options=DecodeOptions(mode="hierarchical", budget=64, dense_below=0))
    )
    req = request(runtime, "a")
    runtime.before_forward(batch([req], [160]))
    runtime.after_forward()
    runtime.before_forward(
        batch([request(runtime, "b"), req], [40, 161], decode=False, prefix=[16, 160], mixed=1)
    )
    runtime.after_forward()
    assert statistics.extended == [[(1, 16, 40), (1, 160, 161)]]
    runtime.on_finished(req, 161)
    said = DecodeReport.from_json(req.customized_info["ragserve_decode"][-1])
    assert said == DecodeReport("hierarchical", 2, 1, (4 + 11) / 2, (10 + 11) / 2, 15 / 21, None)


def test_every_variant_is_captured_under_its_label() -> None:
    runtime, backend, _ = runtime_of()
    seen = []
    runner = SimpleNamespace(capture_forward_mode=SimpleNamespace(is_decode=lambda: True))
    runtime.capture(runner, lambda label: seen.append((label, backend.variant)))
    assert seen == [
        (str(v.value), v) for v in (Variant.SELECTED, Variant.REUSED, Variant.REFRESHED, Variant.PROGRESSIVE)
    ]
    assert backend.variant is Variant.DENSE


def test_bad_options_are_the_reason_of_a_refusal() -> None:
    runtime, _, _ = runtime_of(AttentionConfig(options=DecodeOptions(mode="dense")))
    req = SimpleNamespace(
        rid="a", sampling_params=SimpleNamespace(custom_params={"ragserve_decode": '{"mode": "fast"}'})
    )
    assert "mode of sparse decoding is 'fast'" in str(runtime.on_request(req))
    assert req.ragserve_decode.options.mode == "dense", "the request lives on until it is ended"


def layered(wishes: list[dict[str, Any]], sinks: bool) -> torch.nn.Module:
    """A model of attention layers, with what each wants beside plain attention."""
    from sglang.srt.layers.radix_attention import RadixAttention

    plain = {"num_heads": 4, "head_dim": 64, "scaling": 1.0, "num_kv_heads": 2}
    model = torch.nn.ModuleList(RadixAttention(**(plain | wish), layer_id=i) for i, wish in enumerate(wishes))
    if sinks:
        model[0].sinks = torch.nn.Parameter(torch.zeros(4))
    return model


@pytest.mark.parametrize(
    ("wishes", "sinks", "reason"),
    [
        ([{}, {"logit_cap": 30.0}], False, "layer 1 caps its logits"),
        (
            [{}, {}, {"sliding_window_size": 128}, {"sliding_window_size": 128}],
            False,
            "layer 2 attends in a sliding window",
        ),
        ([{"is_cross_attention": True}], False, "layer 0 is not causal self-attention"),
        ([{"v_head_dim": 128}], False, "layer 0 has heads of other than 64 dimensions"),
        ([{}, {"num_heads": 8}], False, "layer 1 has another number of heads"),
        ([{}, {}], True, "learned attention sinks (0.sinks)"),
        ([], False, "no layers of SGLang's RadixAttention"),
        ([{}, {}], False, None),
    ],
    ids=["cap", "window", "cross", "dimensions", "heads", "sinks", "no layers", "plain"],
)
def test_models_whose_layers_want_more_than_plain_attention_are_refused_at_the_start(
    wishes: list[dict[str, Any]], sinks: bool, reason: str | None
) -> None:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from sglang_ext.attention.engine_checks import check_engine

    pool = MHATokenToKVPool(
        64,
        page_size=16,
        dtype=torch.float32,
        head_num=2,
        head_dim=64,
        layer_num=2,
        device="cpu",
        enable_memory_saver=False,
    )
    args = SimpleNamespace(radix_cache_backend="ragserve")
    runner = SimpleNamespace(server_args=args, page_size=16, token_to_kv_pool=pool, dtype=torch.float32)
    runner.model = layered(wishes, sinks)
    if reason is None:
        check_engine(runner, AttentionConfig())
        return
    with pytest.raises(ValueError, match="sparse_attention=on") as refused:
        check_engine(runner, AttentionConfig())
    assert reason in str(refused.value)


def test_engines_that_cannot_decode_sparsely_are_refused() -> None:
    from sglang_ext.attention.engine_checks import check_engine

    args = SimpleNamespace(
        enable_lora=True,
        enable_pdmux=False,
        enable_two_batch_overlap=False,
        speculative_algorithm="EAGLE",
        radix_cache_backend=None,
        hicache_storage_backend="file",
        enable_lmcache=True,
    )
    runner = SimpleNamespace(server_args=args, page_size=1, token_to_kv_pool=object(), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="sparse_attention=on") as refused:
        check_engine(runner, AttentionConfig(kv_bits=8, offload_bytes=2**20))
    for part in (
        "page_size is 1",
        "a object",
        "enable_lora",
        "speculative_algorithm",
        "radix_cache_backend",
        "hicache_storage_backend is file",
        "enable_lmcache is True: that storage finds KV by its tokens alone",
        "kv_offload_bytes is 1048576 and kv_bits 8",
        "logical page has 16",
    ):
        assert part in str(refused.value)
