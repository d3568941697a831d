"""Computes analyses inside the engine: one pass of a document alone and behind each unrelated text, through
the model's own layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch

from ragserve_kernels.block_summary import BlockPlan, BlockSummary, block_summary, block_summary_naive
from ragserve_kernels.kv import HEAD_DIMS
from sglang_ext.analysis import retrieval_heads
from sglang_ext.analysis.document_analysis import Analysis, Cut, quantize
from sglang_ext.analysis.forward import Kv, LayerState, Text, run
from sglang_ext.analysis.texts import Texts
from sglang_ext.ranks import Ranks


class Analyser:
    """Analyses documents. Per rank: every method launches work on the current stream, and all ranks must call
    it together.
    """

    def __init__(
        self, model_runner: Any, texts: Callable[[], Texts], cut: Cut, heads: Sequence[tuple[int, int]] = ()
    ) -> None:
        """``texts`` loads the tokenizer, once, before the first document. ``heads``: the retrieval heads,
        layer and KV head of all ranks; empty to find them.
        """
        self.cut = cut
        self._runner = model_runner
        self._load_texts = texts
        self._given = list(heads)
        self._device = torch.device(model_runner.device)
        self._ranks = Ranks(model_runner.tp_group)
        self._itemsize = model_runner.token_to_kv_pool.dtype.itemsize

    def block_of(self, n: int, cut: Cut) -> int:
        """Tokens per block of a document of ``n`` tokens."""
        return cut.size(n, self._itemsize)

    def analyse(self, ids: Sequence[int], cut: Cut | None = None) -> Analysis:
        """Analyse one document, prefilled from position 0; the result is placed on the device as
        :meth:`Analysis.placed` says.
        """
        cut = cut or self.cut
        n, block = len(ids), self.block_of(len(ids), cut)
        retrieval = self.heads
        plan = BlockPlan.build([n], block_tokens=block, local_blocks=cut.local_blocks, device=self._device)
        tokens, places = self._tensor(ids), torch.arange(n, device=self._device)
        texts = [Text(tokens, places)]
        for context in self._unrelated_contexts:
            texts.append(Text(tokens, places + len(context[0][0]), context.__getitem__))
        rows: list[dict[str, torch.Tensor]] = []
        keys: list[tuple[torch.Tensor, torch.Tensor]] = []  # of the retrieval heads, in order
        moved = torch.zeros(n, dtype=torch.float32, device=self._device)

        def observe(layer: int, states: Sequence[LayerState]) -> None:
            alone, *behind = states
            summary = _summary(self.gather_heads(alone.q), self.gather_heads(alone.k), plan, alone.scaling)
            rank = self._ranks.rank
            own = slice(rank * alone.k.shape[1], (rank + 1) * alone.k.shape[1])
            heads = slice(rank * alone.q.shape[1], (rank + 1) * alone.q.shape[1])
            row = {"attention": summary.attention, "exponent": summary.exponent.half()}
            row["mean_k"], row["mean_k_scale"] = quantize(summary.mean_k[:, own])
            row["local_q"], row["local_q_scale"] = quantize(summary.local_q[0, heads])
            row["token"] = (summary.token - plan.block_start[:-1]).clamp(min=0).to(torch.uint8)
            rows.append(row)
            keys.extend(quantize(alone.k[:, head]) for at, head in retrieval if at == layer)
            for state in behind:
                moved.add_((state.v.float() - alone.v.float()).square().sum((1, 2)))

        run(self._runner, texts, observe)
        sensitivity = self._ranks.sum(moved)
        stacked = {name: torch.stack([row[name] for row in rows]).cpu() for name in rows[0]}
        none = (
            torch.empty(n, 0, stacked["mean_k"].shape[-1], dtype=torch.int8),
            torch.empty(n, 0, dtype=torch.float16),
        )
        token_k, token_k_scale = (
            (torch.stack(parts, dim=1).cpu() for parts in zip(*keys, strict=True)) if keys else none
        )
        return Analysis(
            n,
            block,
            cut.local_blocks,
            **stacked,
            sensitivity=sensitivity.cpu(),
            begins=self.texts.begins(ids),
            heads=torch.tensor(retrieval, dtype=torch.uint8).view(-1, 2),
            token_k=token_k,
            token_k_scale=token_k_scale,
            basis=self.basis,
        ).placed(self._device)

    @cached_property
    def heads(self) -> list[tuple[int, int]]:
        """This rank's retrieval heads, layer and KV head. All ranks must ask together at the first time."""
        return self.own(self._given or self.found_heads)

    @cached_property
    def found_heads(self) -> list[tuple[int, int]]:
        """The retrieval heads of all ranks, as `retrieval_heads` finds them; asked as ``heads`` is."""
        contexts = self._unrelated_contexts
        score = retrieval_heads.found(self._runner, self.texts.unrelated, contexts, self.gather_heads)
        layers, kv_heads = score.shape
        count = retrieval_heads.affordable(layers, kv_heads, contexts[0][0][0].shape[2], self._itemsize)
        return retrieval_heads.best(score, count)

    def own(self, heads: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Select this rank's heads from all ranks' ``heads``, in its own numbering."""
        count, rank = self._runner.token_to_kv_pool.head_num, self._ranks.rank
        return [(layer, head - rank * count) for layer, head in heads if head // count == rank]

    @property
    def basis(self) -> str:
        """Digest of what an analysis depends on beside model, cut and heads."""
        return self.texts.digest

    @cached_property
    def texts(self) -> Texts:
        """The tokenizer's part in the analysis."""
        return self._load_texts()

    def gather_heads(self, part: torch.Tensor) -> torch.Tensor:
        """[n, heads, ...] of all ranks. Attention is averaged over all heads so that every rank finds the
        same tokens.
        """
        return self._ranks.gather_heads(part)

    @cached_property
    def _unrelated_contexts(self) -> list[list[Kv]]:
        """K and V of the unrelated texts, by text and layer."""
        texts = [
            Text(self._tensor(ids), torch.arange(len(ids), device=self._device))
            for ids in self.texts.unrelated
        ]
        contexts: list[list[Kv]] = [[] for _ in texts]

        def observe(layer: int, states: Sequence[LayerState]) -> None:
            for context, state in zip(contexts, states, strict=True):
                context.append((state.k.clone(), state.v.clone()))

        run(self._runner, texts, observe)
        return contexts

    def _tensor(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(ids, dtype=torch.int64).to(self._device)


def _summary(q: torch.Tensor, k: torch.Tensor, plan: BlockPlan, scale: float) -> BlockSummary:
    """Summarise one layer; in plain torch for head sizes that the kernel does not support."""
    if q.shape[-1] in HEAD_DIMS:
        return block_summary(q, k, plan, scale=scale)
    return block_summary_naive(q, k, plan, scale=scale, precision=torch.float32)
