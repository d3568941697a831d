"""What we use of SGLang's models beyond their public interface: decoder layers and hand-made batches.

An upgrade of SGLang touches this file and `sglang_ext.hooks` first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    pass


def forward_batch(ids: torch.Tensor, positions: torch.Tensor) -> Any:
    """What decoder layers and communicators read of a batch; slots and rows belong to the pass, not to
    SGLang's pools.
    """
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    n, device = len(ids), ids.device
    lengths = torch.full((1,), n, dtype=torch.int32, device=device)
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        input_ids=ids,
        req_pool_indices=torch.zeros(1, dtype=torch.int64, device=device),
        seq_lens=lengths.to(torch.int64),
        out_cache_loc=torch.zeros(n, dtype=torch.int64, device=device),
        seq_lens_sum=n,
    )
    batch.positions = positions
    batch.extend_num_tokens = n
    batch.extend_seq_lens = lengths
    batch.extend_prefix_lens = torch.zeros_like(lengths)
    batch.extend_seq_lens_cpu = [n]
    batch.extend_prefix_lens_cpu = [0]
    batch.num_token_non_padded_cpu = n
    return batch


class UnsupportedRope(ValueError):
    """The model's positions cannot be shifted after the fact."""


def decoder_layers(model: Any) -> Any:
    """The decoder layers of an SGLang causal language model. Raises UnsupportedRope where it is laid out
    another way.
    """
    layers = getattr(getattr(model, "model", None), "layers", None)
    if layers is None or not len(layers):
        raise UnsupportedRope(
            "composed contexts need a decoder laid out as model.model.layers: use strategy 'prefix' or 'full'"
        )
    return layers
