"""Greedy answers in batches: over whole prompts, and over composed ones with nothing recomputed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
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
    """At most ``tokens`` ids for each prompt of one question, the one that ends the answer included.
    ``on_batch``: called before each batch; what it raises ends the call."""
    return [ids for [ids], _ in _found(model, prompts, tokens, on_batch, keep=False)]


def taught(
    model: AdaptedModel,
    prompts: Sequence[TrainingSequence],
    tokens: int,
    on_batch: Callable[[], None] = lambda: None,
) -> list[tuple[list[list[int]], torch.Tensor]]:
    """For each prompt the answer to each of its questions, as `answers`, and the hidden states that predict
    them, one answer after another [ids, hidden]."""
    import torch

    found = _found(model, prompts, tokens, on_batch, keep=True)
    return [(ids, torch.cat(states)) for ids, states in found]


def _found(
    model: AdaptedModel,
    prompts: Sequence[TrainingSequence],
    tokens: int,
    on_batch: Callable[[], None],
    *,
    keep: bool,
) -> list[tuple[list[list[int]], list[torch.Tensor]]]:
    """Answers and, with ``keep``, hidden states, by prompt and question."""
    import torch

    room = _cached_bytes(model.device) // model.kv_bytes
    owners: list[int] = []
    pieces: list[TrainingSequence] = []
    for number, each in enumerate(prompts):
        divided = _divided(each, max(1, room // _longest(each, tokens)))
        pieces += divided
        owners += [number] * len(divided)
    said: dict[int, list[tuple[list[int], torch.Tensor]]] = {}
    sizes = [(len(each.tails), _longest(each, tokens)) for each in pieces]
    with torch.no_grad():  # no inference tensors, which a step could not be computed with
        for numbers in _batches(room, sizes):
            on_batch()
            hidden, cache, lengths = _prefilled(model, [pieces[number] for number in numbers])
            decoded = iter(_decoded(model, hidden, cache, lengths, tokens, keep=keep))
            for number in numbers:
                said[number] = [next(decoded) for _ in pieces[number].tails]
    found: list[tuple[list[list[int]], list[torch.Tensor]]] = [([], []) for _ in prompts]
    for number, owner in enumerate(owners):
        for ids, states in said[number]:
            found[owner][0].append(ids)
            found[owner][1].append(states)
    return found


def _longest(one: TrainingSequence, tokens: int) -> int:
    return one.context + max(map(len, one.tails)) + tokens


def _divided(one: TrainingSequence, most: int) -> list[TrainingSequence]:
    """A prompt's questions in prompts of at most ``most``, each of which has a copy of the passages' KV when
    it is answered."""
    asked = [(one.question, one.answer), *one.more]
    found = []
    for at in range(0, len(asked), most):
        (question, answer), *more = asked[at : at + most]
        found.append(replace(one, question=question, answer=answer, more=more))
    return found


def text_of(model: AdaptedModel, ids: Sequence[int]) -> str:
    """What an answer says."""
    return str(model.tokenizer.decode(list(ids), skip_special_tokens=True)).strip()


def _batches(room: int, sizes: Sequence[tuple[int, int]]) -> Iterator[list[int]]:
    """Numbers of prompts of about the same length, of ``room`` tokens together if that can be. ``sizes``:
    questions, and tokens of the longest with its answer."""
    batch: list[int] = []
    asked = 0
    for number in sorted(range(len(sizes)), key=lambda each: sizes[each][1]):
        questions, tokens = sizes[number]
        if batch and (asked + questions > _MOST or (asked + questions) * tokens > room):
            yield batch
            batch, asked = [], 0
        batch.append(number)
        asked += questions
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
    """Hidden states [questions, hidden] that predict the next tokens, by layer K and V [questions, kv_heads,
    longest, head_dim], padded on the left, and the tokens of each question with its passages. A prompt's
    passages are read once for all its questions. A composed prompt's prefix is not among them."""
    import torch

    lengths = [each.context + len(tail) for each in prompts for tail in each.tails]
    longest = max(lengths)
    states: list[torch.Tensor] = []
    layers: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
    for part in in_packs(prompts, model.room):
        pack = model.pack(part)
        hidden, attention, cache = model.run(pack, keep=True)
        places = [_seen(one, start, longest) for one, (start, _) in zip(part, pack.bounds, strict=True)]
        rows = torch.cat(places).to(model.device)  # [questions, longest]
        states.append(hidden[rows[:, -1]])
        layers = layers or [[] for _ in cache.layers]
        for own, layer in zip(layers, cache.layers, strict=True):
            kept = (attention.turned(layer.keys), layer.values)
            own.append(tuple(each[0].transpose(0, 1)[rows].transpose(1, 2) for each in kept))  # type: ignore[arg-type]
            layer.keys = layer.values = None  # frees a layer once its copies are made
    joined = []
    while layers:  # frees a layer's parts once they are joined
        joined.append(tuple(torch.cat(each) for each in zip(*layers.pop(0), strict=True)))
    return torch.cat(states), joined, lengths  # type: ignore[return-value]


def _seen(one: TrainingSequence, start: int, longest: int) -> torch.Tensor:
    """The tokens of a pack that each question of a sequence sees, [questions, longest]; any token on the
    left of shorter ones. ``start``: the sequence's first."""
    import torch

    found = torch.full((len(one.tails), longest), start)
    end = start + one.context
    for row, tail in zip(found, one.tails, strict=True):
        row[longest - one.context - len(tail) : longest - len(tail)] = torch.arange(
            start, start + one.context
        )
        row[longest - len(tail) :] = torch.arange(end, end + len(tail))
        end += len(tail)
    return found


def _decoded(
    model: AdaptedModel,
    hidden: torch.Tensor,
    layers: list[tuple[torch.Tensor, torch.Tensor]],
    lengths: Sequence[int],
    tokens: int,
    *,
    keep: bool,
) -> list[tuple[list[int], torch.Tensor]]:
    """Each answer's ids, and the hidden states that predict them, or none without ``keep``."""
    import torch
    from transformers import DynamicCache

    cache: Any = DynamicCache()
    for number, (k, v) in enumerate(layers):
        cache.update(k, v, number)
    layers.clear()
    found: list[list[int]] = [[] for _ in lengths]
    states: list[torch.Tensor] = []  # by step
    live = set(range(len(found)))
    places = torch.tensor(lengths, device=model.device)[:, None]
    seen = torch.arange(max(lengths), device=model.device) >= max(lengths) - places
    for _ in range(tokens):
        if keep:
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
        with model.autocast():
            output = model.causal.model(
                input_ids=chosen[:, None],
                position_ids=places,
                past_key_values=cache,
                use_cache=True,
                packed=DecodeAttention(seen),
            )
        hidden, places = output.last_hidden_state[:, -1], places + 1
    by_row = torch.stack(states, 1) if keep else hidden.new_empty(len(found), 0, hidden.shape[-1])
    return [(ids, each[: len(ids)].clone()) for ids, each in zip(found, by_row, strict=True)]
