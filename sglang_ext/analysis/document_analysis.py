"""A document's analysis, in memory and stored: block summaries, importance, outliers, context sensitivity."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

VERSION = 1  # of what the stored values mean, beside their names and shapes; raise it when that changes
WHOLE_ONLY = ("token", "attention", "exponent", "sensitivity")
"""Tensors that a document's prefill does not give by itself."""

_PLACED = ("mean_k", "mean_k_scale", "local_q", "local_q_scale", "token_k", "token_k_scale")
_SIGMAS = 3.0  # PauTa criterion
_BOUND = 0.03  # most of a document's KV that its mean keys may take
_LARGEST_BLOCK = 64
_TERM_BYTES = 8  # a token, of English text (`sglang_ext.context.selection.signals.terms`)
_CODES = {torch.int8: "i1", torch.uint8: "u1", torch.float16: "f2", torch.float32: "f4"}
_DTYPES = {code: np.dtype(code) for code in _CODES.values()}  # numpy's names


class SummaryError(ValueError):
    """The stored bytes are no analysis of this document, which has to be computed again."""


@dataclass(frozen=True)
class Cut:
    """The sizes of documents' blocks. ``block`` 0: about 1/32 of the document, a power of two from 8 to
    64.
    """

    block: int = 0
    local_blocks: int = 2

    def size(self, n: int, kv_itemsize: int) -> int:
        """Tokens per block of a document of ``n`` tokens: never so few that the mean keys, one byte a value,
        take over 3 % of the KV.
        """
        from ragserve_kernels.block_summary import default_block_tokens

        if self.block:
            return self.block
        size = default_block_tokens(n)
        while size < _LARGEST_BLOCK and 1 / (2 * size * kv_itemsize) > _BOUND:
            size *= 2
        return size


@dataclass(frozen=True, eq=False)
class Analysis:
    """The analysis of a document, for this rank's heads.

    It is whole, or a part: without those of `WHOLE_ONLY`, which are empty then.

    The tensors that selection multiplies (``mean_k``, ``local_q``, ``token_k`` and their scales) may be on
    the model's device; the others are on the CPU. The last block has the tokens that are left.

    Attributes:
        n_tokens, block, local_blocks: tokens of the document and of a block, and number of local blocks.
        mean_k: int8 [layers, blocks, kv_heads, head_dim] times ``mean_k_scale`` f16 [layers, blocks,
            kv_heads], mean key, rotated for the document's own positions.
        local_q: int8 [layers, heads, head_dim] times ``local_q_scale`` f16 [layers, heads], mean query of the
            local blocks.
        token: u8 [layers, blocks], the block's most attended token, counted in the block.
        attention: f32 [layers, blocks], its mean attention; inf if no token has enough later queries.
        exponent: f16 [layers, blocks], exponent of its power law.
        sensitivity: f32 [tokens], context sensitivity (docs/methods.md, section 6).
        begins: u8 [tokens], 1 where a sentence begins.
        heads: u8 [found, 2], layer and KV head of the retrieval heads (`retrieval_heads`).
        token_k: int8 [tokens, found, head_dim] times ``token_k_scale`` f16 [tokens, found], their keys,
            rotated like the means.
        basis: digest of what the analysis was made with (`Analyser.basis`).
    """

    n_tokens: int
    block: int
    local_blocks: int
    mean_k: torch.Tensor
    mean_k_scale: torch.Tensor
    local_q: torch.Tensor
    local_q_scale: torch.Tensor
    token: torch.Tensor
    attention: torch.Tensor
    exponent: torch.Tensor
    sensitivity: torch.Tensor
    begins: torch.Tensor
    heads: torch.Tensor
    token_k: torch.Tensor
    token_k_scale: torch.Tensor
    basis: str = ""

    @classmethod
    def of_sentences(cls, begins: torch.Tensor, block: int, **known: torch.Tensor) -> Analysis:
        """An analysis of which only the sentences, u8 [tokens], and the ``known`` tensors are true; the
        others are empty."""
        names = [each.name for each in fields(cls) if each.type == "torch.Tensor"]
        tensors: dict[str, Any] = {**dict.fromkeys(names, torch.empty(0)), **known, "begins": begins}
        return cls(len(begins), block, 1, **tensors)

    @property
    def is_whole(self) -> bool:
        """True if the context sensitivity and the blocks' static attention are there, too."""
        return len(self.sensitivity) == self.n_tokens

    def part(self) -> Analysis:
        """Copy it as it was before the rest was computed."""
        none: dict[str, Any] = dict.fromkeys(WHOLE_ONLY, torch.empty(0))
        return replace(self, **none)

    @property
    def layers(self) -> int:
        return int(self.mean_k.shape[0])

    @property
    def blocks(self) -> int:
        return int(self.mean_k.shape[1])

    @cached_property
    def nbytes(self) -> int:
        """Bytes of memory, with those of the document's terms, which the selection makes when it needs
        them."""
        return _TERM_BYTES * self.n_tokens + sum(tensor.nbytes for tensor in self._tensors().values())

    def placed(self, device: torch.device) -> Analysis:
        """Copy it with the tensors that selection multiplies on the device."""
        return replace(self, **{name: getattr(self, name).to(device) for name in _PLACED})

    def for_rules(self) -> Analysis:
        """Copy it without the tensors that selection multiplies: what is read once tokens are chosen. Its
        numbers of layers and blocks stay known."""
        none: dict[str, Any] = dict.fromkeys(_PLACED, torch.empty(0))
        return replace(self, **{**none, "mean_k": torch.empty((*self.mean_k.shape[:2], 0, 0))})

    def outliers(self) -> torch.Tensor:
        """Mark the most attended tokens of blocks whose exponent lies three sigma below the layer's mean
        (PauTa); bool [layers, tokens].
        """
        exponent = self.exponent.float()
        finite = exponent.isfinite()
        count = finite.sum(1, keepdim=True).clamp(min=1)
        values = exponent.masked_fill(~finite, 0.0)
        mean = values.sum(1, keepdim=True) / count
        deviation = ((values - mean).square().masked_fill(~finite, 0.0).sum(1, keepdim=True) / count).sqrt()
        chosen = finite & (values < mean - _SIGMAS * deviation)
        out = torch.zeros(self.layers, self.n_tokens, dtype=torch.bool)
        layer, block = chosen.nonzero(as_tuple=True)
        out[layer, block * self.block + self.token[layer, block].long()] = True
        return out

    def encode(self) -> bytes:
        """Return the bytes to store: a line of JSON that describes the tensors, then the tensors."""
        tensors = self._tensors()
        head = {
            "version": VERSION,
            "basis": self.basis,
            "tokens": self.n_tokens,
            "block": self.block,
            "local_blocks": self.local_blocks,
            "tensors": {name: [_CODES[tensor.dtype], *tensor.shape] for name, tensor in tensors.items()},
        }
        return b"".join(
            (
                json.dumps(head).encode(),
                b"\n",
                *(tensor.cpu().contiguous().numpy().tobytes() for tensor in tensors.values()),
            )
        )

    @classmethod
    def decode(cls, data: bytes, n_tokens: int) -> Analysis:
        """Read the analysis of a document of ``n_tokens``. Raises SummaryError for anything else."""
        try:
            line, at = data[: data.index(b"\n")], data.index(b"\n") + 1
            head = json.loads(line)
            if head["version"] != VERSION:
                raise SummaryError(f"an analysis of version {head['version']}, not {VERSION}")
            tensors: dict[str, torch.Tensor] = {}
            for name, (code, *shape) in head["tensors"].items():
                values = np.ndarray(shape, _DTYPES[code], data, at).copy()
                tensors[name] = torch.from_numpy(values)
                at += values.nbytes
            found = cls(head["tokens"], head["block"], head["local_blocks"], **tensors, basis=head["basis"])
        except SummaryError:
            raise
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise SummaryError(f"not an analysis: {error!r}") from error
        if (
            at != len(data)
            or found.n_tokens != n_tokens
            or found.blocks != -(-n_tokens // max(1, found.block))
        ):
            raise SummaryError("the analysis of another document")
        return found

    def _tensors(self) -> dict[str, torch.Tensor]:
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def quantize(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise [..., n] to int8 and one f16 scale a row [...]: value = int8 * scale, error <= scale / 2."""
    scale = (values.float().abs().amax(-1) / 127).clamp(min=2**-24).half()
    return (values.float() / scale.float()[..., None]).round().clamp(-127, 127).to(torch.int8), scale
