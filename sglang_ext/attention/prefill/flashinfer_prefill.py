"""FA3 kernels for SGLang's FlashInfer backend on Hopper GPUs.

A prefill attends in two parts: new tokens to each other (ragged KV), for which FlashInfer chooses kernels by
itself, and new tokens to cached ones (paged KV), for which SGLang always takes FA2. Here the second part
takes FA3, too, where the new tokens fill two thirds of the GPU. FA3 does not share the cached tokens of one
block of new ones between multiprocessors as FA2 does, so a question after a long prefix stays with FA2. So
does a batch with a request that has nothing cached: FA3 reads KV that is not there. Prompts that are
prefilled layer by layer attend by FA3 as well."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

from sglang_ext.attention.prefill.chunk_attention import ChunkAttention
from sglang_ext.state import current
from sglang_ext.wire.protocol import PREFILL_KERNELS_VARIABLE

log = logging.getLogger(__name__)
BLOCK = 128  # new tokens of one head that a block of FA3 works on
# Of the multiprocessors. With half of them busy both kernels take as long; with 0.73 FA3 takes 0.61.
FILLED = 2 / 3


class PrefillKernels:
    """Chooses the kernels of each prefill: ``fa2`` and ``fa3`` are FlashInfer's wrappers for paged KV.

    ``heads``: query heads of this rank; ``processors``: multiprocessors of the GPU."""

    def __init__(self, fa2: Sequence[Any], fa3: Sequence[Any], heads: int, processors: int) -> None:
        self._fa2 = fa2
        self._fa3 = fa3
        self._heads = heads
        self._processors = processors

    def wrappers(self, new_tokens: Sequence[int], cached_tokens: Sequence[int]) -> Sequence[Any]:
        """Return the wrappers for a batch by the new and the cached tokens of each request."""
        blocks = self._heads * sum(tokens // BLOCK for tokens in new_tokens)
        fills = blocks >= FILLED * self._processors
        return self._fa3 if fills and all(cached_tokens) else self._fa2

    def install(self, backend: Any) -> None:
        """Let ``backend`` take the wrappers that fit each prefill, which it reads when it plans one."""
        original = backend.init_forward_metadata

        def init_forward_metadata(forward_batch: Any) -> None:
            if forward_batch.forward_mode.is_extend_without_speculative():
                backend.prefill_wrappers_paged = self.wrappers(
                    forward_batch.extend_seq_lens_cpu or (), forward_batch.extend_prefix_lens_cpu or (0,)
                )
            original(forward_batch)

        backend.init_forward_metadata = init_forward_metadata


def with_fa3(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a factory for SGLang's registry: FlashInfer as ``make`` makes it, with FA3 where it can run.

    ``PREFILL_KERNELS_VARIABLE=fa2`` leaves SGLang's choice."""

    def factory(runner: Any) -> Any:
        backend = make(runner)
        if os.environ.get(PREFILL_KERNELS_VARIABLE) == "fa2":
            return backend
        try:
            kernels = _kernels(backend, runner)
        except Exception:
            log.warning("FlashInfer's FA3 kernels cannot be used: prefill stays with FA2", exc_info=True)
            return backend
        if kernels is not None:
            kernels.install(backend)
            current.prefill_kernels = "fa3"
            log.info("prefill of this FlashInfer backend takes FA3 kernels")
        return backend

    return factory


def _kernels(backend: Any, runner: Any) -> PrefillKernels | None:
    """Make the FA3 wrappers; None where FlashInfer or SGLang needs FA2."""
    # other than plain attention passes masks, split sizes or items to the wrappers, which FA3 does not know
    if runner.use_mla_backend or backend.skip_prefill or backend.dispatch_reason is not None:
        return None
    if backend.enable_deterministic or backend.enable_mis or backend.is_dllm_model:
        return None
    import torch
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper
    from flashinfer.utils import determine_attention_backend

    updater = backend.indices_updater_prefill
    device = backend.workspace_buffer.device
    # the arguments are: no positions in the kernel, no half-precision reduction, no mask
    template = determine_attention_backend(
        device,
        0,
        False,
        False,
        updater.q_data_type,
        updater.data_type,
        head_dim_qk=updater.head_dim,
        head_dim_vo=updater.head_dim,
    )
    if template != "fa3":
        return None
    fa3 = [
        BatchPrefillWithPagedKVCacheWrapper(backend.workspace_buffer, "NHD", backend=template)
        for _ in backend.prefill_wrappers_paged
    ]
    current.chunk_attention = ChunkAttention(
        backend.workspace_buffer,
        updater.num_qo_heads,
        updater.num_kv_heads,
        updater.head_dim,
        updater.q_data_type,
    )
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return PrefillKernels(backend.prefill_wrappers_paged, fa3, updater.num_qo_heads, processors)
