"""Exact attention of a question to a prompt on host pages, of which the device sees one piece at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ragserve_kernels.paged import KVPair
from sglang_ext.kv_offload.documents.context_reader import ContextReader
from sglang_ext.kv_offload.host.host_reader import HostReader

_SCORE_BYTES = 64 * 2**20  # of one piece's scores, float32


@dataclass(eq=False, slots=True)
class StreamedTokens:
    """New tokens of a request, the last ones it has: they read all of its tokens up to themselves.

    Attributes:
        place: of the first of them among the new tokens of the pass.
        count: their number.
        prompt: reads the pages on the host, all of which come before them.
        slots: int64 [n]: slots of the tokens behind those pages, the new ones included.
        layers: how many have attended so far.
    """

    place: int
    count: int
    prompt: HostReader | ContextReader
    slots: torch.Tensor
    layers: int = 0

    def attend(self, q: torch.Tensor, out: torch.Tensor, kv: KVPair, layer: int, scale: float) -> None:
        """Overwrite the tokens' rows of ``out``; ``q`` and ``out`` ``[new tokens, heads, head_dim]``."""
        own = slice(self.place, self.place + self.count)
        kv_heads = kv[0].shape[1]
        # [kv_heads, group * tokens, head_dim]
        queries = q[own].unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2).float() * scale
        top = queries.new_full((*queries.shape[:2], 1), -torch.inf)
        total, summed = torch.zeros_like(top), torch.zeros_like(queries)
        for k, v, hidden in self._pieces(kv, layer, q.shape[1]):
            scores = queries @ k.float().transpose(1, 2)
            if hidden is not None:
                scores.unflatten(1, (-1, self.count)).masked_fill_(hidden, -torch.inf)
            highest = torch.maximum(top, scores.amax(-1, keepdim=True))
            weights, shrunk = torch.exp(scores - highest), torch.exp(top - highest)
            total = total * shrunk + weights.sum(-1, keepdim=True)
            summed = summed * shrunk + weights @ v.float()
            top = highest
        attended = (summed / total).unflatten(1, (-1, self.count)).permute(2, 0, 1, 3)
        out[own] = attended.flatten(1, 2).to(out.dtype)
        self.layers += 1

    def _pieces(
        self, kv: KVPair, layer: int, heads: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        """Yield K and V of all tokens and, of those in ``slots``, which a new token must not see: bool
        [new tokens, tokens]. The first piece hides nothing, so that each row has a score."""
        tokens = max(1, _SCORE_BYTES // (4 * heads * self.count))
        for k, v in self.prompt.pieces(layer, tokens):
            yield k, v, None
        place = torch.arange(len(self.slots), device=self.slots.device)
        last = place[len(self.slots) - self.count :, None]
        for some, places in zip(self.slots.split(tokens), place.split(tokens), strict=True):
            k, v = (half[some].transpose(0, 1) for half in kv)  # type: ignore[index]
            yield k, v, places > last
