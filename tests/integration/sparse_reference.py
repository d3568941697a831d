"""Reference for sparse decoding, in transformers: attention masked to the pages that a rule chooses from the
keys themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from ragserve_kernels.page_select import KeySummary, page_select, summarise
from ragserve_kernels.paged import PagedBatch
from ragserve_kernels.prefill_lists import LinePlan, Lines, choose_blocks, choose_lines
from ragserve_kernels.progressive_decode import progressive_decode
from ragserve_kernels.quantize_kv import QuantizedKV, dequantize_kv, quantize_kv
from ragserve_kernels.sparse_prefill import PrefillBatch, all_blocks, mask_of
from sglang_ext.attention.prefill.sparse_prefill import BLOCK_K, BLOCK_Q
from sglang_ext.wire.prefill_options import PrefillOptions
from sglang_ext.wire.protocol import DecodeOptions
from tests.integration.reference import Reference

NAME = "ragserve_sparse_reference"


@dataclass(frozen=True)
class Chosen:
    """``pages`` of each KV head of a layer, used from ``step`` on, chosen in step ``made``. ``first``: the
    request's first choice. ``newest``: the last page at that step."""

    made: int
    step: int
    first: bool
    newest: int
    pages: list[list[int]]


class SparseReference(Reference):
    """Greedy decoding with the options ``decode``, after a prefill with the options ``prefill``.

    With ``bits`` below 16, KV is quantised when it is written, keys without what they share at the positions
    of ``context``, and no pass reads it as it was before.
    ``starts``: where the chunks of the prompt begin."""

    def __init__(
        self,
        path: Path,
        page: int,
        logical: int,
        streaming: torch.Tensor | None = None,
        sink: int = 0,
        local: int = 0,
        bits: int = 16,
        context: int = 2048,
    ) -> None:
        from transformers import AttentionInterface

        super().__init__(path)
        self.page, self.logical = page, logical
        self.streaming, self.sink, self.local = streaming, sink, local
        self.bits, self.starts = 16, [0]
        self.decode = DecodeOptions(mode="dense")
        self.prefill = PrefillOptions()  # applies at any length
        self.turn = 0  # where the second turn's prompt begins; its lines begin from those before
        self.lines: dict[int, Lines | None] = {}  # of the first turn, by layer
        self.step = 0
        self.chosen: dict[int, Chosen] = {}
        self.pending: dict[int, Chosen] = {}  # with a lag: chosen, and not used yet
        self.prompt: dict[int, torch.Tensor] = {}  # queries of the prompt's end, [heads, queries, head_dim]
        # of sparse steps, the running mean of their queries [heads, head_dim], and their number
        self.decoded: dict[int, tuple[torch.Tensor, int]] = {}
        self.offsets = self._shared(context) if bits < 16 else []
        self.bits = bits
        AttentionInterface.register(NAME, self._attend)
        self.model.set_attn_implementation(NAME)

    def _continue(self, question: list[int], start: int, cache: Any, n_new: int) -> Any:
        self.step, self.chosen, self.pending, self.decoded = -1, {}, {}, {}
        self.blocks = torch.zeros(2)  # of the prefill, of the first rank's heads: attended to, and possible
        return super()._continue(question, start, cache, n_new)

    def _attend(
        self,
        module: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: Any,
        scaling: float,
        **_: Any,
    ) -> Any:
        """q [1, heads, new, head_dim]; k, v [1, kv_heads, tokens, head_dim], the new ones last."""
        new, tokens, layer = q.shape[2], k.shape[2], module.layer_idx
        stored_k = self._stored(k - self.offsets[layer] if self.offsets else k)
        stored_v = self._stored(v)
        if new > 1:
            self.prompt[layer] = q[0, :, -self.decode.window :]
            if self.decode.lag_steps and tokens + 1 > self._dense_up_to:
                by = self.prompt[layer].mean(1) if self.decode.observe == "prompt" else q[0, :, -1]
                self.chosen[layer] = self._choose(by, stored_k[0], 0, first=True)
            chunked = self.bits < 16 or self.prefill.mode != "dense"
            ends = [*self.starts[1:], new] if chunked else [new]
            parts = []
            for start, end in zip(self.starts, ends, strict=False):
                first = tokens - new + start  # of the chunk
                seen_k, seen_v = (x[:, :, : first + end - start] for x in (stored_k, stored_v))
                visible = torch.ones(end - start, seen_k.shape[2], dtype=torch.bool).tril(first)
                if self.prefill.mode != "dense":
                    visible = visible & self._prefilled(layer, q[0, :, start:end], seen_k[0], first, tokens)
                parts.append(
                    scaled_dot_product_attention(
                        q[:, :, start:end], seen_k, seen_v, attn_mask=visible, scale=scaling, enable_gqa=True
                    )
                )
            return torch.cat(parts, 2).transpose(1, 2), None
        k, v = stored_k, stored_v
        if layer == 0:
            self.step += 1
        options, least = self.decode, self._dense_up_to
        if options.mode == "progressive" and tokens > least:
            return self._progressive(q[:, :, 0], k[0], v[0], scaling)[:, None], None
        visible = torch.ones(k.shape[1], tokens, dtype=torch.bool)
        if options.mode == "hierarchical" and tokens > least:
            newest = (tokens - 1) // self.page
            now = self._choice(layer, self._observed(layer, q[0, :, 0]), k[0])
            for head, pages in enumerate(now.pages):
                kept = torch.isin(torch.arange(tokens) // self.page, torch.tensor([*pages, newest]))
                if options.streaming and self.streaming is not None and self.streaming[layer, head]:
                    kept = self._streamed(tokens)
                visible[head] = kept
        group = q.shape[1] // k.shape[1]
        shown = visible.repeat_interleave(group, 0)[None, :, None]
        return scaled_dot_product_attention(
            q, k, v, attn_mask=shown, scale=scaling, enable_gqa=True
        ).transpose(1, 2), None

    @property
    def _dense_up_to(self) -> int:
        options = self.decode
        return max(options.dense_below, options.budget if options.mode == "hierarchical" else 0)

    def _prefilled(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, first: int, prompt: int
    ) -> torch.Tensor:
        """Return what a chunk attends to, bool [heads, new, tokens], by the functions that choose in the
        engine. q [heads, new, head_dim], k [kv_heads, tokens, head_dim]; ``first``: of the chunk;
        ``prompt``: tokens."""
        tokens, options = k.shape[1], self.prefill
        pages = -(-tokens // self.page)
        pool = torch.zeros(pages * self.page, k.shape[0], k.shape[2])
        pool[:tokens] = k.transpose(0, 1)
        table = torch.arange(pages, dtype=torch.int32)[None]
        batch = PrefillBatch.of(table, self.page, [first], [tokens - first], block_q=BLOCK_Q, block_k=BLOCK_K)
        rows = q.transpose(0, 1).contiguous()
        if options.mode == "vertical_slash":
            plan = LinePlan.of(batch, len(q), observe=options.observe)
            given = self.lines[layer] if self.turn and first >= self.turn else None
            choice = choose_lines(rows, pool, plan, alpha=options.alpha, given=(given,))
            mask = choice.mask
            if tokens == self.turn:
                self.lines[layer] = choice.last[0]
        else:
            sink, local = -(-self.sink // BLOCK_K), -(-self.local // BLOCK_K)
            streaming = self.streaming[layer] if options.streaming and self.streaming is not None else None
            mask = choose_blocks(
                rows, pool, batch, alpha=options.alpha, sink=sink, local=local, streaming=streaming
            )
        block = torch.arange(first // BLOCK_Q, first // BLOCK_Q + batch.query_blocks)
        for end in (self.turn, prompt):  # the last blocks of each turn's prompt attend to all
            last = (block >= (end - options.dense_last) // BLOCK_Q) & (block * BLOCK_Q < end)
            mask |= last[:, None, None] & mask_of(all_blocks(batch, 1), mask.shape[2])
        own = mask[:, : len(q) // 2]  # of the first of two ranks
        possible = mask_of(all_blocks(batch, own.shape[1]), mask.shape[2])
        self.blocks += torch.tensor([own.sum(), possible.sum()])
        place = torch.arange(first, tokens) // BLOCK_Q - first // BLOCK_Q
        return mask.transpose(0, 1)[:, place][..., torch.arange(tokens) // BLOCK_K]

    def _stored(self, x: torch.Tensor) -> torch.Tensor:
        """Quantise and dequantise x [1, kv_heads, tokens, head_dim], as the pool does."""
        if self.bits == 16:
            return x
        rows = x[0].transpose(0, 1).contiguous()
        pool = QuantizedKV.empty(len(rows), rows.shape[1], rows.shape[2], bits=self.bits, device="cpu")
        quantize_kv(rows, torch.arange(len(rows)), pool)
        return dequantize_kv(pool).transpose(0, 1)[None]

    def _shared(self, context: int) -> list[torch.Tensor]:
        """The mean of the fixed text's keys before they are rotated, rotated for each position and averaged:
        [kv_heads, 1, head_dim] of each layer."""

        def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            low, high = x.chunk(2, -1)
            return x * cos + torch.cat((-high, low), -1) * sin

        found = []
        for k, _ in self.alone(self.prefix):
            cos, sin = (x[0] for x in self.model.model.rotary_emb(k, torch.arange(context)[None]))
            own = slice(4, len(self.prefix))  # attention sinks on the first tokens
            still = turned(k[0, :, 4:], cos[own], -sin[own]).mean(1, keepdim=True)
            found.append(turned(still, cos, sin).mean(1, keepdim=True))
        return found

    def _observed(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Return what pages are chosen by, of this step's query q [heads, head_dim] and those before."""
        if self.decode.observe == "prompt":
            return self.prompt[layer].mean(1)
        if self.decode.observe == "last":
            return q
        mean, count = self.decoded.get(layer, (q, 0))
        count = min(count + 1, self.decode.window)
        mean = mean + (q - mean) / count
        self.decoded[layer] = mean, count
        return mean

    def _choice(self, layer: int, q: torch.Tensor, k: torch.Tensor) -> Chosen:
        """Return the choice that this step reads, and choose for later steps by its query, if it is time."""
        options, newest = self.decode, (k.shape[1] - 1) // self.page
        lag = options.lag_steps
        if (waiting := self.pending.get(layer)) is not None and waiting.step <= self.step:
            self.chosen[layer] = self.pending.pop(layer)
        now = self.chosen.get(layer)
        late = not lag and now is not None
        interval = options.reuse
        if options.observe == "window" and now is not None and now.first:
            interval = min(16, interval)
        if options.observe == "prompt":
            interval = 2**30
        ahead = newest > (now.newest if options.observe == "recent" else now.newest + 1) if now else True
        if now is None or (late and (self.step - now.step >= interval or ahead)):
            now = self.chosen[layer] = self._choose(q, k, self.step, first=now is None)
        if lag:
            interval = max(lag + 1, min(options.reuse, self.page - lag))
            if layer not in self.pending and self.step - now.made >= interval:
                self.pending[layer] = self._choose(q, k, self.step + 1 + lag)
        elif interval > 1 and options.observe != "recent" and self.step + 1 - now.step == interval:
            self.chosen[layer] = self._choose(q, k, self.step + 1)
        return now

    def _choose(self, q: torch.Tensor, k: torch.Tensor, step: int, *, first: bool = False) -> Chosen:
        return Chosen(
            self.step,
            step,
            first,
            (k.shape[1] - 1) // self.page,
            [self._best(q, k, head) for head in range(k.shape[0])],
        )

    def _best(self, q: torch.Tensor, k: torch.Tensor, head: int) -> list[int]:
        """Choose the pages of one KV head: the first, the newest, and the others with the highest upper
        bounds of a score."""
        group = q.shape[0] // k.shape[0]
        queries = q[head * group : (head + 1) * group]
        last = (k.shape[1] - 1) // self.page
        free = self.decode.budget // self.page - 2
        if self.decode.observe == "recent":
            return [0, *range(last - free, last + 1)]
        scores = []
        for page in range(1, last):
            runs = k[head, page * self.page : (page + 1) * self.page].view(-1, self.logical, k.shape[2])
            if self._by_keys:
                scores.append(float((queries @ runs.flatten(0, 1).T).max()))
                continue
            low, high = runs.amin(1), runs.amax(1)
            bound = torch.maximum(queries[:, None] * low, queries[:, None] * high).sum(
                -1
            )  # [group, logical pages]
            scores.append(float(bound.max()))
        best = sorted(range(len(scores)), key=lambda i: -scores[i])[:free]
        return [0, last, *(i + 1 for i in best)]

    @property
    def _by_keys(self) -> bool:
        """Keys are read wherever they have 16 bits and stay on the device, if nothing else is asked for."""
        at_hand = self.decode.mode == "hierarchical" and self.bits == 16 and not self.decode.lag_steps
        return self.decode.scores == "exact" or (self.decode.scores == "auto" and at_hand)

    def _streamed(self, tokens: int) -> torch.Tensor:
        """Mask of the tokens that a streaming head reads: the pages of its first and of its latest tokens."""
        position = torch.arange(tokens)
        sink = -(-self.sink // self.page) * self.page
        return (position < sink) | (position // self.page >= max(tokens - self.local, 0) // self.page)

    def _progressive(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
        """Call the kernel on the plain cache, to check that the engine calls it with the same inputs."""
        tokens = k.shape[1]
        pages = -(-tokens // self.page)
        padded = [
            torch.cat(
                (x.transpose(0, 1), torch.zeros(pages * self.page - tokens, *x.transpose(0, 1).shape[1:]))
            )
            for x in (k, v)
        ]
        low, high, _, _ = summarise(padded[0], self.logical)
        batch = PagedBatch(
            torch.arange(pages, dtype=torch.int32)[None], torch.tensor([tokens], dtype=torch.int32), self.page
        )
        return progressive_decode(
            q,
            (padded[0], padded[1]),
            batch,
            page_select(q, batch, KeySummary(high, low, self.page // self.logical)),
            threshold=self.decode.threshold,
            bound="round",
            scale=scaling,
        ).out
