"""The parts of SGLang's models and model runner that ragserve uses beyond their public interface.

An SGLang upgrade touches this file and `sglang_ext.process.hooks` first.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch

from sglang_ext.versions import LAYER_ARGUMENTS


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
    """Raise NotComposable unless all decoder layers take the arguments that ragserve's passes give."""
    for layer in decoder_layers(model):
        parameters = inspect.signature(layer.forward).parameters.values()
        names = tuple(p.name for p in parameters)
        needed = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
        if not any(
            names[: len(wanted)] == wanted and len(needed) <= len(wanted) for wanted in LAYER_ARGUMENTS
        ):
            raise NotComposable(
                f"composed contexts need decoder layers that take ({', '.join(LAYER_ARGUMENTS[-1])}), and "
                f"{type(layer).__name__} takes ({', '.join(names)}): use strategy 'prefix' or 'full'"
            )


def unlike_plain_attention(model: Any) -> str | None:
    """Say which layer attends in a way that ragserve's passes do not: in a window, with capped scores, with
    scales by position. None if all attend to every earlier token by plain softmax.
    """
    for number, layer in enumerate(decoder_layers(model)):
        attn = getattr(getattr(layer, "self_attn", None), "attn", None)
        if attn is None:
            return f"layer {number} has no self_attn.attn"
        for differs, how in (
            (attn.logit_cap, f"caps its attention scores at {attn.logit_cap}"),
            (
                attn.sliding_window_size not in (None, -1),
                f"attends to a window of {attn.sliding_window_size} tokens",
            ),
            (attn.use_irope, "scales its queries by their positions"),
        ):
            if differs:
                return f"layer {number} {how}"
    return None


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


def prompt_batch(ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> Any:
    """A batch of one request for `ModelRunner.forward`: tokens ``ids`` [n] at ``positions`` [n] go to the
    last n of ``slots``, int64; the slots before them hold their prefix. The request's row is SGLang's
    padding row, 0, which has to hold the slots.
    """
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

    batch = forward_batch(ids, positions)
    prefix = len(slots) - len(ids)
    batch.seq_lens = torch.full_like(batch.seq_lens, len(slots))
    batch.seq_lens_sum = len(slots)
    batch.seq_lens_cpu = batch.seq_lens.cpu()
    batch.orig_seq_lens = batch.seq_lens.to(torch.int32)
    batch.out_cache_loc = slots[prefix:]
    batch.extend_prefix_lens = torch.full_like(batch.extend_prefix_lens, prefix)
    batch.extend_prefix_lens_cpu = [prefix]
    batch.extend_start_loc = torch.zeros_like(batch.extend_prefix_lens)
    batch.capture_hidden_mode = CaptureHiddenMode.NULL
    batch.lora_ids, batch.rids = [None], ["ragserve"]
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
