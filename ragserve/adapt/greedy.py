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
    return _answered(model, prompts, tokens, on_batch)


def taught(
    model: AdaptedModel,
    prompts: Sequence[TrainingSequence],
    tokens: int,
    on_batch: Callable[[], None] = lambda: None,
) -> list[tuple[list[int], torch.Tensor]]:
    """Each answer of `answers`, and the hidden states that predict it [ids, hidden]."""
    states: dict[int, torch.Tensor] = {}
    found = _answered(model, prompts, tokens, on_batch, states)
    return [(ids, states[number]) for number, ids in enumerate(found)]


def text_of(model: AdaptedModel, ids: Sequence[int]) -> str:
    """What an answer says."""
    return str(model.tokenizer.decode(list(ids), skip_special_tokens=True)).strip()


def _answered(
    model: AdaptedModel,
    prompts: Sequence[TrainingSequence],
    tokens: int,
    on_batch: Callable[[], None],
    states: dict[int, torch.Tensor] | None = None,
) -> list[list[int]]:
    """The answers. Fills ``states``, by number of the prompt, where they are asked for."""
    import torch

    found: dict[int, list[int]] = {}
    with torch.no_grad():  # no inference tensors, which a step could not be computed with
        for numbers in _batches(model, [len(each) + tokens for each in prompts]):
            on_batch()
            by_step: list[torch.Tensor] | None = None if states is None else []
            batch = [prompts[number] for number in numbers]
            found |= zip(numbers, _decoded(model, *_prefilled(model, batch), tokens, by_step), strict=True)
            if states is not None and by_step is not None:
                by_row = torch.stack(by_step, 1)
                states |= {n: row[: len(found[n])].clone() for n, row in zip(numbers, by_row, strict=True)}
    return [found[number] for number in range(len(prompts))]


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
    """Hidden states [prompts, hidden] that predict the next tokens, by layer K and V [prompts, kv_heads,
    longest, head_dim], padded on the left, and the prompts' lengths. A composed prompt's prefix is not among
    them."""
    import torch

    longest = max(map(len, prompts))
    states: list[torch.Tensor] = []
    layers: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
    for part in in_packs(prompts, model.room):
        pack = model.pack(part)
        hidden, attention, cache = model.run(pack, keep=True)
        states.append(hidden[[end - 1 for _, end in pack.bounds]])
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
    return torch.cat(states), joined, [len(each) for each in prompts]  # type: ignore[return-value]


def _decoded(
    model: AdaptedModel,
    hidden: torch.Tensor,
    layers: list[tuple[torch.Tensor, torch.Tensor]],
    lengths: Sequence[int],
    tokens: int,
    states: list[torch.Tensor] | None,
) -> list[list[int]]:
    """Takes the layers out of their list. Adds to ``states`` the hidden states of each step."""
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
        if states is not None:
            states.append(hidden)
        chosen = model.logits(hidden).argmax(-1)
        for row, token in enumerate(chosen.tolist()):
            if row in live:
                found[row].append(token)
                if token in model.ends or len(found[row]) == tokens:
                    live.discard(row)
        if not live:
            break
        seen = torch.cat((seen, seen.new_ones(len(found), 1)), 1)
        output = model.causal.model(
            input_ids=chosen[:, None],
            position_ids=places,
            past_key_values=cache,
            use_cache=True,
            packed=DecodeAttention(seen),
        )
        hidden, places = output.last_hidden_state[:, -1], places + 1
    return found
