"""Greedy answers in batches: over whole prompts, and over composed ones with nothing recomputed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ragserve.adapt.composed_attention import DecodeAttention
from ragserve.adapt.packing import TrainingSequence, in_packs

if TYPE_CHECKING:
    import torch

    from ragserve.adapt.low_rank import AdaptedModel

_MOST = 256  # prompts at once
_CACHED = 1 / 16  # of a GPU's memory: KV of a batch
_CACHED_CPU = 2**30  # bytes


def answers(
    model: AdaptedModel,
    prompts: Sequence[TrainingSequence],
    tokens: int,
    on_batch: Callable[[], None] = lambda: None,
) -> list[list[int]]:
    """At most ``tokens`` ids for each prompt, the one that ends the answer included. ``on_batch``: called
    before each batch; what it raises ends the call."""
    import torch

    found: list[list[int]] = [[] for _ in prompts]
    with torch.inference_mode():
        for numbers in _batches(model, [len(each) + tokens for each in prompts]):
            on_batch()
            batch = [prompts[number] for number in numbers]
            logits, cache, lengths = _prefilled(model, batch)
            for number, ids in zip(numbers, _decoded(model, logits, cache, lengths, tokens), strict=True):
                found[number] = ids
    return found


def text_of(model: AdaptedModel, ids: Sequence[int]) -> str:
    """What an answer says."""
    return str(model.tokenizer.decode(list(ids), skip_special_tokens=True)).strip()


def _batches(model: AdaptedModel, lengths: Sequence[int]) -> Iterator[list[int]]:
    """Numbers of prompts of about the same length. ``lengths``: in tokens, with the answers'."""
    room = _cached_bytes(model.device) // model.kv_bytes
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda each: lengths[each]):
        if batch and (len(batch) == _MOST or (len(batch) + 1) * lengths[number] > room):
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def _cached_bytes(device: torch.device) -> int:
    import torch

    if device.type != "cuda":
        return _CACHED_CPU
    return int(_CACHED * torch.cuda.get_device_properties(device).total_memory)


def _prefilled(
    model: AdaptedModel, prompts: Sequence[TrainingSequence]
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]], list[int]]:
    """Logits [prompts, vocabulary] of the next tokens, by layer K and V [prompts, kv_heads, longest,
    head_dim], padded on the left, and the prompts' lengths. A composed prompt's prefix is not among them."""
    import torch

    longest = max(map(len, prompts))
    logits: list[torch.Tensor] = []
    layers: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
    for part in in_packs(prompts, model.room):
        pack = model.pack(part)
        hidden, attention, cache = model.run(pack, keep=True)
        last = [end - 1 for _, end in pack.bounds]
        logits.append(model.logits(hidden[last]))
        layers = layers or [[] for _ in cache.layers]
        for own, layer in zip(layers, cache.layers, strict=True):
            k = attention.turned(layer.keys)
            for start, end in pack.bounds:
                pad = (0, 0, longest - (end - start), 0)
                own.append(
                    tuple(torch.nn.functional.pad(each[:, :, start:end], pad) for each in (k, layer.values))  # type: ignore[arg-type]
                )
            layer.keys = layer.values = None  # frees a layer once its copies are made
    joined = [tuple(torch.cat(each) for each in zip(*own, strict=True)) for own in layers]
    return torch.cat(logits), joined, [len(each) for each in prompts]  # type: ignore[return-value]


def _decoded(
    model: AdaptedModel,
    logits: torch.Tensor,
    layers: list[tuple[torch.Tensor, torch.Tensor]],
    lengths: Sequence[int],
    tokens: int,
) -> list[list[int]]:
    import torch
    from transformers import DynamicCache

    cache: Any = DynamicCache()
    for number, (k, v) in enumerate(layers):
        cache.update(k, v, number)
    layers.clear()
    found: list[list[int]] = [[] for _ in lengths]
    live = set(range(len(found)))
    places = torch.tensor(lengths, device=model.device)[:, None]
    seen = torch.arange(max(lengths), device=model.device) >= max(lengths) - places
    for _ in range(tokens):
        chosen = logits.argmax(-1)
        for row, token in enumerate(chosen.tolist()):
            if row in live:
                found[row].append(token)
                if token in model.ends or len(found[row]) == tokens:
                    live.discard(row)
        if not live:
            break
        seen = torch.cat((seen, seen.new_ones(len(found), 1)), 1)
        output = model.causal(
            input_ids=chosen[:, None],
            position_ids=places,
            past_key_values=cache,
            use_cache=True,
            packed=DecodeAttention(seen),
        )
        logits, places = output.logits[:, -1], places + 1
    return found
