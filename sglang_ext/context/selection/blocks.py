"""A plan's documents cut into blocks: which tokens are initial and local and always kept, and which blocks a
selector chooses among.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_ext.protocol import Span


@dataclass(frozen=True, eq=False)
class Blocks:
    """Tables over D documents of at most M blocks each, int64 on the CPU; positions are those in the full
    prompt.

    ``start`` and ``length`` [D, M] of each block, length 0 where a document has fewer; ``middle`` bool [D,
    M]: neither initial nor local; ``size`` [D]: tokens of a whole block. ``token_block`` [N]: the block,
    counted d * M + m, of each of the N document tokens, and ``token_offset`` [N] its place in it. ``first``
    is the position of the first document token."""

    first: int
    size: torch.Tensor
    start: torch.Tensor
    length: torch.Tensor
    middle: torch.Tensor
    token_block: torch.Tensor
    token_offset: torch.Tensor

    @classmethod
    def build(cls, documents: Sequence[Span], sizes: Sequence[int], *, initial: int, local: int) -> Blocks:
        """``documents`` lie one after the other; ``sizes``: tokens of a block of each; ``initial`` and
        ``local``: how many blocks.
        """
        lengths = torch.tensor([span.end - span.start for span in documents], dtype=torch.int64)
        size = torch.tensor(sizes, dtype=torch.int64)
        begin = torch.tensor([span.start for span in documents], dtype=torch.int64)
        count = -(-lengths // size)
        number = torch.arange(int(count.max()))[None, :]
        within = number * size[:, None]
        length = (lengths[:, None] - within).clamp(min=0).minimum(size[:, None])
        middle = (number >= initial) & (number < count[:, None] - local)
        document = torch.repeat_interleave(torch.arange(len(sizes)), lengths)
        inside = torch.arange(int(lengths.sum())) + documents[0].start - begin[document]
        token_block = document * number.shape[1] + inside // size[document]
        return cls(
            documents[0].start,
            size,
            begin[:, None] + within,
            length,
            middle,
            token_block,
            inside % size[document],
        )

    @property
    def documents(self) -> int:
        return len(self.size)

    @property
    def tokens(self) -> int:
        """N: document tokens."""
        return len(self.token_block)

    def fixed(self) -> torch.Tensor:
        """Positions of the tokens of initial and local blocks, ascending."""
        return self.first + (~self.middle.flatten()[self.token_block]).nonzero()[:, 0]

    @property
    def middle_tokens(self) -> int:
        return int(self.length[self.middle].sum())
