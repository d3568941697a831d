"""The plan of which tokens make which block: built once for a batch of documents, used for all of its
layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


def default_block_tokens(length: int) -> int:
    """Return about 1/32 of the document, a power of two, from 8 to 64."""
    return min(64, max(8, 1 << max(0, round(length / 32) - 1).bit_length()))


@dataclass(frozen=True, eq=False)
class BlockPlan:
    """Documents one after another, cut into blocks; the tables are int32 on the device.

    ``doc_start`` [docs + 1]: first token. ``doc_block`` [docs + 1]: first block. ``local_start`` [docs]:
    first token of the local blocks. ``block_start`` [blocks + 1]: first token (blocks lie as close as the
    documents do). ``block_doc`` [blocks]."""

    lengths: tuple[int, ...]
    block_tokens: tuple[int, ...]  # per document
    query_stride: int
    min_queries: int
    doc_start: torch.Tensor
    doc_block: torch.Tensor
    local_start: torch.Tensor
    block_start: torch.Tensor
    block_doc: torch.Tensor

    @classmethod
    def build(
        cls,
        lengths: Sequence[int],
        *,
        block_tokens: int | Sequence[int] | None = None,
        local_blocks: int = 2,
        query_stride: int = 1,
        min_queries: int = 8,
        device: torch.device | str = "cpu",
    ) -> BlockPlan:
        """
        Args: lengths: tokens of each document. block_tokens: of all documents or of each, 1 to 128; default
            :func:`default_block_tokens`. local_blocks: how many blocks at a document's end its mean local Q
            is taken from. query_stride: received attention is summed over every ``query_stride``-th query of
            a document (position plus one is a multiple of it); 1 is exact.
            min_queries: a token with fewer (sampled) later queries gets no mean attention and no exponent.

        Raises: ValueError: a size below 1, a block above 128 tokens, or as many block sizes as there are no
            documents.
        """
        if any(n < 0 for n in lengths) or local_blocks < 1 or query_stride < 1 or min_queries < 2:
            raise ValueError(
                "Lengths must be 0 or more, local_blocks and query_stride at least 1, min_queries at least 2."
            )
        if block_tokens is None:
            sizes = [default_block_tokens(n) for n in lengths]
        else:
            sizes = [block_tokens] * len(lengths) if isinstance(block_tokens, int) else list(block_tokens)
        if len(sizes) != len(lengths) or any(not 1 <= size <= 128 for size in sizes):
            raise ValueError(
                f"block_tokens is {sizes} for {len(lengths)} documents; expected one size from 1 to 128 "
                "for each."
            )
        doc_start, doc_block, block_start, block_doc, local_start = [0], [0], [0], [], []
        for i, (n, size) in enumerate(zip(lengths, sizes, strict=True)):
            blocks = -(-n // size)
            local_start.append(doc_start[-1] + max(0, blocks - local_blocks) * size)
            block_start += [doc_start[-1] + min(n, (b + 1) * size) for b in range(blocks)]
            block_doc += [i] * blocks
            doc_start.append(doc_start[-1] + n)
            doc_block.append(doc_block[-1] + blocks)
        tables = [
            torch.tensor(t, dtype=torch.int32).to(device)
            for t in (doc_start, doc_block, local_start, block_start, block_doc)
        ]
        return cls(tuple(lengths), tuple(sizes), query_stride, min_queries, *tables)

    @property
    def documents(self) -> int:
        return len(self.lengths)

    @property
    def blocks(self) -> int:
        return self.block_doc.shape[0]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def max_length(self) -> int:
        return max(self.lengths, default=0)

    @property
    def max_blocks(self) -> int:
        return max(
            (-(-n // size) for n, size in zip(self.lengths, self.block_tokens, strict=True)), default=0
        )


@dataclass(frozen=True, eq=False)
class BlockSummary:
    """Summary of one layer of a document, for selection; float32 unless said otherwise."""

    mean_k: torch.Tensor  # [blocks, kv_heads, head_dim]
    min_k: torch.Tensor  # the same; with max_k the cuboid around the block's keys, whose centre is their mean
    max_k: torch.Tensor
    # [docs, query_heads, head_dim]: mean over the local blocks; zero for an empty document
    local_q: torch.Tensor
    # [tokens]: attention from strictly later (sampled) queries, mean over heads, summed over queries
    received: torch.Tensor
    # int32 [blocks]: the most attended token of the block, as a row of k; -1: none has enough later queries
    token: torch.Tensor
    # [blocks]: mean attention of that token; the smallest is the least important block. inf without a token
    attention: torch.Tensor
    # [blocks]: a of y = c x^-a over the distance x; the smallest is the most important. inf without a token
    exponent: torch.Tensor
    # bool [blocks]: the token's exponent lies over three standard deviations below the document's mean
    outlier: torch.Tensor
