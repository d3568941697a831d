"""context_gather: pages of a composed context from its documents' host pages, keys at their positions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ragserve_kernels.context_gather import (
    HostCodes,
    HostContexts,
    context_gather,
    context_gather_naive,
    context_shared_gather,
    context_shared_gather_naive,
)
from ragserve_kernels.kv import KVLayers
from tests.kernels.reference import assert_close, poisoned

GPU = torch.cuda.is_available()
LAYERS, HEADS = 3, 2


def documents(
    block: int, head_dim: int, dtype: torch.dtype, lengths: list[int], spare: int = 3
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Documents of these lengths in host pages in any order, and of each the rows of its tokens."""
    counts = [-(-length // block) for length in lengths]
    order = torch.randperm(sum(counts) + spare)
    host = torch.randn(len(order), 2, LAYERS, HEADS, block, head_dim).to(dtype)
    rows, at = [], 0
    for length, count in zip(lengths, counts, strict=True):
        token = torch.arange(length)
        rows.append(order[at : at + count][token // block] * block + token % block)
        at += count
    return host.pin_memory() if GPU else host, rows


def coded(shape: torch.Size) -> tuple[HostCodes, torch.Tensor]:
    """Host pages of codes, and their values in float64."""
    pages, _, layers, heads, block, dim = shape
    codes = torch.randint(-128, 128, shape, dtype=torch.int8)
    pairs = torch.randn(*shape[:-1], 2).half()
    parts = [codes.flatten(1).view(torch.uint8), pairs.flatten(1).view(torch.uint8)]
    pool = torch.cat(parts, 1)
    assert len(pool) == pages
    scale, zero = pairs.double().unbind(-1)
    values = codes.double() * scale[..., None] + zero[..., None]
    return HostCodes(pool.pin_memory() if GPU else pool, layers, heads, block, dim), values


def composed(
    rows: list[torch.Tensor], page: int, frequencies: torch.Tensor, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The whole pages of the documents one behind another, angles of each, and each token's shift."""
    starts = torch.tensor([0, *(len(own) for own in rows[:-1])]).cumsum(0)
    which = torch.cat([torch.full((len(own),), number) for number, own in enumerate(rows)])
    end = len(which) // page * page
    tokens = torch.stack((torch.cat(rows), which), -1)[:end].view(-1, page, 2).int()
    angle = starts.double()[:, None] * frequencies
    turns = torch.stack((angle.cos(), angle.sin()), 1).float()
    return tokens.to(device), turns.to(device), starts[which][:end]


def pool(device: torch.device, layers: int, pages: int, page: int, dim: int, dtype: torch.dtype) -> KVLayers:
    return KVLayers(
        *(
            [poisoned(pages * page, HEADS, dim, dtype=dtype, device=device) for _ in range(layers)]
            for _ in "kv"
        )
    )


def turned(k: torch.Tensor, shift: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Move ``k`` [n, head_dim] by ``shift`` [n] positions in float64."""
    half = len(frequencies)
    x, rest = torch.complex(k[:, :half].double(), k[:, half : 2 * half].double()), k[:, 2 * half :].double()
    x = x * torch.polar(torch.ones(len(k), half, dtype=torch.float64), shift.double()[:, None] * frequencies)
    return torch.cat((x.real, x.imag, rest), -1)


@pytest.mark.parametrize(
    ("page", "block", "dim", "rotary", "dtype", "codes"),
    [
        (16, 16, 64, 64, torch.float32, False),
        (64, 16, 128, 128, torch.bfloat16, False),
        (16, 32, 64, 40, torch.float16, False),
        (128, 16, 64, 64, torch.bfloat16, False),
        (64, 16, 64, 64, torch.bfloat16, True),
        (32, 16, 64, 40, torch.float32, True),
    ],
    ids=["16", "64-bfloat16", "partly-rotated", "128", "codes", "codes-partly-rotated"],
)
@pytest.mark.parametrize("only", [None, 1], ids=["all-layers", "one-layer"])
def test_pages_are_those_of_the_context(
    device: torch.device,
    page: int,
    block: int,
    dim: int,
    rotary: int,
    dtype: torch.dtype,
    codes: bool,
    only: int | None,
) -> None:
    """Documents of odd lengths: pages lie across their borders, at any place in their host pages."""
    values, rows = documents(block, dim, dtype, [*torch.randint(1, 150, (4,)).tolist(), 2 * page + 7])
    host: torch.Tensor | HostCodes = values
    if codes:
        host, values = coded(values.shape)
    frequencies = 10_000.0 ** -(torch.arange(rotary // 2, dtype=torch.float64) * 2 / rotary)
    tokens, turns, shift = composed(rows, page, frequencies, device)
    layers, first = (LAYERS, 0) if only is None else (1, only)
    n = len(tokens) + (70 if page == 16 else 3)  # more entries than are looked through at once, or not
    source = torch.randint(-1, len(tokens), (layers, HEADS, n), dtype=torch.int32)
    source[0, 0, 5:] = -1  # a short list
    target = torch.stack([torch.randperm(n + 2)[:n] for _ in range(layers * HEADS)])
    target = target.view(layers, HEADS, n).int().to(device)
    got, plain = (pool(device, layers, n + 2, page, dim, dtype) for _ in range(2))
    for gather, into in ((context_gather, got), (context_gather_naive, plain)):
        gather(host, into, tokens, turns, source.to(device), target, first_layer=first)
    shape, cpu = ((n + 2) * page, HEADS, dim), torch.device("cpu")
    want_k, want_v = (
        [poisoned(*shape, dtype=torch.float64, device=cpu) for _ in range(layers)] for _ in "kv"
    )
    at = tokens[..., 0].flatten().cpu().long()
    for layer in range(layers):
        for head in range(HEADS):
            k, v = (values[at // block, part, first + layer, head, at % block] for part in (0, 1))
            k = turned(k.cpu(), shift, frequencies)
            for taken, place in zip(source[layer, head].tolist(), target[layer, head].tolist(), strict=True):
                if taken >= 0:
                    out, own = (slice(x * page, (x + 1) * page) for x in (place, taken))
                    want_k[layer][out, head] = k[own]
                    want_v[layer][out, head] = v[own].double()
    for mine in (got, plain):
        for g, w in zip((*mine.k, *mine.v), (*want_k, *want_v), strict=True):
            assert torch.equal(torch.isnan(g).cpu(), torch.isnan(w)), "wrote another page, or left one out"
            assert_close(g.nan_to_num(), w.nan_to_num(), dtype)
        for g, w in zip(mine.v, want_v, strict=True):
            assert codes or torch.equal(g.double().cpu().nan_to_num(), w.nan_to_num()), "values are copied"


def test_large_shifts_lose_nothing_and_any_number_of_programs_is_right(device: torch.device) -> None:
    host, rows = documents(16, 64, torch.float32, [33])
    angle = torch.tensor([[131_071.0]], dtype=torch.float64) * 10_000.0 ** -(torch.arange(32).double() / 32)
    turns = torch.stack((angle.cos(), angle.sin()), 1).float().to(device)
    tokens = torch.stack((rows[0], torch.zeros_like(rows[0])), -1)[:32].view(2, 16, 2).int().to(device)
    source = torch.tensor([0, 1], dtype=torch.int32).expand(LAYERS, HEADS, 2).contiguous().to(device)
    want = pool(device, LAYERS, 2, 16, 64, torch.float32)
    context_gather_naive(host, want, tokens, turns, source, source)
    for programs in (1, 2, 7):
        got = pool(device, LAYERS, 2, 16, 64, torch.float32)
        context_gather(host, got, tokens, turns, source, source, programs=programs)
        for g, w in zip((*got.k, *got.v), (*want.k, *want.v), strict=True):
            torch.testing.assert_close(g, w, rtol=0, atol=2e-6)


def test_arguments_are_checked(device: torch.device) -> None:
    host, rows = documents(16, 64, torch.float32, [40])
    frequencies = torch.ones(32, dtype=torch.float64)
    tokens, turns, _ = composed(rows, 16, frequencies, device)
    dst = pool(device, LAYERS, 4, 16, 64, torch.float32)
    lists = torch.zeros(LAYERS, HEADS, 1, dtype=torch.int32, device=device)
    good = (host, dst, tokens, turns, lists, lists)
    for number, bad, message in (
        (0, host[:, :1], "host has shape"),
        (2, tokens[..., :1], "tokens has shape"),
        (3, turns[:, :1], "turns has shape"),
        (3, torch.zeros(1, 2, 33, device=device), "turns has 33 angles"),
        (4, lists[:1], "source has shape"),
        (5, lists[..., :0], "target has shape"),
    ):
        with pytest.raises(ValueError, match=message):
            context_gather(*good[:number], bad, *good[number + 1 :])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="from layer 1 on"):
        context_gather(*good, first_layer=1)
    short = HostCodes(torch.zeros(2, 8, dtype=torch.uint8), LAYERS, HEADS, 16, 64)
    with pytest.raises(ValueError, match="host has shape"):
        context_gather(short, *good[1:])
    other, _ = coded(torch.Size((2, 2, LAYERS, HEADS, 16, 32)))
    with pytest.raises(ValueError, match="2 heads of 32; expected 2 of 64"):
        context_gather(other, *good[1:])
    with pytest.raises(TypeError, match="tokens has dtype"):
        context_gather(host, dst, tokens.long(), turns, lists, lists)
    with pytest.raises(ValueError, match="programs is 0"):
        context_gather(*good, programs=0)


def in_shared_blocks(pool: KVLayers, page: int) -> torch.Tensor:
    """Copy K and V of a pool as shared blocks, float64 [shared_blocks, 2, page, head_dim]."""
    halves = [
        torch.stack([each.view(-1, page, HEADS, each.shape[2]).transpose(1, 2) for each in half], 1)
        for half in (pool.k, pool.v)
    ]
    return torch.stack(halves, 3).flatten(0, 2).double().cpu()


@pytest.mark.parametrize(
    ("page", "n", "count", "rotary", "dtype", "codes"),
    [
        (16, 9, 7, 64, torch.float32, False),
        (64, 5, 5, 64, torch.bfloat16, False),
        (16, 40, 33, 40, torch.float32, True),
        (128, 3, 2, 64, torch.bfloat16, True),
    ],
    ids=["16", "64-bfloat16", "codes-partly-rotated", "codes-128"],
)
def test_pages_of_contexts_arrive_in_shared_blocks(
    device: torch.device, page: int, n: int, count: int, rotary: int, dtype: torch.dtype, codes: bool
) -> None:
    dim, lists = 64, LAYERS * HEADS
    host, rows = documents(16, dim, dtype, [37, 5 * page + 11])
    found: torch.Tensor | HostCodes = coded(host.shape)[0] if codes else host
    frequencies = 10_000.0 ** -(torch.arange(rotary // 2, dtype=torch.float64) * 2 / rotary)
    tokens, turns, _ = composed(rows, page, frequencies, device)
    table = torch.full((len(tokens) + 4, page, 2), -1, dtype=torch.int32, device=device)
    numbers = torch.randperm(len(table))[: len(tokens)].to(device)
    table[numbers] = tokens
    memory = found.pool if isinstance(found, HostCodes) else found
    base = torch.tensor([memory.data_ptr()], device=device)
    contexts = HostContexts(found, base, table, turns)
    entries = torch.randint(len(tokens) * lists, (n,))
    page_of = numbers.cpu()[entries // lists]
    source = (page_of * lists + entries % lists).int().to(device)
    target = torch.randperm((n + 3) * lists)[:n].int().to(device)
    moves = torch.tensor([count], dtype=torch.int32, device=device)
    got, plain, whole = (pool(device, LAYERS, each, page, dim, dtype) for each in (n + 3, n + 3, len(tokens)))
    every = torch.arange(len(tokens), dtype=torch.int32, device=device).expand(LAYERS, HEADS, -1).contiguous()
    context_gather_naive(found, whole, tokens, turns, every, every)
    want, pages = torch.full_like(in_shared_blocks(got, page), torch.nan), in_shared_blocks(whole, page)
    want[target[:count].cpu().long()] = pages[entries[:count]]
    context_shared_gather(contexts, got, source, target, moves)
    context_shared_gather_naive(contexts, plain, source, target, moves)
    for mine in (got, plain):
        here = in_shared_blocks(mine, page)
        assert torch.equal(here.isnan(), want.isnan()), "wrote another shared block, or left one out"
        assert_close(here.nan_to_num(), want.nan_to_num(), dtype)


def test_arguments_for_shared_blocks_are_checked(device: torch.device) -> None:
    host, rows = documents(16, 64, torch.float32, [40])
    tokens, turns, _ = composed(rows, 16, torch.ones(32, dtype=torch.float64), device)
    dst = pool(device, LAYERS, 4, 16, 64, torch.float32)
    base = torch.tensor([host.data_ptr()], device=device)
    contexts = HostContexts(host, base, tokens, turns)
    lists = torch.zeros(2, dtype=torch.int32, device=device)
    good = (dst, lists, lists, lists[:1])
    for bad, message in (
        (replace(contexts, base=base[:0]), r"contexts.base has shape"),
        (replace(contexts, tokens=tokens[..., :1]), r"contexts.tokens has shape"),
        (replace(contexts, turns=turns[:, :1]), "turns has shape"),
        (replace(contexts, host=host[:, :1]), "host has shape"),
        (replace(contexts, host=host[:, :, :2].contiguous()), "contexts have 2 layers"),
    ):
        with pytest.raises(ValueError, match=message):
            context_shared_gather(bad, *good)
    with pytest.raises(ValueError, match="target has shape"):
        context_shared_gather(contexts, dst, lists, lists[:1], lists[:1])
    with pytest.raises(ValueError, match="count has shape"):
        context_shared_gather(contexts, dst, lists, lists, lists)
    with pytest.raises(ValueError, match="programs is 0"):
        context_shared_gather(contexts, *good, programs=0)
    empty = replace(contexts, host=host[:0])
    context_shared_gather(empty, *good)
    assert dst.k[0].isnan().all(), "there is nothing to read yet"
