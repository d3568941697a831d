"""A plan's documents cut into blocks: initial and local blocks are always kept, a selector chooses among the
middle ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_ext.protocol import Span


@dataclass(frozen=True, eq=False)
class Blocks:
    """Tables over D documents of at most M blocks each, int64 on the CPU; positions refer to the full prompt.

    ``first``: position of the first document token. ``size`` [D]: tokens of a whole block. ``start`` and
    ``length`` [D, M]: of each block, length 0 where a document has fewer. ``middle`` bool [D, M]: neither
    initial nor local. ``token_block`` [N]: block d * M + m of each of the N document tokens;
    ``token_offset`` [N]: its place in the block."""

    first: int
    size: torch.Tensor
    start: torch.Tensor
    length: torch.Tensor
    middle: torch.Tensor
    token_block: torch.Tensor
    token_offset: torch.Tensor

    @classmethod
    def build(cls, documents: Sequence[Span], sizes: Sequence[int], *, initial: int, local: int) -> Blocks:
        """Cut adjacent ``documents`` into blocks of ``sizes`` tokens; ``initial`` and ``local`` count
        blocks."""
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
        """Positions of the tokens in initial and local blocks, ascending."""
        return self.first + (~self.middle.flatten()[self.token_block]).nonzero()[:, 0]

    @property
    def middle_tokens(self) -> int:
        return int(self.length[self.middle].sum())
