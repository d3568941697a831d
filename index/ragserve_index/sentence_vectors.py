"""Embeddings of a chunk's sentences, one byte a component."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_HEAD = np.dtype([("start", "<u4"), ("scale", "<f2")])
_STEPS = 127


@dataclass(frozen=True, eq=False)
class SentenceVectors:
    """Vectors of n sentences of a chunk.

    ``starts`` uint32 [n]: first character of each in the chunk's text, ascending. A sentence's vector, of
    length 1 but for rounding, is its row of ``steps`` int8 [n, dim] times its ``scales`` float16 [n]."""

    starts: npt.NDArray[np.uint32]
    scales: npt.NDArray[np.float16]
    steps: npt.NDArray[np.int8]

    @classmethod
    def of(cls, starts: Sequence[int], vectors: npt.NDArray[np.float32]) -> SentenceVectors:
        """Round ``vectors`` [n, dim] to eight bits: the largest component of each is 127 steps."""
        scales = (np.abs(vectors).max(axis=1, initial=0.0) / _STEPS).astype(np.float16)
        divided = vectors / np.maximum(scales.astype(np.float32), 1e-8)[:, None]
        steps = np.clip(np.rint(divided), -_STEPS, _STEPS).astype(np.int8)
        return cls(np.asarray(starts, dtype=np.uint32), scales, steps)

    @staticmethod
    def bytes_each(dim: int) -> int:
        """Stored bytes of a sentence."""
        return _HEAD.itemsize + dim

    def __len__(self) -> int:
        return len(self.starts)

    def scores(self, query: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Cosines to a query of length 1, float32 [n]."""
        products = (self.steps.astype(np.float32) @ query) * self.scales.astype(np.float32)
        cosines: npt.NDArray[np.float32] = np.clip(products, -1.0, 1.0).astype(np.float32)
        return cosines

    def encode(self) -> bytes:
        """The bytes to store: start and scale of each sentence, then the steps; `bytes_each` a sentence."""
        head = np.empty(len(self), dtype=_HEAD)
        head["start"], head["scale"] = self.starts, self.scales
        return head.tobytes() + self.steps.tobytes()

    @classmethod
    def decode(cls, data: bytes, dim: int) -> SentenceVectors:
        """Read what `encode` wrote. Raises ValueError for a wrong length."""
        n, rest = divmod(len(data), cls.bytes_each(dim))
        if rest:
            raise ValueError(f"{len(data)} bytes are no sentences of {dim} components")
        head = np.frombuffer(data, dtype=_HEAD, count=n)
        steps = np.frombuffer(data, dtype=np.int8, offset=n * _HEAD.itemsize).reshape(n, dim)
        return cls(head["start"].astype(np.uint32), head["scale"].astype(np.float16), steps)
