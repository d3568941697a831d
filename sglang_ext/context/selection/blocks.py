"""A plan's documents cut into blocks: initial and local blocks are always kept, a selector chooses among the
middle ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from sglang_ext.wire.protocol import Span


@dataclass(frozen=True, eq=False)
class Blocks:
    """Tables over D documents of at most M blocks each and N tokens together, int64 on the CPU; positions
    refer to the full prompt.

    ``first``: position of the first document token. ``size`` [D]: tokens of a whole block. ``start`` and
    ``length`` [D, M]: of each block, length 0 where a document has fewer. ``middle`` bool [D, M]: neither
    initial nor local."""

    first: int
    size: torch.Tensor
    start: torch.Tensor
    length: torch.Tensor
    middle: torch.Tensor

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
        return cls(documents[0].start, size, begin[:, None] + within, length, middle)

    @property
    def documents(self) -> int:
        return len(self.size)

    @property
    def tokens(self) -> int:
        """N: document tokens."""
        return int(self.length.sum())

    @cached_property
    def token_block(self) -> torch.Tensor:
        """[N]: block d * M + m of each document token."""
        return torch.repeat_interleave(self.length.flatten())

    @cached_property
    def token_offset(self) -> torch.Tensor:
        """[N]: the place of each document token in its block."""
        length = self.length.flatten()
        return torch.arange(self.tokens) - (length.cumsum(0) - length)[self.token_block]

    def fixed(self) -> torch.Tensor:
        """Positions of the tokens in initial and local blocks, ascending."""
        return self.first + (~self.middle.flatten()[self.token_block]).nonzero()[:, 0]

    @property
    def middle_tokens(self) -> int:
        return int(self.length[self.middle].sum())
