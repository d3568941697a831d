"""A KV pool of 8 or 4 bits: SGLang's plain pool with quantised rows, and a plain workspace for prefill.

Decode steps read the codes (`ragserve_kernels.sparse_decode`, `progressive_decode`), dense ones too. SGLang's
own backends run the prefill and read plain KV. For each layer of an extend, the rows of its cached prefixes
and those that it writes are dequantised into a workspace of one layer that all layers share, at their own
slots. So every token attends to KV as it is stored: but for rounding, which may move a number to its next
code, an answer depends neither on what was cached nor on where a prompt was cut into chunks. What all keys of
a head share is left out of them (`key_offsets`)."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, unwrap_write_loc

from ragserve_kernels.page_stats import PageStats
from ragserve_kernels.quantize_kv import QuantizedKV, dequantize_kv, quantize_kv

_AT_ONCE = 32_768  # rows per dequantisation of one layer: bounds its memory
_PAGES_AT_ONCE = 16  # in all layers


class QuantizedKVPool(MHATokenToKVPool):
    """A pool whose ``k_buffer`` and ``v_buffer`` hold codes; make its class with :func:`quantized_pool`."""

    bits: int
    key_offsets: torch.Tensor
    """Taken off every key before it is stored: [layers, kv_heads, head_dim], written before any is."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **(kwargs | {"post_capture_active": False}))

    def _create_buffers(self) -> None:
        rows, heads = self.size + self.page_size, self.head_num
        if self.use_hnd or self.v_head_dim != self.head_dim or self.is_quantized_kv_cache:
            raise ValueError(
                f"KV of {self.bits} bits is for plain multi-head attention laid out token by token: use "
                "kv_bits=16"
            )
        self.k_scale_buffer = self.v_scale_buffer = self.dq_k_buffer = self.dq_v_buffer = None
        with self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE):
            self._codes = QuantizedKV.empty(
                2 * self.layer_num * rows, heads, self.head_dim, bits=self.bits, device=self.device
            )
            self._workspace = torch.zeros(2, rows, heads, self.head_dim, dtype=self.dtype, device=self.device)
            shape = (self.layer_num, heads, self.head_dim)
            self.key_offsets = torch.zeros(shape, dtype=torch.float32, device=self.device)
        self._codes.codes.zero_()
        self._codes.params.zero_()
        both = (2, self.layer_num, rows, heads, -1)
        codes, params = self._codes.codes.view(both), self._codes.params.view(both)
        self._k, self._v = (
            [QuantizedKV(c, p, self.bits) for c, p in zip(codes[i], params[i], strict=True)] for i in (0, 1)
        )
        self._key_codes, self._key_params = codes[0], params[0]
        self.k_buffer, self.v_buffer = [k.codes for k in self._k], [v.codes for v in self._v]
        self._init_data_ptrs_and_strides()

    def _slot_move_pointer_buffers(self) -> list[torch.Tensor]:
        return [*self.k_buffer, *self.v_buffer, *(x.params for x in (*self._k, *self._v))]

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Return the bytes of K and of V, with their shares of the workspace."""
        half = (self._codes.codes.nbytes + self._codes.params.nbytes + self._workspace.nbytes) // 2
        return half, half

    def quantized(self, layer: int) -> tuple[QuantizedKV, QuantizedKV]:
        """Return K and V of a layer."""
        return self._k[layer - self.start_layer], self._v[layer - self.start_layer]

    def store(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Quantise rows k, v [tokens, kv_heads, head_dim] into ``slots`` [tokens], not into the workspace."""
        keys, values = self.quantized(layer)
        shape = (len(slots), self.head_num, self.head_dim)
        k = k.reshape(shape)
        quantize_kv((k - self.key_offsets[layer - self.start_layer]).to(k.dtype), slots, keys)
        quantize_kv(v.reshape(shape), slots, values)

    def written(
        self, layer: Any, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write an extend's rows as `set_kv_buffer` does; return them as they are stored, in their shapes."""
        self.set_kv_buffer(layer, slots, k, v)
        keys, values = (plain[slots] for plain in self._workspace)
        return keys.view_as(k).to(k.dtype), values.view_as(v).to(v.dtype)

    def prepare(self, layer: int, slots: torch.Tensor) -> None:
        """Dequantise ``slots`` [n] of a layer into the workspace, for an extend that reads them."""
        for some in slots.split(_AT_ONCE):
            for plain, cache in zip(self._workspace, self.quantized(layer), strict=True):
                plain[some] = dequantize_kv(cache, some).to(self.dtype)

    # SGLang's interface

    def set_kv_buffer(
        self,
        layer: Any,
        loc_info: Any,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: Any = None,
        v_scale: Any = None,
        layer_id_override: int | None = None,
    ) -> None:
        """Write an extend's rows: quantised into the pool, and from there into the workspace that the pass
        reads."""
        slots = unwrap_write_loc(loc_info)[0]
        number = layer.layer_id if layer_id_override is None else layer_id_override
        self.store(number, slots, cache_k, cache_v)
        self.prepare(number, slots)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the workspace, which in an extend holds what was prepared or written for this layer."""
        return self._workspace[0]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """See `get_key_buffer`."""
        return self._workspace[1]

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `get_key_buffer`."""
        return self._workspace[0], self._workspace[1]

    def get_cpu_copy(self, *args: Any, **kwargs: Any) -> Any:
        """Raise RuntimeError: SGLang would copy the codes without their scales. So for the names below."""
        raise RuntimeError("KV of 8 or 4 bits cannot be moved out of the pool: use kv_bits=16")

    load_cpu_copy = get_contiguous_buf_infos = set_kv_buffer_prefix_valid = get_cpu_copy

    # statistics

    def new_statistics(self, logical_page: int) -> PageStats:
        """Return room for the statistics of all pages, in the plain KV's dtype."""
        pages = (self.size + self.page_size) // self.page_size
        shape = (self.layer_num, pages * self.page_size // logical_page, self.head_num, self.head_dim)
        k_min = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return PageStats(k_min, torch.zeros_like(k_min), torch.zeros_like(k_min[:, :pages]))

    def page_statistics(self, pages: torch.Tensor, into: PageStats) -> None:
        """Make the statistics of ``pages``, int32 [n], from their dequantised keys.

        A negative number stands for page 0, which no request owns."""
        for some in pages.clamp_min(0).long().split(_PAGES_AT_ONCE):
            slots = some[:, None] * self.page_size + torch.arange(self.page_size, device=pages.device)
            # [layers, pages, page_size, kv_heads, ...]
            codes, params = self._key_codes[:, slots], self._key_params[:, slots]
            flat = QuantizedKV(codes.flatten(0, 2), params.flatten(0, 2), self.bits)
            keys = dequantize_kv(flat).to(self.dtype)
            into.store(slice(None), some, keys.unflatten(0, codes.shape[:3]))


def quantized_pool(bits: int) -> type[QuantizedKVPool]:
    """Return the class of a pool of ``bits`` bits, for where SGLang takes a class."""
    return type(f"QuantizedKVPool{bits}", (QuantizedKVPool,), {"bits": bits})


def cell_bytes(
    plain: int, *, layers: int, kv_heads: int, head_dim: int, page_size: int, logical_page: int, bits: int
) -> int:
    """Return the bytes of a token's slot with sparse decoding.

    ``plain``: SGLang's count for K and V in all layers. Page statistics are included, with 8 or 4 bits the
    scales and the workspace."""
    statistics = plain * (1 / logical_page + 1 / page_size / 2)
    if bits == 16:
        return round(plain + statistics)
    codes = layers * kv_heads * 2 * (head_dim * bits // 8 + 4)
    return round(codes + plain / layers + statistics)
