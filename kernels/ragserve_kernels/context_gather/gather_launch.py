"""How both gathers are launched. Import with Triton only."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl

from ragserve_kernels.context_gather.context_rows import RowForm
from ragserve_kernels.context_gather.types import HostCodes
from ragserve_kernels.dispatch import host_tile_bytes
from ragserve_kernels.kv import KVLayers

TL_DTYPE = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
PROGRAMS = 3  # as `resident_gather`
CODE_PROGRAMS = 8  # as `rotate_gather` from codes


class GatherLaunch(NamedTuple):
    """What the launches of both kernels pass alike."""

    programs: int  # at most
    form: RowForm
    tile: int  # tokens, a power of two
    constants: dict[str, Any]  # of the kernel, and its warps

    @classmethod
    def of(
        cls,
        host: torch.Tensor | HostCodes,
        dst: KVLayers,
        turns: torch.Tensor,
        page: int,
        programs: int | None,
    ) -> GatherLaunch:
        """``page``: tokens of a context's page; ``programs``: how many are asked for."""
        codes = isinstance(host, HostCodes)
        programs = programs or (CODE_PROGRAMS if codes else PROGRAMS)
        _, kv_heads, head_dim, dtype = dst.layout
        value_bytes = 2 * head_dim * dtype.itemsize
        row_bytes = 2 * head_dim if codes else value_bytes
        tile = max(1, min(host_tile_bytes(programs) // row_bytes, (64 << 10) // value_bytes))
        constants = {
            "KV_HEADS": kv_heads,
            "PAGE": page,
            "TILE": tile,
            "DTYPE": TL_DTYPE[dtype],
            "num_warps": max(4, min(16, tile * value_bytes // 4096)),
        }
        return cls(programs, RowForm.of(host, turns), tile, constants)
