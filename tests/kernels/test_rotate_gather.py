"""rotate_gather: documents' KV from device pages or host blocks into request slots, K rotated; Triton against
the float64 truth.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ragserve_kernels.dispatch import forced_naive
from ragserve_kernels.kv import KVLayers
from ragserve_kernels.quantize_kv.naive import quantize
from ragserve_kernels.rotate_gather import DeviceSource, HostSource, rotate_gather, rotate_gather_naive
from tests.kernels.reference import TOLERANCE, assert_close, poisoned, relative_error

GPU = torch.cuda.is_available()
KINDS: dict[str, dict[str, bool]] = {
    "device": {},
    "host": {"host": True},
    "codes": {"host": True, "codes": True},
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ids = {"ids": lambda value: str(value).removeprefix("torch.")}


@dataclass
class Case:
    source: DeviceSource | HostSource
    moves: torch.Tensor
    slots: torch.Tensor
    shift: torch.Tensor
    inv_freq: torch.Tensor
    block_tokens: int
    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def pool(self, extra: int = 3) -> KVLayers:
        def layer() -> list[torch.Tensor]:
            shape = (len(self.slots) + extra, self.kv_heads, self.head_dim)
            return [poisoned(*shape, dtype=self.dtype, device=self.slots.device) for _ in range(self.layers)]

        return KVLayers(layer(), layer())


def make(
    device: torch.device,
    lengths: list[int],
    *,
    host: bool = False,
    codes: bool = False,
    layers: int = 2,
    kv_heads: int = 2,
    head_dim: int = 64,
    rotary: int | None = None,
    dtype: torch.dtype = torch.float32,
    page: int = 16,
    block: int = 16,
    shifts: list[int] | None = None,
    keep: float = 0.6,
    unused: int = 2,
    int64: bool = False,
) -> Case:
    """Documents of ``lengths``; per layer a random share of their blocks, in order, the same number of tokens
    in every layer.
    """
    rng = random.Random(torch.randint(0, 2**31, ()).item())
    rotary = rotary or head_dim
    inv_freq = (10000.0 ** (-torch.arange(0, rotary, 2, dtype=torch.float64) / rotary)).float().to(device)
    shift = torch.tensor(
        shifts or [rng.randrange(0, 131072) for _ in lengths],
        dtype=torch.int64 if int64 else torch.int32,
        device=device,
    )
    blocks = [
        (d, b * block, min(block, n - b * block))
        for d, n in enumerate(lengths)
        for b in range(-(-n // block))
    ]
    whole = [entry for entry in blocks if entry[2] == block]
    partial = [entry for entry in blocks if entry[2] < block]
    rows = []
    for _ in range(layers):  # whole blocks are interchangeable between layers, partial ones are kept by all
        chosen = sorted(rng.sample(whole, int(len(whole) * keep)) + partial)
        target, row = 0, []
        for d, first, count in chosen:
            row.append((d, first, count, target))
            target += count
        rng.shuffle(row)
        rows.append(row + [(-1, 10**6, 10**6, 10**6)] * unused)
    total = target
    index = torch.int64 if int64 else torch.int32
    slots = torch.randperm(total + 3)[:total].to(device=device, dtype=index)
    moves = torch.tensor(rows, dtype=torch.int32, device=device).reshape(layers, -1, 4)
    common = (moves, slots, shift, inv_freq, block, layers, kv_heads, head_dim, dtype)
    if host:
        capacity = torch.tensor([-(-n // block) * block for n in lengths], dtype=torch.int64)
        sizes = capacity * layers * kv_heads * head_dim
        base = 16 + sizes.cumsum(0) - sizes
        arenas = [torch.randn(16 + int(sizes.sum()), dtype=dtype) for _ in "kv"]
        pairs = None
        if codes:
            rows = [(int(a) // 4, int(a), int(n) // head_dim) for a, n in zip(base, sizes, strict=True)]
            quantised = [_quantised(arena, rows, head_dim) for arena in arenas]
            arenas, pairs = [each[0] for each in quantised], (quantised[0][1], quantised[1][1])
        if device.type == "cuda":
            arenas = [arena.pin_memory() for arena in arenas]
            pairs = None if pairs is None else (pairs[0].pin_memory(), pairs[1].pin_memory())
        source = HostSource(
            arenas[0], arenas[1], base.to(device), capacity.to(device), layers, kv_heads, head_dim, pairs
        )
        return Case(source, *common)
    pages = [-(-n // page) for n in lengths]
    order = torch.randperm(sum(pages))
    slot_lists, used = [], 0
    for n, count in zip(lengths, pages, strict=True):
        own = order[used : used + count]
        used += count
        slot_lists.append((own[:, None] * page + torch.arange(page)).flatten()[:n])
    start = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    shape = (sum(pages) * page, kv_heads, head_dim)
    kv = KVLayers(*([torch.randn(shape, dtype=dtype, device=device) for _ in range(layers)] for _ in "kv"))
    return Case(
        DeviceSource(kv, torch.cat(slot_lists).to(device=device, dtype=index), start.to(device)), *common
    )


def _quantised(
    arena: torch.Tensor, documents: list[tuple[int, int, int]], head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, and words of scale and zero point, of documents (first word, first element, rows); nothing else
    is to be read: infinite scales stand there.
    """
    codes = torch.full((len(arena),), 99, dtype=torch.int8)
    words = torch.full((len(arena) // 4 + 1, 2), torch.inf, dtype=torch.float16)
    for word, first, count in documents:
        own = slice(first, first + count * head_dim)
        found, words[word : word + count] = quantize(arena[own].view(count, head_dim) * 3 + 1, 8)
        codes[own] = found.flatten().to(torch.int8)
    return codes, words.view(torch.int32).flatten()


def check(case: Case, **options: int) -> KVLayers:
    got, want = case.pool(), case.pool()
    rotate_gather(
        case.source,
        got,
        case.moves,
        case.slots,
        case.shift,
        case.inv_freq,
        block_tokens=case.block_tokens,
        **options,
    )
    rotate_gather_naive(case.source, want, case.moves, case.slots, case.shift, case.inv_freq)
    written = torch.zeros(len(got.k[0]), dtype=torch.bool)
    written[case.slots.long().cpu()] = True
    for layer in range(case.layers):
        for name, g, w in (("K", got.k[layer], want.k[layer]), ("V", got.v[layer], want.v[layer])):
            g, w = g.cpu(), w.cpu()
            assert_close(g[written], w[written], case.dtype, f"{name} of layer {layer}")
            assert torch.isnan(g[~written]).all(), "a slot that is not the request's was written"
        if case.source.pairs is None:
            assert torch.equal(got.v[layer].cpu()[written], want.v[layer].cpu()[written]), "V is a copy"
    return got


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, **ids)
def test_documents_against_truth(device: torch.device, dtype: torch.dtype, kind: str) -> None:
    check(make(device, [63, 1, 32], dtype=dtype, **KINDS[kind]))


@pytest.mark.parametrize("page", [1, 16, 32, 64, 128])
def test_page_sizes(device: torch.device, page: int) -> None:
    check(make(device, [111], page=page, layers=1, kv_heads=1, int64=page == 1))


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "rotary"),
    [(3, 64, 64), (1, 128, 128), (4, 64, 32), (2, 128, 96), (1, 256, 64)],
    ids=lambda v: str(v),
)
@pytest.mark.parametrize("kind", KINDS)
def test_heads_and_partial_rotation(
    device: torch.device, kv_heads: int, head_dim: int, rotary: int, kind: str
) -> None:
    heads = {"kv_heads": kv_heads, "head_dim": head_dim, "rotary": rotary}
    check(make(device, [20, 17], layers=1, **heads, **KINDS[kind]))


@pytest.mark.parametrize("block", [1, 8, 64])
def test_block_sizes(device: torch.device, block: int) -> None:
    check(make(device, [70], block=block, layers=1, kv_heads=1, keep=0.2 if block == 1 else 1.0))


@pytest.mark.parametrize("shift", [0, 1, -1, -37, 131072, 10_000_019])
def test_shifts_lose_no_precision(device: torch.device, shift: int) -> None:
    case = make(device, [16], shifts=[shift], layers=1, kv_heads=1, keep=1.0)
    got = check(case)
    want = case.pool()
    rotate_gather_naive(case.source, want, case.moves, case.slots, case.shift, case.inv_freq)
    slots = case.slots.long()
    assert relative_error(got.k[0][slots], want.k[0][slots]) < 1e-6, (
        "float32 angles would be off by 1e-3 or more"
    )


def test_rotating_there_and_back_is_the_identity(device: torch.device) -> None:
    there = make(device, [40], shifts=[70_000], keep=1.0, unused=0, layers=1)
    middle, end = there.pool(), there.pool()
    rotate_gather(
        there.source, middle, there.moves, there.slots, there.shift, there.inv_freq, block_tokens=16
    )
    back = DeviceSource(middle, there.slots, torch.zeros(1, dtype=torch.int64, device=device))
    rotate_gather(back, end, there.moves, there.slots, -there.shift, there.inv_freq, block_tokens=16)
    tokens = torch.arange(40, device=device)
    original, _ = there.source.read(0, torch.zeros(40, dtype=torch.long, device=device), tokens)
    assert relative_error(end.k[0][there.slots.long()], original) < 1e-5


def test_fewer_programs_than_runs(device: torch.device) -> None:
    check(make(device, [40, 23]), programs=3)
    check(make(device, [40, 23], host=True), programs=1)
    check(make(device, [40], host=True, kv_heads=4, layers=1), programs=4)
    check(make(device, [111], host=True, codes=True, kv_heads=4), programs=1)
    check(make(device, [63, 9], host=True, codes=True, kv_heads=3), programs=2)


@pytest.mark.parametrize("triton", [True, False], ids=["kernel", "plain"])
def test_codes_are_off_by_half_a_step_whatever_the_shift(device: torch.device, triton: bool) -> None:
    """Against the values that were quantised, in float64: half of a row's range / 255, and K turned by an
    angle moves both halves of a pair by at most that.
    """
    case = make(device, [63], host=True, layers=1, kv_heads=3, head_dim=128, keep=1.0, shifts=[131_072])
    plain = case.source
    assert isinstance(plain, HostSource)
    rows = [(int(plain.base[0]) // 4, int(plain.base[0]), 64 * 3)]
    k, v = (_quantised((arena.cpu() - 1) / 3, rows, 128) for arena in (plain.k, plain.v))
    pinned = (lambda each: each.pin_memory()) if device.type == "cuda" else (lambda each: each)
    case.source = HostSource(
        *(pinned(k[0]), pinned(v[0]), plain.base, plain.capacity, 1, 3, 128, (pinned(k[1]), pinned(v[1])))
    )
    with forced_naive(not triton):
        got = check(case)
    want = case.pool()
    rotate_gather_naive(plain, want, case.moves, case.slots, case.shift, case.inv_freq)
    read, slots = torch.zeros(63, dtype=torch.long, device=device), case.slots.long()
    for values, true, source in zip(
        (got.k[0], got.v[0]),
        (want.k[0], want.v[0]),
        plain.read(0, read, torch.arange(63, device=device)),
        strict=True,
    ):
        step = (source.amax(-1) - source.amin(-1)) / 255
        error = (values - true)[slots].cpu().abs().amax(-1)
        assert (error <= 2**0.5 * 0.52 * step).all()


def test_nothing_to_move(device: torch.device) -> None:
    case = make(device, [8], unused=0)
    case.moves = case.moves[:, :0].contiguous()
    pool = case.pool()
    rotate_gather(case.source, pool, case.moves, case.slots, case.shift, case.inv_freq, block_tokens=16)
    assert torch.isnan(pool.k[0]).all()


def test_forced_naive_gives_the_same(device: torch.device) -> None:
    with forced_naive():
        check(make(device, [33], host=True))
        check(make(device, [33], host=True, codes=True))


@settings(
    max_examples=12 if not GPU else 15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    kind=st.sampled_from(sorted(KINDS)),
    block=st.sampled_from([1, 4, 16, 31]),
    kv_heads=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31 - 1),
)
def test_any_shape(
    device: torch.device,
    lengths: list[int],
    kind: str,
    block: int,
    kv_heads: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    lengths = [min(n, 20) for n in lengths] if block == 1 else lengths
    check(make(device, lengths, block=block, kv_heads=kv_heads, dtype=dtype, layers=1, **KINDS[kind]))


def test_bad_arguments(device: torch.device) -> None:
    case = make(device, [20])
    pool = case.pool()
    good = {
        "source": case.source,
        "dst": pool,
        "moves": case.moves,
        "slots": case.slots,
        "shift": case.shift,
        "inv_freq": case.inv_freq,
    }
    coded = make(device, [20], host=True, codes=True)
    with pytest.raises(TypeError, match=r"HostSource\.k has dtype torch\.int8"):
        replace(coded.source, pairs=None)
    for change, error, message in [
        (
            {"dst": make(device, [20], layers=1).pool(), "source": coded.source},
            ValueError,
            "The source holds",
        ),
        ({"moves": case.moves[:1]}, ValueError, "moves has shape"),
        ({"moves": case.moves.long()}, TypeError, "moves has dtype"),
        ({"shift": case.shift.repeat(2)}, ValueError, "shift has shape"),
        ({"inv_freq": torch.ones(33, device=device)}, ValueError, "inv_freq has 33 entries"),
        ({"block_tokens": 0}, ValueError, "block_tokens"),
        ({"programs": 0}, ValueError, "programs"),
        ({"dst": make(device, [20], layers=1).pool()}, ValueError, "The source holds 2 layers"),
    ]:
        with pytest.raises(error, match=message):
            rotate_gather(**{"block_tokens": 16, **good, **change})
    with pytest.raises(ValueError, match="one of each per layer"):
        KVLayers([], [])
    with pytest.raises(ValueError, match="aligned to 16 bytes"):
        KVLayers([torch.zeros(129)[1:].view(1, 2, 64)], [torch.zeros(1, 2, 64)])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, **ids)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_large(device: torch.device, head_dim: int, dtype: torch.dtype, kind: str) -> None:
    sizes = {"layers": 4, "kv_heads": 8, "head_dim": head_dim, "page": 64}
    check(make(device, [2000, 111, 1, 63], dtype=dtype, **sizes, **KINDS[kind]))


@pytest.mark.gpu
def test_addresses_beyond_32_bits(device: torch.device) -> None:
    slots = 2**31 // (8 * 128) + 64  # elements beyond 2^31
    kv = KVLayers(*([torch.empty(slots, 8, 128, dtype=torch.bfloat16, device=device)] for _ in "kv"))
    for tensor in (kv.k[0], kv.v[0]):
        tensor[-64:].normal_()
    source = DeviceSource(
        kv, torch.arange(slots - 32, slots, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    )
    target = torch.arange(slots - 64, slots - 32, device=device)
    moves = torch.tensor([[[0, 0, 16, 0], [0, 16, 16, 16]]], dtype=torch.int32, device=device)
    inv_freq = torch.rand(64, device=device)
    shift = torch.tensor([5], device=device)
    rotate_gather(source, kv, moves, target, shift, inv_freq, block_tokens=16)
    assert torch.equal(kv.v[0][-64:-32], kv.v[0][-32:])
    from ragserve_kernels.rotate_gather.naive import rotate

    assert (
        relative_error(kv.k[0][-64:-32], rotate(kv.k[0][-32:], shift.expand(32), inv_freq))
        < TOLERANCE[torch.bfloat16]
    )


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_captured_graph_serves_other_moves(device: torch.device, kind: str) -> None:
    first = make(device, [64, 48], keep=0.5, **KINDS[kind])
    pool = first.pool()
    args = (first.source, pool, first.moves, first.slots, first.shift, first.inv_freq)
    rotate_gather(*args, block_tokens=16)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rotate_gather(*args, block_tokens=16)
    moved = first.moves.clone()
    moved[:, 0, 0] = -1  # one run fewer
    first.moves.copy_(moved)
    first.shift.fill_(1234)
    for tensor in (*pool.k, *pool.v):
        tensor.fill_(float("nan"))
    graph.replay()
    want = first.pool()
    rotate_gather_naive(first.source, want, first.moves, first.slots, first.shift, first.inv_freq)
    for got, truth in zip((*pool.k, *pool.v), (*want.k, *want.v), strict=True):
        assert torch.equal(torch.isnan(got), torch.isnan(truth))
        assert_close(got.nan_to_num(), truth.nan_to_num(), first.dtype)
