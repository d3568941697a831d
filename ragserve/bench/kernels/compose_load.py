"""The loading half of the compose benchmark: rotate_gather from device and host, and the plain transfers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ragserve.bench.kernels.timing import HEAD_DIM, KV_HEADS, LAYERS, Row, agree, bandwidth, median_ms, normal

BLOCK = 16  # tokens


def compose_case(tokens: int, documents: int, host: bool, codes: bool = False) -> tuple[Any, ...]:
    """A request that keeps ``tokens`` of documents four times as long, other blocks in every layer;
    ``codes``: of 8 bits, on the host."""
    import torch

    from ragserve_kernels.kv import KVLayers
    from ragserve_kernels.rotate_gather import DeviceSource, HostSource

    length = 4 * tokens // documents
    empty = partial(torch.full, (LAYERS, tokens, KV_HEADS, HEAD_DIM), float("nan"), dtype=torch.bfloat16)
    dst = KVLayers(*([*empty(device="cuda")] for _ in "kv"))
    source: DeviceSource | HostSource
    if host:
        each = LAYERS * KV_HEADS * length * HEAD_DIM
        base = torch.arange(documents, device="cuda") * each
        dtype = torch.int8 if codes else torch.bfloat16
        arenas = [torch.empty(documents * each, dtype=dtype, pin_memory=True) for _ in "kv"]
        pairs = None
        if codes:
            pairs = (_quantised(arenas[0], documents), _quantised(arenas[1], documents))
        else:
            for arena in arenas:
                arena.copy_(normal(*arena.shape))
        lengths = torch.full((documents,), length, device="cuda")
        source = HostSource(arenas[0], arenas[1], base, lengths, LAYERS, KV_HEADS, HEAD_DIM, pairs)
    else:
        pools = [normal(LAYERS, documents * length, KV_HEADS, HEAD_DIM) for _ in "kv"]
        pages = torch.randperm(documents * length // 16, device="cuda")  # page size 16
        slots = (pages[:, None] * 16 + torch.arange(16, device="cuda")).flatten()
        source = DeviceSource(
            KVLayers([*pools[0]], [*pools[1]]), slots, torch.arange(documents, device="cuda") * length
        )
    chosen = torch.stack(
        [torch.randperm(documents * length // BLOCK)[: tokens // BLOCK].sort().values for _ in range(LAYERS)]
    )
    first = chosen * BLOCK
    target = (torch.arange(tokens // BLOCK) * BLOCK).expand_as(first)
    moves = torch.stack([first // length, first % length, torch.full_like(first, BLOCK), target], -1)
    slots = torch.arange(tokens, device="cuda")
    shift = torch.arange(documents, device="cuda") * length + 100
    inv_freq = 500000.0 ** (-torch.arange(0, HEAD_DIM, 2, device="cuda", dtype=torch.float64) / HEAD_DIM)
    return source, dst, moves.int().cuda(), slots, shift, inv_freq.float()


def _quantised(arena: Any, documents: int) -> Any:
    """Fill an arena with codes of 8 bits; return their scales and zero points as `HostSource` wants them."""
    import torch

    from ragserve_kernels.quantize_kv import QuantizedKV, quantize_kv

    each = len(arena) // documents
    rows = each // HEAD_DIM
    words = torch.zeros(documents * each // 4 + rows, dtype=torch.int32, pin_memory=True)
    into = QuantizedKV.empty(rows, 1, HEAD_DIM, bits=8, device="cuda")
    for document in range(documents):
        quantize_kv(normal(rows, 1, HEAD_DIM), torch.arange(rows, device="cuda"), into)
        arena[document * each : (document + 1) * each].copy_(into.codes.flatten())
        words[document * each // 4 :][:rows].copy_(into.params.view(torch.int32).flatten())
    return words


def _per_layer_torch(
    source: Any, dst: Any, moves: Any, slots: Any, shift: Any, inv_freq: Any
) -> Callable[[], None]:
    """The rival: per layer an indexed copy of V, and gather, rotation and indexed store of K. Index tensors
    are made beforehand.
    """
    import torch

    within = torch.arange(BLOCK, device="cuda")
    document = moves[..., 0].long()
    rows = (source.slots[(source.start[document] + moves[..., 1])[..., None] + within]).flatten(1).long()
    target = slots[(moves[..., 3][..., None] + within).flatten(1).long()]
    angle = (shift[document].double()[..., None] * inv_freq.double()).repeat_interleave(BLOCK, 1)[:, :, None]
    cos, sin = angle.cos().float(), angle.sin().float()

    def call() -> None:
        for layer in range(LAYERS):
            k = source.kv.k[layer][rows[layer]].float()
            x1, x2 = k.chunk(2, -1)
            turned = torch.cat([x1 * cos[layer] - x2 * sin[layer], x2 * cos[layer] + x1 * sin[layer]], -1)
            dst.k[layer].index_copy_(0, target[layer], turned.to(torch.bfloat16))
            dst.v[layer].index_copy_(0, target[layer], source.kv.v[layer][rows[layer]])

    return call


def rotate_gather_rows(ceiling: dict[str, float], quick: bool) -> Iterator[Row]:
    import torch

    from ragserve_kernels.kv import KVLayers
    from ragserve_kernels.rotate_gather import rotate_gather_naive
    from ragserve_kernels.rotate_gather.triton import rotate_gather_triton

    for name, host, codes in (("device", False, False), ("host", True, False), ("host, 8 bits", True, True)):
        row_bytes = HEAD_DIM + 4 if codes else 2 * HEAD_DIM
        token_bytes = 2 * LAYERS * KV_HEADS * row_bytes  # K and V
        for tokens in (2048,) if quick else (512, 2048, 8192):
            args = compose_case(tokens, 8, host, codes)
            dst = args[1]
            truth = KVLayers(*([torch.empty_like(layer) for layer in side] for side in (dst.k, dst.v)))
            rotate_gather_triton(*args, tile_tokens=BLOCK)
            if tokens <= 2048:  # the plain reference reads host memory element by element
                rotate_gather_naive(args[0], truth, *args[2:], precision=torch.float32)
                agree(torch.stack(list(dst.k)), torch.stack(list(truth.k)), "rotate_gather K")
                values = torch.stack(list(dst.v)), torch.stack(list(truth.v))
                agree(*values, "rotate_gather V", *(() if codes else (1e-12,)))
            del truth
            case = f"{name}, {tokens} tokens, blocks of 16"
            gb, limit = tokens * token_bytes / 1e9, ceiling["link_up_gb_per_s"]
            if not host:
                gb, limit = 2 * gb, ceiling["copy_gb_per_s"]
            sweep = (None, 1, 2, 8, 32, 64) if host and tokens == 2048 and not quick else (None,)
            for programs in sweep:
                ms = median_ms(partial(rotate_gather_triton, *args, tile_tokens=BLOCK, programs=programs))
                label = f"programs {programs}" if programs else "default"
                yield bandwidth(case, label, ms, gb, limit)
            if not host:
                ms = median_ms(_per_layer_torch(*args))
                yield bandwidth(case, "rival: torch, per layer", ms, gb, limit)


def gather_h2d_rows(ceiling: dict[str, float], quick: bool) -> Iterator[Row]:
    import torch

    from ragserve_kernels.gather_h2d.triton import gather_h2d_triton

    limit = ceiling["link_up_gb_per_s"]
    total = 64 << 20 if quick else 256 << 20  # bytes moved, K and V together
    for tokens in (16,) if quick else (16, 64, 256):
        blocks = total // (2 * tokens * HEAD_DIM * 2)
        host = [normal(2 * blocks, tokens, HEAD_DIM).cpu().pin_memory() for _ in "kv"]
        out = [torch.full_like(arena[:blocks], float("nan"), device="cuda") for arena in host]
        index = torch.randperm(2 * blocks, device="cuda")[:blocks]
        target = torch.randperm(blocks, device="cuda")
        gather_h2d_triton(host, out, index, target)
        for arena, got in zip(host, out, strict=True):
            agree(got[target], arena[index.cpu()].cuda(), "gather_h2d", 1e-12)
        case = f"blocks of {tokens * HEAD_DIM * 2 // 1024} KB"
        for programs in (32,) if quick else (4, 8, 16, 32, 64):
            ms = median_ms(partial(gather_h2d_triton, host, out, index, target, programs=programs))
            yield bandwidth(case, f"programs {programs}", ms, total / 1e9, limit)
        some = min(blocks, 2048)
        pairs = list(zip(index[:some].tolist(), target[:some].tolist(), strict=True))

        def one_by_one(pairs: list[tuple[int, int]] = pairs, host: Any = host, out: Any = out) -> None:
            for source, place in pairs:
                out[0][place].copy_(host[0][source], non_blocking=True)

        ms = median_ms(one_by_one, graph=False)
        name = f"rival: one copy per block ({some} blocks)"
        yield bandwidth(case, name, ms, some * tokens * HEAD_DIM * 2 / 1e9, limit)


def scatter_d2h_rows(ceiling: dict[str, float], quick: bool) -> Iterator[Row]:
    """Wall time from the first submission until everything lies in its host blocks: 16 tensors of 8,192
    tokens (K and V of 8 layers).
    """
    import torch

    from ragserve_kernels.scatter_d2h import Saver, scatter_d2h, scatter_d2h_naive

    tokens, tensors, block = 8192, 4 if quick else 16, 16
    sources = [normal(tokens, KV_HEADS, HEAD_DIM) for _ in range(tensors)]
    blocks = KV_HEADS * tokens // block
    hosts = [
        torch.zeros(blocks, block, HEAD_DIM, dtype=torch.bfloat16, pin_memory=True) for _ in range(tensors)
    ]
    index = torch.randperm(blocks).view(KV_HEADS, -1)
    gb, limit = sum(source.nbytes for source in sources) / 1e9, ceiling["link_down_gb_per_s"]
    case = "K and V of 8,192 tokens per layer, blocks of 4 KB"
    for threads in (4,) if quick else (1, 4, 8, 16):
        with Saver(staging_bytes=sources[0].nbytes, buffers=4, threads=threads) as saver:
            times = []
            for _ in range(4):
                started = time.perf_counter()
                for source, host in zip(sources, hosts, strict=True):
                    scatter_d2h(source, host, index, saver=saver)
                saver.wait()
                times.append((time.perf_counter() - started) * 1e3)
            yield bandwidth(case, f"saver, {threads} threads", statistics.median(times[1:]), gb, limit)
    truth = torch.zeros_like(hosts[0])
    scatter_d2h_naive(sources[0], truth, index)
    agree(hosts[0], truth, "scatter_d2h", 1e-12)

    def one_by_one() -> None:
        for head in range(KV_HEADS):
            for i, place in enumerate(index[head].tolist()):
                hosts[0][place].copy_(sources[0][i * block : (i + 1) * block, head], non_blocking=True)

    ms = median_ms(one_by_one, graph=False)
    yield bandwidth(case, "rival: one copy per block (one tensor)", ms, sources[0].nbytes / 1e9, limit)
