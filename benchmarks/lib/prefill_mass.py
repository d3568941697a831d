"""Attention mass that the blocks of a sparse prefill hold, measured in transformers over exact keys."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from ragserve_kernels.prefill_lists import LinePlan, block_lse, choose_blocks, greedy_lines
from ragserve_kernels.sparse_prefill import PrefillBatch, all_blocks, mask_of
from sglang_ext.attention.prefill.sparse_prefill import BLOCK_K, BLOCK_Q
from sglang_ext.wire.attention_config import AttentionConfig
from sglang_ext.wire.prefill_options import PrefillOptions

_NAME = "ragserve_prefill_mass"
_PAGE = 64
_AT_ONCE = 2048  # queries: on a GPU all scores of theirs lie in memory


class SampledLines:
    """What `choose_lines` of ragserve_kernels chooses for one layer of a prompt, by several alphas and
    shares: the attention of the sampled queries, nearly all of its time, is computed once."""

    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, batch: PrefillBatch, observe: int, scale: float
    ) -> None:
        """q ``[tokens, heads, head_dim]``, k ``[pool slots, kv_heads, head_dim]``, a batch of one prompt."""
        self._groups = LinePlan.of(batch, q.shape[1], observe=observe).groups
        self._shape = (batch.query_blocks, q.shape[1], -(-len(q) // batch.block_k))
        self._mass = []  # [segments, heads, sampled queries, key blocks] of each group of segments
        for group in self._groups:
            share = block_lse(q, k, batch, 0, group.positions.flatten(), scale=scale).softmax(-1)
            share = share.unflatten(1, group.positions.shape).transpose(0, 1)
            self._mass.append(share * group.weight[:, None, :, None])

    def mask(self, alpha: float, share: float | None) -> torch.Tensor:
        """Return the blocks that lines cross, bool ``[query blocks, heads, key blocks]``."""
        mask = torch.zeros(self._shape, dtype=torch.bool, device=self._groups[0].positions.device)
        for group, mass in zip(self._groups, self._mass, strict=True):
            mask[group.blocks] = group.crossed(greedy_lines(mass, group.shape, alpha, None, share))
        return mask


class PrefillMass:
    """A model with dense attention that notes, by mode, how many blocks the mode takes and what share of the
    attention of random queries they hold, in every layer and query head. On a GPU, where there is one."""

    def __init__(self, model: Path, modes: Sequence[PrefillOptions], *, queries: int = 128) -> None:
        """``queries``: drawn of each prompt."""
        from transformers import AttentionInterface, AutoModelForCausalLM

        AttentionInterface.register(_NAME, self._attend)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._model = loaded.to(self._device)
        self._model.set_attn_implementation(_NAME)
        self._modes, self.queries = tuple(modes), queries
        self.layers, self.heads = loaded.config.num_hidden_layers, loaded.config.num_attention_heads
        self._drawn = torch.empty(0, dtype=torch.int32)
        self._found: list[torch.Tensor] = []  # [2, modes, heads] of each layer

    def of(self, ids: list[int], seed: int) -> torch.Tensor:
        """Return of a prompt the share of the attention that each mode's blocks hold, and the share of the
        blocks of dense attention that they are: ``[2, modes, layers, heads]``."""
        draw = random.Random(seed)
        self._drawn = torch.tensor(
            sorted(draw.sample(range(len(ids)), min(self.queries, len(ids)))),
            dtype=torch.int32,
            device=self._device,
        )
        self._found = []
        with torch.inference_mode():
            self._model.model(torch.tensor([ids], device=self._device), use_cache=False)
        return torch.stack(self._found, 2).cpu()

    def _attend(
        self,
        module: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *_: Any,
        scaling: float,
        **__: Any,
    ) -> tuple[torch.Tensor, None]:
        """q [1, heads, tokens, head_dim]; k, v [1, kv_heads, tokens, head_dim]."""
        tokens, config = q.shape[2], AttentionConfig()
        pages = -(-tokens // _PAGE)
        table = torch.arange(pages, dtype=torch.int32, device=q.device)[None]
        batch = PrefillBatch.of(table, _PAGE, [0], [tokens], block_q=BLOCK_Q, block_k=BLOCK_K)
        rows = q[0].transpose(0, 1).contiguous()
        pool = torch.zeros(pages * _PAGE, k.shape[1], k.shape[3], device=q.device)
        pool[:tokens] = k[0].transpose(0, 1)
        share = block_lse(rows, pool, batch, 0, self._drawn, scale=scaling).softmax(-1)
        everything = mask_of(all_blocks(batch, 1), -(-tokens // BLOCK_K))
        possible = float(everything.sum())
        held, taken = [], []
        sampled: dict[int, SampledLines] = {}
        for mode in self._modes:
            if mode.mode == "vertical_slash":
                if mode.observe not in sampled:
                    sampled[mode.observe] = SampledLines(rows, pool, batch, mode.observe, scaling)
                mask = sampled[mode.observe].mask(mode.alpha, mode.share)
            else:
                sink, local = -(-config.sink_tokens // BLOCK_K), -(-config.local_tokens // BLOCK_K)
                mask = choose_blocks(
                    rows,
                    pool,
                    batch,
                    alpha=mode.alpha,
                    share=mode.share,
                    sink=sink,
                    local=local,
                    scale=scaling,
                )
            last = torch.arange(len(mask), device=q.device) >= (tokens - mode.dense_last) // BLOCK_Q
            mask |= last[:, None, None] & everything
            seen = mask[self._drawn.long() // BLOCK_Q].transpose(0, 1)  # [heads, queries, key blocks]
            held.append((share * seen).sum(-1).mean(-1))
            taken.append(mask.sum((0, 2)) / possible)
        self._found.append(torch.stack((torch.stack(held), torch.stack(taken))))
        out = []
        for rows in torch.arange(tokens, device=q.device).split(_AT_ONCE):
            end = int(rows[-1]) + 1
            seen = torch.arange(end, device=q.device) <= rows[:, None]
            own, keys, values = q[:, :, rows], k[:, :, :end], v[:, :, :end]
            out.append(
                scaled_dot_product_attention(
                    own, keys, values, attn_mask=seen, scale=scaling, enable_gqa=True
                )
            )
        return torch.cat(out, 2).transpose(1, 2), None
