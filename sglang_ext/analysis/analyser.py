"""Computes documents' KV and analyses inside the engine, through the model's own layers.

Documents are prefilled behind a prefix, which is dropped: its KV is computed once, and its keys are moved to
the positions before a document's first. So documents stand at positions from 0 on, with a prefix or without.
A whole analysis takes one pass of two copies of the documents, one behind the prefix and one alone; for most
of it one copy does, which is the documents' prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from ragserve_kernels import dispatch as kernels
from ragserve_kernels.block_summary import (
    BlockPlan,
    BlockSummary,
    StaticAttention,
    block_summary,
    static_attention,
)
from ragserve_kernels.kv import HEAD_DIMS
from sglang_ext.analysis import retrieval_heads
from sglang_ext.analysis.document_analysis import WHOLE_ONLY, Analysis, Cut, quantize
from sglang_ext.analysis.forward import Kv, LayerState, Text, pieces, run
from sglang_ext.analysis.texts import Texts
from sglang_ext.ranks.ranks import Ranks
from sglang_ext.tensors.rope import Rotation
from sglang_ext.versions import tp_group

Keep = Callable[[int, torch.Tensor, torch.Tensor], None]
"""Called for each layer with K and V, [tokens, kv_heads, head_dim], of the documents one after another."""


@dataclass(frozen=True)
class DocumentPart:
    """Tokens ``ids`` of a document from position ``start`` on. ``before``: by layer, K and V of the
    document's ``start`` tokens before them. ``first``: without the prefix.
    """

    ids: Sequence[int]
    start: int
    before: Callable[[int], Kv]
    first: bool = False


class Analyser:
    """Analyses documents. Per rank: every method launches work on the current stream, and all ranks must call
    it together.
    """

    def __init__(
        self,
        model_runner: Any,
        texts: Callable[[], Texts],
        cut: Cut,
        heads: Sequence[tuple[int, int]] = (),
        *,
        rotation: Rotation,
        prefix: Sequence[int] = (),
    ) -> None:
        """``texts`` loads the tokenizer, once, before the first document. ``heads``: the retrieval heads,
        layer and KV head of all ranks; empty to find them. ``prefix``: token ids that documents are prefilled
        behind; empty to prefill them alone.
        """
        self.cut = cut
        self.prefix = list(prefix)
        self._rotation = rotation
        self._runner = model_runner
        self._load_texts = texts
        self._given = list(heads)
        self._device = torch.device(model_runner.device)
        self._ranks = Ranks(tp_group(model_runner))
        self._itemsize = model_runner.token_to_kv_pool.dtype.itemsize

    def block_of(self, n: int, cut: Cut) -> int:
        """Tokens per block of a document of ``n`` tokens."""
        return cut.size(n, self._itemsize)

    def analyse(self, ids: Sequence[int], cut: Cut | None = None) -> Analysis:
        """Analyse one document, prefilled behind the prefix; the result is placed on the device as
        :meth:`Analysis.placed` says.
        """
        return self.analyse_all([ids], cut)[0]

    def analyse_all(
        self,
        documents: Sequence[Sequence[int]],
        cut: Cut | None = None,
        keep: Keep | None = None,
        *,
        whole: bool = True,
    ) -> list[Analysis]:
        """Analyse documents in one pass, each as :meth:`analyse` does. ``keep`` gets their K and V, which are
        those of a prefill behind the prefix. Not ``whole``: without the context sensitivity, which takes
        another copy of them, and the static attention of their blocks: little more than their prefill.
        """
        steps = self.in_pieces(documents, cut, keep, whole=whole)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                found: list[Analysis] = end.value
                return found

    def in_pieces(
        self,
        documents: Sequence[Sequence[int]],
        cut: Cut | None = None,
        keep: Keep | None = None,
        *,
        whole: bool = True,
    ) -> Generator[float, None, list[Analysis]]:
        """`analyse_all` in pieces, between which other work may be done. Yields the work of each, in tokens
        that go through all layers, and returns the analyses. Closing it frees what it holds.
        """
        cut = cut or self.cut
        lengths = [len(ids) for ids in documents]
        blocks = [self.block_of(n, cut) for n in lengths]
        plan = BlockPlan.build(
            lengths, block_tokens=blocks, local_blocks=cut.local_blocks, device=self._device
        )
        layers = _Layers(self, plan, keep)
        tokens = [self._tensor(ids) for ids in documents]
        places = [torch.arange(n, device=self._device) for n in lengths]
        copies = [Text(*text) for text in zip(tokens, places, strict=True)]
        if self.prefix or whole:
            before = self.prefix_kv  # computed by now: a pass cannot run inside of another
            behind = [Text(text.ids, text.positions, before.__getitem__) for text in copies]
            own, other = (behind, copies) if self.prefix else (copies, behind)
            copies = own + other if whole else own
        yield from pieces(self._runner, copies, layers.observe)
        found = layers.by_document(self._ranks.sum(layers.moved).cpu() if whole else None)
        return [
            Analysis(
                n,
                block,
                cut.local_blocks,
                begins=self.texts.begins(ids),
                heads=torch.tensor(self.heads, dtype=torch.uint8).view(-1, 2),
                basis=self.basis,
                **tensors,
            ).placed(self._device)
            for ids, n, block, tensors in zip(documents, lengths, blocks, found, strict=True)
        ]

    def prefill(self, parts: Sequence[DocumentPart], keep: Keep) -> None:
        """Prefill parts of documents behind the prefix; ``keep`` gets their K and V."""
        before = self.prefix_kv

        def context(part: DocumentPart) -> Callable[[int], Kv] | None:
            if part.first:
                return part.before if part.start else None
            return partial(behind, part) if part.start else before.__getitem__

        def behind(part: DocumentPart, layer: int) -> Kv:
            (k, v), (own_k, own_v) = before[layer], part.before(layer)
            return torch.cat((k, own_k.to(k.dtype))), torch.cat((v, own_v.to(v.dtype)))

        texts = [
            Text(
                self._tensor(part.ids),
                part.start + torch.arange(len(part.ids), device=self._device),
                context(part),
            )
            for part in parts
        ]

        def observe(layer: int, states: Sequence[LayerState]) -> None:
            keep(layer, torch.cat([state.k for state in states]), torch.cat([state.v for state in states]))

        run(self._runner, texts, observe)

    @property
    def rank(self) -> int:
        """The tensor-parallel rank whose heads are analysed."""
        return self._ranks.rank

    @cached_property
    def heads(self) -> list[tuple[int, int]]:
        """This rank's retrieval heads, layer and KV head. All ranks must ask together at the first time."""
        return self.own(self._given or self.found_heads)

    @cached_property
    def found_heads(self) -> list[tuple[int, int]]:
        """The retrieval heads of all ranks, as `retrieval_heads` finds them; asked as ``heads`` is."""
        layers, kv_heads = self._found.shape
        head_dim = self.prefix_kv[0][0].shape[2]
        count = retrieval_heads.affordable(layers, kv_heads, head_dim, self._itemsize)
        return retrieval_heads.best(self._found, count)

    @cached_property
    def critical_layers(self) -> tuple[int, ...]:
        """The layers whose attention finds most; asked as ``heads`` is."""
        return retrieval_heads.best_layers(self._found)

    @cached_property
    def _found(self) -> torch.Tensor:
        """Score of each head of all ranks, f32 [layers, kv_heads]."""
        unrelated = self.texts.unrelated
        return retrieval_heads.found(self._runner, unrelated, self._kv(unrelated), self.gather_heads)

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
    def prefix_kv(self) -> list[Kv]:
        """By layer, K and V of the prefix, or without one of the text that analyses place documents behind,
        at the positions before a document's first."""
        ids = self.prefix or self.texts.unrelated[0]
        back = torch.full((len(ids),), -len(ids), dtype=torch.int64, device=self._device)
        return [(self._rotation.rotate(k, back), v) for k, v in self._kv([ids])[0]]

    def _kv(self, unrelated: Sequence[Sequence[int]]) -> list[list[Kv]]:
        """K and V of texts, each alone, by text and layer."""
        texts = [Text(self._tensor(ids), torch.arange(len(ids), device=self._device)) for ids in unrelated]
        contexts: list[list[Kv]] = [[] for _ in texts]

        def observe(layer: int, states: Sequence[LayerState]) -> None:
            for context, state in zip(contexts, states, strict=True):
                context.append((state.k.clone(), state.v.clone()))

        if texts:
            run(self._runner, texts, observe)
        return contexts

    def _tensor(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(ids, dtype=torch.int64).to(self._device)


class _Layers:
    """Collects what one pass finds of several documents, layer by layer."""

    def __init__(self, analyser: Analyser, plan: BlockPlan, keep: Keep | None) -> None:
        self._analyser = analyser
        self._plan = plan
        self._keep = keep
        self._heads = analyser.heads
        self._rows: list[dict[str, torch.Tensor]] = []
        self._keys: list[tuple[torch.Tensor, torch.Tensor]] = []  # of the retrieval heads, in order
        self._head_dim = 0
        self._means = _Means.of(plan)
        self.moved = torch.zeros(plan.tokens, dtype=torch.float32, device=plan.doc_start.device)

    def observe(self, layer: int, states: Sequence[LayerState]) -> Iterator[int]:
        """Take a layer of the documents as they are prefilled, then of their other copies."""
        count, plan, gather = self._plan.documents, self._plan, self._analyser.gather_heads
        own_copies = states[:count]
        q, k, v = (torch.cat([getattr(state, name) for state in own_copies]) for name in "qkv")
        if self._keep is not None:
            self._keep(layer, k, v)
        whole = len(states) > count
        mean_k, local_q = self._means.of_blocks(k), self._means.of_local_blocks(q)
        row: dict[str, torch.Tensor] = {}
        row["mean_k"], row["mean_k_scale"] = quantize(mean_k)
        row["local_q"], row["local_q_scale"] = quantize(local_q)
        if whole:
            summary = yield from _summary(gather(q), gather(k), plan, own_copies[0].scaling)
            row |= {"attention": summary.attention, "exponent": summary.exponent.half()}
            row["token"] = (summary.token - plan.block_start[:-1]).clamp(min=0).to(torch.uint8)
            other = torch.cat([state.v for state in states[count:]])
            self.moved.add_((other.float() - v.float()).square().sum((1, 2)))
        self._rows.append(row)
        self._head_dim = k.shape[2]
        self._keys.extend(quantize(k[:, head]) for at, head in self._heads if at == layer)

    def by_document(self, sensitivity: torch.Tensor | None) -> list[dict[str, torch.Tensor]]:
        """The tensors of each document's analysis, on the CPU; ``sensitivity``: that of all tokens, None
        where the analyses are not whole."""
        stacked = {name: torch.stack([row[name] for row in self._rows]).cpu() for name in self._rows[0]}
        none = (
            torch.empty(self._plan.tokens, 0, self._head_dim, dtype=torch.int8),
            torch.empty(self._plan.tokens, 0, dtype=torch.float16),
        )
        token_k, token_k_scale = (
            (torch.stack(parts, dim=1).cpu() for parts in zip(*self._keys, strict=True))
            if self._keys
            else none
        )
        tokens = {"token_k": token_k, "token_k_scale": token_k_scale}
        unknown = dict.fromkeys(WHOLE_ONLY, torch.empty(0)) if sensitivity is None else {}
        if sensitivity is not None:
            tokens["sensitivity"] = sensitivity
        found = []
        bounds = zip(
            pairwise(self._plan.doc_start.tolist()), pairwise(self._plan.doc_block.tolist()), strict=True
        )
        for number, (own, blocks) in enumerate(bounds):
            parts = {name: tensor[slice(*own)] for name, tensor in tokens.items()}
            for name, tensor in stacked.items():
                local = name.startswith("local_q")
                parts[name] = tensor[:, number] if local else tensor[:, slice(*blocks)]
            # not views of all documents
            found.append(unknown | {name: part.clone() for name, part in parts.items()})
        return found


class _Means(NamedTuple):
    """Means of a batch's blocks, all documents at once."""

    block: torch.Tensor  # int64 [tokens], each token's
    sizes: torch.Tensor  # f32 [blocks]
    rows: torch.Tensor  # int64 [tokens of local blocks]
    document: torch.Tensor  # int64, of each of them
    counts: torch.Tensor  # f32 [documents]

    @classmethod
    def of(cls, plan: BlockPlan) -> _Means:
        device = plan.doc_start.device
        sizes = plan.block_start.diff().cpu()
        starts, ends = plan.local_start.tolist(), plan.doc_start.tolist()[1:]
        parts = [torch.arange(start, end) for start, end in zip(starts, ends, strict=True)]
        counts = torch.tensor([len(part) for part in parts])
        return cls(
            torch.repeat_interleave(torch.arange(len(sizes)), sizes).to(device),
            sizes.float().to(device),
            torch.cat(parts).to(device),
            torch.repeat_interleave(torch.arange(len(parts)), counts).to(device),
            counts.float().to(device),
        )

    def of_blocks(self, k: torch.Tensor) -> torch.Tensor:
        """f32 [blocks, heads, head_dim], of k [tokens, heads, head_dim]."""
        return _mean(k, self.block, self.sizes)

    def of_local_blocks(self, q: torch.Tensor) -> torch.Tensor:
        """f32 [documents, heads, head_dim]: of the local blocks' queries, of q [tokens, heads, head_dim]."""
        return _mean(q[self.rows], self.document, self.counts)


def _mean(values: torch.Tensor, group: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    total = values.new_zeros((len(counts), *values.shape[1:]), dtype=torch.float32)
    return total.index_add_(0, group, values.float()) / counts[:, None, None]


def _summary(
    q: torch.Tensor, k: torch.Tensor, plan: BlockPlan, scale: float
) -> Generator[int, None, BlockSummary | StaticAttention]:
    """Summarise one layer; in plain torch, and in pieces, where no kernel does it."""
    if kernels.use_triton(q) and q.shape[-1] in HEAD_DIMS:
        return block_summary(q, k, plan, scale=scale)
    found: StaticAttention = yield from static_attention(q, k, plan, scale=scale)
    return found
