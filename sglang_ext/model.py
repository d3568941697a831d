"""The parts of SGLang's models and model runner that ragserve uses beyond their public interface.

An SGLang upgrade touches this file and `sglang_ext.hooks` first.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch


class NotComposable(ValueError):
    """Documents' KV of this model, or in this pool, cannot be composed."""


def decoder_layers(model: Any) -> Any:
    """The decoder layers of an SGLang causal language model. Raises NotComposable for another layout."""
    layers = getattr(getattr(model, "model", None), "layers", None)
    if layers is None or not len(layers):
        raise NotComposable(
            "composed contexts need a decoder laid out as model.model.layers: use strategy 'prefix' or 'full'"
        )
    return layers


def check_layers(model: Any) -> None:
    """Raise NotComposable unless all decoder layers take the four arguments that ragserve's passes give."""
    wanted = ("positions", "hidden_states", "forward_batch", "residual")
    for layer in decoder_layers(model):
        parameters = inspect.signature(layer.forward).parameters.values()
        names = tuple(p.name for p in parameters)
        needed = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
        if names[:4] != wanted or len(needed) > 4:
            raise NotComposable(
                f"composed contexts need decoder layers that take ({', '.join(wanted)}), and "
                f"{type(layer).__name__} takes ({', '.join(names)}): use strategy 'prefix' or 'full'"
            )


def forward_batch(ids: torch.Tensor, positions: torch.Tensor) -> Any:
    """A batch with what decoder layers and communicators read; slots and rows belong to the pass, not to
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


@contextlib.contextmanager
def forward_stream(model_runner: Any) -> Iterator[None]:
    """Launch on the stream of SGLang's forward passes: behind those launched so far, as everything that reads
    KV must be, and in the same order on every rank.
    """
    device = torch.device(model_runner.device)
    if device.type != "cuda":
        yield
        return
    stream, current = model_runner.forward_stream, torch.cuda.current_stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)
