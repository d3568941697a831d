"""Gathers documents' kept KV into the slots of requests and moves keys to their positions.

`rotate_gather` handles all layers, documents and requests of a scheduler step: one launch for what is on the
device, and launches of a few layers each for pinned host memory. Where the kernel does not run (CPU,
unsupported head sizes and rotations) torch copies layer by layer.

A *run* is up to a block of consecutive tokens of one document within one block: a program of the kernel moves
one run, and a run lies in one host page.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ragserve_kernels import dispatch as kernels
from ragserve_kernels import rotate_gather as op
from ragserve_kernels.kv import HEAD_DIMS, KVLayers
from sglang_ext.context.compose.layer_transfer import LayerLoads
from sglang_ext.documents.pages.stored_pages import StoredPages
from sglang_ext.tensors.buffers import PADDING_SLOT, Buffers, Ints, upload, upload_all
from sglang_ext.tensors.rope import Rotation

_SHIFT = 4  # column of runs
_LAYERS_AT_ONCE = 4  # per launch from host: with 32 layers, work on the first begins after an eighth of them
_Read = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Filling:
    """The filling of a request's slots.

    Attributes:
        kept: int64 [S] or [layers, S], ascending positions in the prompt.
        slots: int64 [S], on the device.
        starts: position of each document's first token; the first is 0.
        shifts: positions by which each document's keys are moved.
        sources: where each document lies: its slots, int64 [tokens] on the device, or its host pages, int64
            [blocks] in numpy, -1 for absent ones, of which ``kept`` takes nothing.
        closed: move every key to the number of its slot instead.
    """

    kept: Ints
    slots: torch.Tensor
    starts: Ints
    shifts: Ints
    sources: Sequence[torch.Tensor | Ints]
    closed: bool = False


class Gather:
    """Copies into the KV pool of one rank, or into buffers like it, on the current stream.

    Where the kernel runs, host memory comes into the pool layer by layer on a stream of its own. ``loads``
    knows what is still on its way, and a reader of the pool waits only for the layer that it asks for.
    """

    def __init__(
        self,
        pool: Any,
        rotation: Rotation,
        host: StoredPages,
        layers_at_once: int = _LAYERS_AT_ONCE,
    ) -> None:
        """``pool``: SGLang's MHATokenToKVPool. ``host``: pinned if the pool is on CUDA. ``layers_at_once``:
        layers per launch from host.
        """
        self._pool = pool
        self._rotation = rotation
        self._host = host
        self._block = host.shape.block
        self._layers = pool.layer_num
        first = pool.get_key_buffer(0)
        self._device = first.device
        self._frequencies = rotation.frequencies.to(self._device)
        self._kv: KVLayers | None = None
        if (
            kernels.use_triton(first)
            and rotation.neox
            and first.shape[-1] in HEAD_DIMS
            and first.dtype in kernels.FLOAT_DTYPES
        ):
            self._kv = KVLayers(pool.k_buffer, pool.v_buffer)
        self._parts: list[tuple[int, KVLayers]] = []  # of the pool, with their first layers
        if self._kv is not None:
            for at in range(0, self._layers, layers_at_once):
                own = slice(at, at + layers_at_once)
                self._parts.append((at, KVLayers(pool.k_buffer[own], pool.v_buffer[own])))
        self.loads = LayerLoads(pool, self._device) if self._parts and self._device.type == "cuda" else None

    def warm(self) -> None:
        """Compile the kernels, so that the first request does not wait for them. Call it before there is any
        document: it writes to the padding slot.
        """
        if self._kv is None:
            return
        first = np.zeros(1, dtype=np.int64)
        slot = torch.full((1,), PADDING_SLOT, dtype=torch.int64, device=self._device)
        # the slot must stay finite: some attention kernels read it and multiply by zero
        self._host.pool[:1].zero_()
        for source in (slot, first) if len(self._host) else (slot,):
            self([Filling(first, slot, first, first, [source])])
        self.finish()

    @property
    def loading(self) -> torch.cuda.Stream | None:
        """The stream on which layers still come from host; None if all have been waited for."""
        return self.loads.stream if self.loads else None

    def finish(self) -> None:
        """Make the current stream wait until all layers are filled."""
        if self.loads:
            self.loads.finish()

    def __call__(self, fillings: Sequence[Filling], into: Buffers | None = None) -> None:
        """Fill the slots of these requests, which are rows of ``into`` if given, else of the pool."""
        target = Buffers(self._pool.k_buffer, self._pool.v_buffer) if into is None else into
        shifts = np.concatenate([filling.shifts for filling in fillings])
        sources = [source for filling in fillings for source in filling.sources]
        here = np.array([isinstance(source, torch.Tensor) for source in sources])
        rows = _runs_of_layers(fillings, self._block)
        slots = _joined([filling.slots for filling in fillings])
        on_device, on_host = ([row[which[row[:, 0]]] for row in rows] for which in (here, ~here))
        if any(map(len, on_device)):  # documents of which nothing is kept have no runs
            closed = any(filling.closed for filling in fillings)
            self._from_device(sources, None if closed else shifts, on_device, slots, target)
        if any(map(len, on_host)):
            self._from_host(sources, on_host, slots, target)

    def _from_device(
        self,
        sources: Sequence[torch.Tensor | Ints],
        shifts: Ints | None,
        rows: Sequence[Ints],
        slots: torch.Tensor,
        target: Buffers,
    ) -> None:
        """``shifts`` None: keys move by run, so every run becomes a document of its own."""
        wanted = np.zeros(len(sources), dtype=bool)
        for row in rows:
            wanted[row[:, 0]] = True
        there = [
            source
            for source, own in zip(sources, wanted.tolist(), strict=True)
            if own and isinstance(source, torch.Tensor)
        ]
        lengths = np.zeros(len(sources), dtype=np.int64)
        lengths[wanted] = [len(source) for source in there]
        begins = np.cumsum([0, *lengths[:-1]], dtype=np.int64)
        if shifts is None:
            runs = np.concatenate(rows)
            begins, shifts, rows = begins[runs[:, 0]], runs[:, _SHIFT].copy(), _numbered(rows)
        starts, shift = upload_all((begins, shifts), self._device)
        taken = _joined(there)
        if self._kv is not None:
            source = op.DeviceSource(self._kv, taken, starts)
            self._gather(source, self._target(target), self._moves(rows), slots, shift)
            return

        def read(
            layer: int, document: torch.Tensor, token: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            slot = taken[starts[document] + token]
            return self._pool.get_key_buffer(layer)[slot], self._pool.get_value_buffer(layer)[slot]

        self._by_torch(read, rows, shifts, slots, target)

    def _from_host(
        self,
        sources: Sequence[torch.Tensor | Ints],
        rows: Sequence[Ints],
        slots: torch.Tensor,
        target: Buffers,
    ) -> None:
        """Present every run to the kernel as a document of one page, numbered over all layers."""
        pages = [
            source if isinstance(source, np.ndarray) else np.empty(0, dtype=np.int64) for source in sources
        ]
        first_page = np.cumsum([0, *(len(own) for own in pages[:-1])], dtype=np.int64)
        runs = np.concatenate(rows)
        of_run = np.concatenate(pages)[first_page[runs[:, 0]] + runs[:, 1] // self._block]
        own_shifts = runs[:, _SHIFT].copy()
        numbered = [
            np.column_stack((row[:, 0], row[:, 1] % self._block, row[:, 2:])) for row in _numbered(rows)
        ]
        if self._kv is not None:
            first_element = of_run * self._host.stride
            if target.k is not self._pool.k_buffer:
                self._load(first_element, numbered, own_shifts, slots, [(0, self._target(target))])
                return
            with contextlib.nullcontext() if self.loads is None else self.loads.stream_behind(slots):
                self._load(first_element, numbered, own_shifts, slots, self._parts, self.loads)
            return
        page_of = torch.from_numpy(of_run)

        def read(
            layer: int, document: torch.Tensor, token: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            k, v = self._host.read(layer, page_of[document.cpu()], token.cpu())
            return k.to(self._device), v.to(self._device)

        self._by_torch(read, numbered, own_shifts, slots, target)

    def _load(
        self,
        base: Ints,
        rows: Sequence[Ints],
        shifts: Ints,
        slots: torch.Tensor,
        parts: Sequence[tuple[int, KVLayers]],
        loads: LayerLoads | None = None,
    ) -> None:
        """Launch each part of the layers from host. ``base``: element of the arenas at which a run's page
        begins.
        """
        moves = self._moves(rows)
        shift, begin = upload_all((shifts, base), self._device)
        capacity = torch.full_like(begin, self._block)
        for at, into in parts:
            k, v, pairs = self._host.arenas(at)
            sizes = into.layers, into.kv_heads, into.head_dim
            source = op.HostSource(k, v, begin, capacity, *sizes, pairs)
            self._gather(source, into, moves[at : at + into.layers], slots, shift)
            if loads is not None:
                loads.launched(at + into.layers)

    def _target(self, target: Buffers) -> KVLayers:
        """The buffers with addresses for a kernel; the pool's are on the device already."""
        if self._kv is not None and target.k is self._pool.k_buffer:
            return self._kv
        return KVLayers(target.k, target.v)

    def _moves(self, rows: Sequence[Ints]) -> torch.Tensor:
        """Each layer's runs in the kernel's form, int32 [layers, n, 4]."""
        n = max(len(row) for row in rows)
        moves = np.full((len(rows), n, 4), -1, dtype=np.int32)
        for layer, row in enumerate(rows):
            moves[layer, : len(row)] = row[:, :_SHIFT]
        return upload(moves, self._device).expand(self._layers, -1, -1).contiguous()

    def _gather(
        self,
        source: op.DeviceSource | op.HostSource,
        into: KVLayers,
        moves: torch.Tensor,
        slots: torch.Tensor,
        shift: torch.Tensor,
    ) -> None:
        op.rotate_gather(source, into, moves, slots, shift, self._frequencies, block_tokens=self._block)

    def _by_torch(
        self, read: _Read, rows: Sequence[Ints], shifts: Ints, slots: torch.Tensor, target: Buffers
    ) -> None:
        cos, sin = self._rotation.angles(torch.from_numpy(shifts).to(self._device))
        for layer in range(self._layers):
            if layer < len(rows):
                document, token, place = (
                    torch.from_numpy(column).to(self._device) for column in _tokens(rows[layer])
                )
                places, turn = slots[place], (cos[document], sin[document])
            k, v = read(layer, document, token)
            target.k[layer][places] = self._rotation.turn(k, *turn).to(target.k[layer].dtype)
            target.v[layer][places] = v.to(target.v[layer].dtype)


def needed_blocks(kept: Ints, starts: Ints, ends: Ints, block: int) -> list[Ints]:
    """Return, for each document at starts:ends, the blocks with a token that some layer keeps, ascending;
    ``kept`` as in `Filling`.
    """
    counts = -(-(ends - starts) // block)
    first = np.cumsum(counts) - counts
    document = np.searchsorted(starts, kept, side="right") - 1
    wanted = np.zeros(int(counts.sum()), dtype=bool)
    wanted[first[document] + (kept - starts[document]) // block] = True
    return [np.flatnonzero(part) for part in np.split(wanted, first[1:])]


def _runs_of_layers(fillings: Sequence[Filling], block: int) -> list[Ints]:
    """Runs of all requests, int64 [n, 5], per layer, or once if every layer has the same.

    Columns: document (numbered over all requests), first token in it, tokens, place in the joined slots, and
    shift of its keys.
    """
    layers = max(len(filling.kept) if filling.kept.ndim == 2 else 1 for filling in fillings)
    parts: list[list[Ints]] = [[] for _ in range(layers)]
    document = place = 0
    for filling in fillings:
        for layer, kept in enumerate(np.atleast_2d(filling.kept)):
            runs = _runs(kept, filling.starts, block)
            moved = runs[:, 3] - runs[:, 1] if filling.closed else filling.shifts[runs[:, 0]]
            runs = np.column_stack((runs + np.array([document, 0, 0, place]), moved))
            for part in parts if filling.kept.ndim == 1 else parts[layer : layer + 1]:
                part.append(runs)
        document += len(filling.starts)
        place += len(filling.slots)
    return [np.concatenate(part) for part in parts]


def _runs(kept: Ints, starts: Ints, block: int) -> Ints:
    document = np.searchsorted(starts, kept, side="right") - 1
    token = kept - starts[document]
    begins = np.ones(len(kept), dtype=bool)
    # token % block is 0 at a document's first token, too
    begins[1:] = (kept[1:] - kept[:-1] != 1) | (token[1:] % block == 0)
    at = np.flatnonzero(begins)
    return np.column_stack((document[at], token[at], np.diff(at, append=len(kept)), at))


def _numbered(rows: Sequence[Ints]) -> list[Ints]:
    """Each layer's runs with every run a document of its own, numbered over all layers."""
    first = np.cumsum([0, *(len(row) for row in rows)])
    return [
        np.column_stack((at + np.arange(len(row)), row[:, 1:])) for at, row in zip(first, rows, strict=False)
    ]


def _tokens(runs: Ints) -> tuple[Ints, Ints, Ints]:
    """Document, token in it and place in the slots of every token of the runs, int64 [tokens] each."""
    document, first, count, place, _ = runs.T
    within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    return np.repeat(document, count), np.repeat(first, count) + within, np.repeat(place, count) + within


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
