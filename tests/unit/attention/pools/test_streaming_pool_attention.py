"""Attention of a server whose streaming heads have a pool of their own, against attention by masks."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_ext.attention.pools.streaming_pool import StreamingPlan, StreamingRings
from sglang_ext.attention.pools.streaming_pool_attention import StreamingPoolBackend

PAGE, SINKS, LOCAL = 16, 2, 3  # pages
STREAMING = torch.tensor([[True, False, True], [True, True, True], [False, False, False]])
LAYERS, KV_HEADS = STREAMING.shape
GROUP, DIM, SCALE, LONGEST, ROWS = 2, 64, 0.1, 256, 5
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Text:
    """Random q [layers, tokens, heads, head_dim], k and v of a request, and what its rows are to get."""

    def __init__(self, tokens: int, seed: int) -> None:
        made = torch.Generator().manual_seed(seed)
        self.q = torch.randn(LAYERS, tokens, KV_HEADS * GROUP, DIM, generator=made)
        self.k, self.v = torch.randn(2, LAYERS, tokens, KV_HEADS, DIM, generator=made)
        row, key = torch.arange(tokens)[:, None], torch.arange(tokens)[None]
        seen = (key // PAGE < SINKS) | (key // PAGE >= row // PAGE - LOCAL)
        masks = torch.where(STREAMING[..., None, None], seen, True) & (key <= row)
        masks = masks.repeat_interleave(GROUP, 1)  # [layers, heads, rows, keys]
        k, v = (half.double().repeat_interleave(GROUP, 2) for half in (self.k, self.v))
        scores = torch.einsum("lrhd,lkhd->lhrk", self.q.double(), k) * SCALE
        weights = scores.masked_fill(~masks, -torch.inf).softmax(-1)
        self.truth = torch.einsum("lhrk,lkhd->lrhd", weights, v)


class Pool:
    """K and V of the other heads, by layer, and the page that each page of a row of the table lies in."""

    def __init__(self, device: str) -> None:
        pages = ROWS * LONGEST // PAGE
        counts = (~STREAMING).sum(1).tolist()
        self._layers = [
            tuple(torch.zeros(pages * PAGE, n, DIM, device=device) for _ in range(2)) for n in counts
        ]
        order = torch.arange(pages)[torch.randperm(pages, generator=torch.Generator().manual_seed(3))]
        slots = order.view(ROWS, -1, 1) * PAGE + torch.arange(PAGE)
        self.table = slots.flatten(1).to(torch.int32).to(device)

    def heads(self, layer: int) -> Any:
        return self._layers[layer]


class Engine:
    """The backend, with requests in rows of SGLang's table; row 0 is for padding."""

    def __init__(self, device: str) -> None:
        self.device, self.pool = device, Pool(device)
        plan = StreamingPlan(STREAMING, PAGE, SINKS, LOCAL, (0.5,))
        rings = StreamingRings(plan, ROWS, DIM, dtype=torch.float32, device=torch.device(device))
        runner = SimpleNamespace(
            token_to_kv_pool=self.pool,
            req_to_token_pool=SimpleNamespace(req_to_token=self.pool.table),
            model_config=SimpleNamespace(num_attention_heads=KV_HEADS * GROUP),
            tp_group=None,
            device=device,
        )
        self.backend = StreamingPoolBackend(runner, plan, rings)
        self.done = [0] * ROWS

    def batch(self, mode: ForwardMode, new: dict[int, int]) -> Any:
        """SGLang's batch of so many new tokens by row."""
        prefix, rows = [self.done[row] for row in new], torch.tensor(list(new), device=self.device)
        ends = torch.tensor([a + b for a, b in zip(prefix, new.values(), strict=True)])
        slots = [self.pool.table[row, self.done[row] : self.done[row] + n] for row, n in new.items()]
        return SimpleNamespace(
            forward_mode=mode,
            batch_size=len(new),
            req_pool_indices=rows,
            seq_lens=ends.to(self.device),
            seq_lens_cpu=ends,
            extend_prefix_lens_cpu=prefix,
            extend_seq_lens_cpu=list(new.values()),
            out_cache_loc=torch.cat(slots).long(),
        )

    def rows_of(self, name: str, layer: int, texts: dict[int, Text], new: dict[int, int]) -> torch.Tensor:
        """Of q, k, v or truth: what a batch brings."""
        return torch.cat(
            [getattr(texts[row], name)[layer, self.done[row] : self.done[row] + n] for row, n in new.items()]
        ).to(self.device)

    def forward(self, layer: int, batch: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        described = SimpleNamespace(
            layer_id=layer,
            tp_q_head_num=KV_HEADS * GROUP,
            tp_k_head_num=KV_HEADS,
            qk_head_dim=DIM,
            v_head_dim=DIM,
            scaling=SCALE,
        )
        return self.backend.forward(q.flatten(1), k.flatten(1), v.flatten(1), described, batch)

    def run(self, texts: dict[int, Text], new: dict[int, int], *, step: bool = False) -> None:
        """Run a batch and compare."""
        batch = self.batch(ForwardMode.DECODE if step else ForwardMode.EXTEND, new)
        self.backend.init_forward_metadata(batch)
        for layer in range(LAYERS):
            q, k, v, truth = (self.rows_of(name, layer, texts, new) for name in ("q", "k", "v", "truth"))
            self.compare(self.forward(layer, batch, q, k, v), truth)
        for row, n in new.items():
            self.done[row] += n

    @staticmethod
    def compare(out: torch.Tensor, truth: torch.Tensor) -> None:
        # a GPU's kernels multiply in TF32
        tolerance = 1e-5 if out.device.type == "cpu" else 5e-3
        torch.testing.assert_close(out.double(), truth.flatten(1), rtol=10 * tolerance, atol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunks", [(211,), (64, 64, 83), (2, 99, 17, 16, 77), (150, *[1] * 61)])
def test_chunks_and_decoding_see_what_the_masks_say(chunks: tuple[int, ...], device: str) -> None:
    engine, text = Engine(device), Text(sum(chunks), seed=len(chunks))
    for n in chunks:
        engine.run({1: text}, {1: n}, step=n == 1)


@pytest.mark.parametrize("device", DEVICES)
def test_batches_with_rows_that_others_have_left_see_the_same(device: str) -> None:
    """Chunks beside decode rows in one batch, and rows that end or are retracted anywhere."""
    made, engine = random.Random(0), Engine(device)
    texts: dict[int, Text] = {}
    goals: dict[int, int] = {}
    for turn in range(70):
        for row in range(1, ROWS):
            if row not in texts or engine.done[row] == len(texts[row].q[0]) or made.random() < 0.05:
                texts[row], goals[row] = Text(made.randrange(100, LONGEST), seed=turn), made.randrange(40, 99)
                engine.done[row] = 0
        decoding = [row for row in texts if engine.done[row] >= goals[row]]
        new = {
            row: min(made.randrange(1, 60), goals[row] - engine.done[row])
            for row in texts
            if row not in decoding
        }
        mixed = made.random() < 0.5
        if new:
            engine.run(texts, new | dict.fromkeys(decoding if mixed else (), 1))
        if decoding and not (new and mixed):
            engine.run(texts, dict.fromkeys(decoding, 1), step=True)


@pytest.mark.gpu
def test_steps_run_by_graph() -> None:
    """A graph of two rows, the second for padding where one request is left, serves all steps."""
    engine, size = Engine("cuda"), 2
    texts = {row: Text(200, seed=row) for row in (1, 2)}
    engine.run(texts, {1: 90, 2: 120})
    engine.backend.init_cuda_graph_state(size, size)
    static = {
        name: torch.zeros(LAYERS, size, heads, DIM, device="cuda")
        for name, heads in (("q", KV_HEADS * GROUP), ("k", KV_HEADS), ("v", KV_HEADS))
    }
    batch = SimpleNamespace(
        forward_mode=ForwardMode.DECODE,
        batch_size=size,
        req_pool_indices=torch.zeros(size, dtype=torch.int64, device="cuda"),
        seq_lens=torch.ones(size, dtype=torch.int64, device="cuda"),
        seq_lens_cpu=torch.ones(size, dtype=torch.int64),
        out_cache_loc=torch.zeros(size, dtype=torch.int64, device="cuda"),
    )
    spare = engine.pool.table[0, 0].long()  # a slot of the row for padding
    batch.out_cache_loc.fill_(spare)
    outs: list[Any] = []

    def layers() -> list[Any]:
        return [engine.forward(i, batch, *(static[name][i] for name in "qkv")) for i in range(LAYERS)]

    engine.backend.init_forward_metadata_out_graph(batch, in_capture=True)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        layers()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = layers()
    for turn in range(60):
        new = {1: 1, 2: 1} if turn % 3 else {1: 1}
        now = engine.batch(ForwardMode.DECODE, new)
        n = len(new)
        for name in ("req_pool_indices", "seq_lens", "seq_lens_cpu", "out_cache_loc"):
            whole, part = getattr(batch, name), getattr(now, name)
            whole[:n] = part
            whole[n:] = {"req_pool_indices": 0, "out_cache_loc": int(spare)}.get(name, 1)
        for name in "qkv":
            for i in range(LAYERS):
                static[name][i, :n] = engine.rows_of(name, i, texts, new)
        engine.backend.init_forward_metadata_out_graph(batch)
        graph.replay()
        for i in range(LAYERS):
            engine.compare(outs[i][:n], engine.rows_of("truth", i, texts, new))
        for row in new:
            engine.done[row] += 1
