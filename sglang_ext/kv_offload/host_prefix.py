"""Prompts whose KV lies on host pages while their request waits in SGLang's queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sglang_ext.kv_offload.documents.context_pages import ContextPages
from sglang_ext.wire.protocol import OffloadCounts


@dataclass(eq=False, slots=True)
class HostPrefix:
    """KV of a waiting request on the host: it is admitted with resident blocks and the tail only.

    Attributes:
        owner: of its host pages.
        selection: pages of a selection, at most.
        n_resident: resident blocks that it is admitted with. fixed: their number never changes.
        shared: as in `OffloadedRow`.
        host: int32 [pages]: host pages of the prompt, on the device. numbers: the same, on the host.
        tail: host pages of the tokens behind those, the last one not always full.
        tokens: tokens whose KV is there, those of the tail included.
        counts: the request's own, to go on with.
        context: as in `OffloadedRow`; the tail is always the request's own.
    """

    req: Any
    owner: int
    selection: int
    n_resident: int
    fixed: bool
    shared: bool
    host: torch.Tensor
    numbers: list[int]
    tail: list[int]
    tokens: int
    counts: OffloadCounts
    context: ContextPages | None = None

    @property
    def pages(self) -> int:
        return len(self.numbers)
