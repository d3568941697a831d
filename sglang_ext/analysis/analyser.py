"""Computes analyses inside the engine: one pass of a document alone, and behind each foreign context, through
the model's own layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ragserve_kernels.block_summary import BlockPlan, BlockSummary, block_summary, block_summary_naive
from ragserve_kernels.kv import HEAD_DIMS
from sglang_ext.analysis import retrieval_heads as heads
from sglang_ext.analysis.document_analysis import Analysis, Cut, quantize
from sglang_ext.analysis.forward import Kv, LayerState, Text, run
from sglang_ext.analysis.texts import Texts


class Analyser:
    """Analyses documents on one rank. Every method launches work on the current stream and takes part in the
    ranks' collectives.
    """

    def __init__(
        self, model_runner: Any, texts: Callable[[], Texts], cut: Cut, heads: Sequence[tuple[int, int]] = ()
    ) -> None:
        """``texts`` is asked once, before the first document: it loads the tokenizer. ``heads``: layer and KV
        head, of all ranks, of the retrieval heads; none: they are found."""
        self.cut = cut
        self._runner = model_runner
        self._load_texts = texts
        self._texts: Texts | None = None
        self._contexts: list[list[Kv]] | None = None  # by text, by layer
        self._given = list(heads)
        self._own_way: list[tuple[int, int]] | None = None
        self._found: list[tuple[int, int]] | None = None
        self._device = torch.device(model_runner.device)
        self._tp_group = model_runner.tp_group
        self._itemsize = model_runner.token_to_kv_pool.dtype.itemsize

    def block_of(self, n: int, cut: Cut) -> int:
        """Tokens of a block of a document of ``n`` tokens."""
        return cut.size(n, self._itemsize)

    def analyse(self, ids: Sequence[int], cut: Cut | None = None) -> Analysis:
        """The analysis of one document, prefilled from position 0; as :meth:`Analysis.placed` has it."""
        cut = cut or self.cut
        n, block = len(ids), self.block_of(len(ids), cut)
        retrieval = self.heads
        plan = BlockPlan.build([n], block_tokens=block, local_blocks=cut.local_blocks, device=self._device)
        tokens, places = self._tensor(ids), torch.arange(n, device=self._device)
        texts = [Text(tokens, places)]
        for context in self._foreign_contexts():
            texts.append(Text(tokens, places + len(context[0][0]), context.__getitem__))
        rows: list[dict[str, torch.Tensor]] = []
        keys: list[tuple[torch.Tensor, torch.Tensor]] = []  # of the retrieval heads, in their order
        moved = torch.zeros(n, dtype=torch.float32, device=self._device)

        def observe(layer: int, states: Sequence[LayerState]) -> None:
            alone, *behind = states
            summary = _summary(self.gathered(alone.q), self.gathered(alone.k), plan, alone.scaling)
            own = slice(self._rank * alone.k.shape[1], (self._rank + 1) * alone.k.shape[1])
            heads = slice(self._rank * alone.q.shape[1], (self._rank + 1) * alone.q.shape[1])
            mean_k, mean_k_scale = quantize(summary.mean_k[:, own])
            local_q, local_q_scale = quantize(summary.local_q[0, heads])
            inside = (summary.token - plan.block_start[:-1]).clamp(min=0).to(torch.uint8)
            rows.append(
                {
                    "mean_k": mean_k,
                    "mean_k_scale": mean_k_scale,
                    "local_q": local_q,
                    "local_q_scale": local_q_scale,
                    "token": inside,
                    "attention": summary.attention,
                    "exponent": summary.exponent.half(),
                }
            )
            keys.extend(quantize(alone.k[:, head]) for at, head in retrieval if at == layer)
            for state in behind:
                moved.add_((state.v.float() - alone.v.float()).square().sum((1, 2)))

        run(self._runner, texts, observe)
        sensitivity = self._tp_group.all_reduce(moved) if self._world > 1 else moved
        stacked = {name: torch.stack([row[name] for row in rows]).cpu() for name in rows[0]}
        none = (
            torch.empty(n, 0, stacked["mean_k"].shape[-1], dtype=torch.int8),
            torch.empty(n, 0, dtype=torch.float16),
        )
        token_k, token_k_scale = (
            (torch.stack(parts, dim=1).cpu() for parts in zip(*keys, strict=True)) if keys else none
        )
        analysis = Analysis(
            n,
            block,
            cut.local_blocks,
            **stacked,
            sensitivity=sensitivity.cpu(),
            begins=self.texts.begins(ids),
            heads=torch.tensor(retrieval, dtype=torch.uint8).view(-1, 2),
            token_k=token_k,
            token_k_scale=token_k_scale,
        )
        return analysis.placed(self._device)

    @property
    def heads(self) -> list[tuple[int, int]]:
        """This rank's retrieval heads, layer and KV head; found at the first call, in which all ranks take
        part.
        """
        if self._found is None:
            self._found = self.own(self._given or self.find_heads())
        return self._found

    def find_heads(self) -> list[tuple[int, int]]:
        """Those of all ranks, as `heads.py` finds them. All ranks take part."""
        if self._own_way is None:
            contexts = self._foreign_contexts()
            score = heads.found(self._runner, self.texts.foreign, contexts, self.gathered)
            count = heads.affordable(
                score.shape[0], score.shape[1], contexts[0][0][0].shape[2], self._itemsize
            )
            self._own_way = heads.best(score, count)
        return self._own_way

    def own(self, heads: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """This rank's of those of all ranks, counted in it."""
        count = self._runner.token_to_kv_pool.head_num
        return [(layer, head - self._rank * count) for layer, head in heads if head // count == self._rank]

    @property
    def texts(self) -> Texts:
        if self._texts is None:
            self._texts = self._load_texts()
        return self._texts

    @property
    def _world(self) -> int:
        return 1 if self._tp_group is None else int(self._tp_group.world_size)

    @property
    def _rank(self) -> int:
        return 0 if self._tp_group is None else int(self._tp_group.rank_in_group)

    def gathered(self, part: torch.Tensor) -> torch.Tensor:
        """[n, heads, ...] of all ranks: attention is averaged over all heads, so that every rank finds the
        same tokens.
        """
        return part if self._world == 1 else self._tp_group.all_gather(part.contiguous(), dim=1)

    def _foreign_contexts(self) -> list[list[Kv]]:
        if self._contexts is None:
            texts = [
                Text(self._tensor(ids), torch.arange(len(ids), device=self._device))
                for ids in self.texts.foreign
            ]
            contexts: list[list[Kv]] = [[] for _ in texts]

            def observe(layer: int, states: Sequence[LayerState]) -> None:
                for context, state in zip(contexts, states, strict=True):
                    context.append((state.k.clone(), state.v.clone()))

            run(self._runner, texts, observe)
            self._contexts = contexts
        return self._contexts

    def _tensor(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(ids, dtype=torch.int64).to(self._device)


def _summary(q: torch.Tensor, k: torch.Tensor, plan: BlockPlan, scale: float) -> BlockSummary:
    """One layer's; head sizes that the kernel does not know take the plain way."""
    if q.shape[-1] in HEAD_DIMS:
        return block_summary(q, k, plan, scale=scale)
    return block_summary_naive(q, k, plan, scale=scale, precision=torch.float32)
