"""Reference for sparse decoding, in transformers: attention masked to the pages that a rule chooses from the
keys themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from ragserve_kernels.page_select import page_select, summarise
from ragserve_kernels.progressive_decode import progressive_decode
from ragserve_kernels.quantize_kv import QuantizedKV, dequantize_kv, quantize_kv
from sglang_ext.protocol import DecodeOptions
from tests.integration.reference import Reference

NAME = "ragserve_sparse_reference"


@dataclass(frozen=True)
class Chosen:
    """``pages`` of each KV head of a layer, used from ``step`` on. ``newest``: the last page at that step."""

    step: int
    newest: int
    pages: list[list[int]]


class SparseReference(Reference):
    """Greedy decoding with the options ``decode``; prefill is dense.

    With ``bits`` below 16, KV is quantised when it is written: decode steps read quantised KV only, a prefill
    chunk reads itself unquantised. ``starts``: where the chunks of the prompt begin."""

    def __init__(
        self,
        path: Path,
        page: int,
        logical: int,
        streaming: torch.Tensor | None = None,
        sink: int = 0,
        local: int = 0,
        bits: int = 16,
    ) -> None:
        from transformers import AttentionInterface

        super().__init__(path)
        self.page, self.logical = page, logical
        self.streaming, self.sink, self.local = streaming, sink, local
        self.bits, self.starts = bits, [0]
        self.decode = DecodeOptions()
        self.step = 0
        self.chosen: dict[int, Chosen] = {}
        AttentionInterface.register(NAME, self._attend)
        self.model.set_attn_implementation(NAME)

    def _continue(self, question: list[int], start: int, cache: Any, n_new: int) -> Any:
        self.step, self.chosen = -1, {}
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
        stored_k, stored_v = self._stored(k), self._stored(v)
        if new > 1:
            ends = [*self.starts[1:], new] if self.bits < 16 else [new]
            parts = []
            for start, end in zip(self.starts, ends, strict=False):
                first = tokens - new + start  # of the chunk
                seen_k = torch.cat((stored_k[:, :, :first], k[:, :, first : first + end - start]), 2)
                seen_v = torch.cat((stored_v[:, :, :first], v[:, :, first : first + end - start]), 2)
                visible = torch.ones(end - start, seen_k.shape[2], dtype=torch.bool).tril(first)
                parts.append(
                    scaled_dot_product_attention(
                        q[:, :, start:end], seen_k, seen_v, attn_mask=visible, scale=scaling, enable_gqa=True
                    )
                )
            return torch.cat(parts, 2).transpose(1, 2), None
        k, v = stored_k, stored_v
        if layer == 0:
            self.step += 1
        options = self.decode
        least = max(options.dense_below, options.budget if options.mode == "hierarchical" else 0)
        if options.mode == "progressive" and tokens > least:
            return self._progressive(q[:, :, 0], k[0], v[0], scaling)[:, None], None
        visible = torch.ones(k.shape[1], tokens, dtype=torch.bool)
        if options.mode == "hierarchical" and tokens > least:
            newest = (tokens - 1) // self.page
            now = self.chosen.get(layer)
            if now is None or self.step - now.step >= options.reuse or newest > now.newest + 1:
                now = self.chosen[layer] = self._choose(q[0, :, 0], k[0], self.step)
            if (
                options.reuse > 1 and self.step + 1 - now.step == options.reuse
            ):  # for the next step on, by this one's query
                self.chosen[layer] = self._choose(q[0, :, 0], k[0], self.step + 1)
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

    def _stored(self, x: torch.Tensor) -> torch.Tensor:
        """Quantise and dequantise x [1, kv_heads, tokens, head_dim], as the pool does."""
        if self.bits == 16:
            return x
        rows = x[0].transpose(0, 1).contiguous()
        pool = QuantizedKV.empty(len(rows), rows.shape[1], rows.shape[2], bits=self.bits, device="cpu")
        quantize_kv(rows, torch.arange(len(rows)), pool)
        return dequantize_kv(pool).transpose(0, 1)[None]

    def _choose(self, q: torch.Tensor, k: torch.Tensor, step: int) -> Chosen:
        return Chosen(
            step, (k.shape[1] - 1) // self.page, [self._best(q, k, head) for head in range(k.shape[0])]
        )

    def _best(self, q: torch.Tensor, k: torch.Tensor, head: int) -> list[int]:
        """Choose the pages of one KV head: the first, the newest, and the others with the highest upper
        bounds of a score."""
        group = q.shape[0] // k.shape[0]
        queries = q[head * group : (head + 1) * group]
        last = (k.shape[1] - 1) // self.page
        scores = []
        for page in range(1, last):
            runs = k[head, page * self.page : (page + 1) * self.page].view(-1, self.logical, k.shape[2])
            low, high = runs.amin(1), runs.amax(1)
            bound = torch.maximum(queries[:, None] * low, queries[:, None] * high).sum(
                -1
            )  # [group, logical pages]
            scores.append(float(bound.max()))
        free = self.decode.budget // self.page - 2
        best = sorted(range(len(scores)), key=lambda i: -scores[i])[:free]
        return [0, last, *(i + 1 for i in best)]

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
        table = torch.arange(pages, dtype=torch.int32)[None]
        lens = torch.tensor([tokens], dtype=torch.int32)
        ranking = page_select(
            q,
            table,
            lens,
            block_size=self.page,
            k_min=low,
            k_max=high,
            per_block=self.page // self.logical,
            rank=True,
        )
        return progressive_decode(
            q,
            *padded,
            table,
            lens,
            *ranking,
            page_size=self.page,
            threshold=self.decode.threshold,
            bound="round",
            scale=scaling,
        ).out
