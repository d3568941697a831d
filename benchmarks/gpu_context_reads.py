"""GB/s at which offloaded requests read composed contexts in their documents' host pages, beside host pages
of their own.

    python -m benchmarks.gpu_context_reads OUT.json [--shape llama-3.1-8b] [--gb GB] [--requests N]

ResidentBlocks: `context_gather` of random pages of 64 tokens out of documents of odd lengths, whose pages of
16 lie in order or anywhere, or in order in codes of 8 bits, and `resident_gather` of as many pages of the
request's own, by the number of programs; alone, and beside decode steps as in gpu_offloaded_copies.py,
without a pause. A
question: all of a layer of the context, in one piece, by `context_gather` and by `gather_h2d` from pages of
its own. The rival is one copy of as many bytes from pinned memory. What `context_gather` loads is compared
with the plain forward. Every figure is the best of five. Pinned memory: 2.6 times ``--gb``. A minute on an
H200."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_offloaded_copies import CHOSEN, PAGE, decoding, gb_per_s
from ragserve.bench.model_shapes import SHAPES
from ragserve.verification import report
from ragserve_kernels.context_gather import HostCodes, context_gather, context_gather_naive
from ragserve_kernels.kv import KVLayers
from ragserve_kernels.resident_gather import resident_gather
from sglang_ext.documents.pages.types import KvShape
from sglang_ext.kv_offload.host.host_pages import HostPages
from sglang_ext.kv_offload.host.host_reader import HostReader

BLOCK, LENGTH = 16, 1237  # tokens of a document's page, and of a document
PROGRAMS = (1, 2, 3, 4, 8, 16)
DEVICE = torch.device("cuda")


def context_of(
    pages: int,
    head_dim: int,
    *,
    scattered: bool,
    page: int = PAGE,
    length: int = LENGTH,
    device: torch.device = DEVICE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and turns of a context that takes so many of the documents' pages, as `context_gather` reads
    them: in pages of ``page`` tokens, of documents of ``length`` tokens."""
    each = -(-length // BLOCK)
    order = torch.randperm(pages) if scattered else torch.arange(pages)
    token = torch.arange(length)
    rows = [
        order[first : first + each][token // BLOCK] * BLOCK + token % BLOCK
        for first in range(0, pages - each + 1, each)
    ]
    which = torch.arange(len(rows)).repeat_interleave(length)
    whole = len(which) // page * page
    tokens = torch.stack((torch.cat(rows), which), -1)[:whole].view(-1, page, 2)
    frequencies = 500_000.0 ** -(torch.arange(head_dim // 2).double() / (head_dim // 2))
    angles = (torch.arange(len(rows)) * length).double()[:, None] * frequencies
    turns = torch.stack((angles.cos(), angles.sin()), 1).float()
    return tokens.int().to(device), turns.to(device)


def differs(host: torch.Tensor | HostCodes, kv: KVLayers, tokens: torch.Tensor, turns: torch.Tensor) -> float:
    """Return how far a page of each head is from the plain forward's, at most."""
    source = torch.randint(len(tokens), (kv.layers, kv.kv_heads, 2), dtype=torch.int32, device=DEVICE)
    target = torch.arange(2, dtype=torch.int32, device=DEVICE).expand_as(source).contiguous()
    loaded = []
    for gather in (context_gather, context_gather_naive):
        gather(host, kv, tokens, turns, source, target)
        loaded.append([each[: 2 * PAGE].clone() for each in (*kv.k, *kv.v)])
    return max(float((a.float() - b.float()).abs().max()) for a, b in zip(*loaded, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--requests", type=int, default=18)
    given = parser.parse_args()
    model = SHAPES[given.shape]
    layers, heads, dim = model["num_hidden_layers"], model["num_key_value_heads"], model["head_dim"]
    own_shape, shape = (KvShape(layers, heads, dim, torch.bfloat16, size) for size in (PAGE, BLOCK))
    size = int(given.gb * 1e9)
    own = HostPages(own_shape, size, pin=True)
    host = HostPages(shape, size, pin=True).pool
    host.copy_(torch.randn(host.shape, dtype=torch.bfloat16, device=DEVICE))
    slots = own.capacity * PAGE
    kv = KVLayers(
        *([torch.zeros(slots, heads, dim, device=DEVICE).bfloat16() for _ in range(layers)] for _ in "kv")
    )
    contexts = {
        "in order": context_of(len(host), dim, scattered=False),
        "anywhere": context_of(len(host), dim, scattered=True),
    }
    code_shape = KvShape(layers, heads, dim, torch.bfloat16, BLOCK, bits=8)
    pool = HostPages(code_shape, len(host) * code_shape.page_bytes, pin=True).pool
    pool.copy_(torch.randint(64, pool.shape, dtype=torch.uint8, device=DEVICE))  # pairs are below 2
    codes = HostCodes(pool, layers, heads, BLOCK, dim)
    count = min(own.capacity, *(len(tokens) for tokens, _ in contexts.values()))
    order = torch.argsort(torch.rand(layers, heads, count, device=DEVICE), -1)
    source = order[..., :CHOSEN].to(torch.int32).contiguous()
    target = torch.arange(CHOSEN, dtype=torch.int32, device=DEVICE).expand_as(source).contiguous()
    moved = source.numel() * own_shape.page_bytes // (layers * heads)
    steps = decoding(given.requests, heads, dim)
    there = torch.empty(own.pool.shape, dtype=torch.bfloat16, device=DEVICE)
    rate = gb_per_s(there.nbytes, lambda: there.copy_(own.pool, non_blocking=True))
    rows: list[dict[str, Any]] = [{"read": "one copy", "GB/s": rate}]
    for programs in PROGRAMS:
        reads = {"own pages": partial(resident_gather, own.pool, kv, source, target, programs=programs)}
        for name, context in contexts.items():
            reads[f"documents, {name}"] = partial(
                context_gather, host, kv, *context, source, target, programs=programs
            )
        reads["documents, codes"] = partial(
            context_gather, codes, kv, *contexts["in order"], source, target, programs=programs
        )
        for name, read in reads.items():
            size = moved if "codes" not in name else moved * code_shape.page_bytes // shape.page_bytes
            row = {"read": f"resident_blocks, {name}", "programs": programs, "GB/s": gb_per_s(size, read)}
            found = steps.beside(read, size / 1e9)
            row["GB/s beside decode"] = round(size / 1e6 / found["ms"], 1)
            row["slowdown without a pause"] = found["decode_slowdown"]
            rows.append(row)
    rows += layer_rows(own, host, kv, contexts, count)
    workload = {
        "model shape": given.shape,
        "documents": f"{LENGTH} tokens each, in pages of {BLOCK}",
        "pages": f"{PAGE} tokens, {CHOSEN} a layer and head",
        "decode": f"{given.requests} requests",
        "MB of a load": round(moved / 1e6, 1),
        "farthest from the plain forward": max(differs(host, kv, *each) for each in contexts.values()),
        "the same of codes": differs(codes, kv, *contexts["anywhere"]),
    }
    report.write("context reads", workload, rows, out=given.out)


def layer_rows(
    own: HostPages,
    host: torch.Tensor,
    kv: KVLayers,
    contexts: dict[str, tuple[torch.Tensor, torch.Tensor]],
    count: int,
) -> list[dict[str, Any]]:
    """Measure reads of all ``count`` pages of one layer."""
    into = KVLayers([kv.k[0]], [kv.v[0]])
    every = torch.arange(count, dtype=torch.int32, device=DEVICE)
    lists = every.expand(1, kv.kv_heads, -1).contiguous()
    size = count * own.shape.page_bytes // kv.layers
    reader = HostReader(own, every)
    rate = gb_per_s(size, lambda: [None for _ in reader.pieces(1, count * PAGE)])
    rows: list[dict[str, Any]] = [{"read": "a layer, own pages", "GB/s": rate}]
    for programs in PROGRAMS:
        for name, context in contexts.items():
            read = partial(
                context_gather, host, into, *context, lists, lists, first_layer=1, programs=programs
            )
            rate = gb_per_s(size, read)
            rows.append({"read": f"a layer, documents, {name}", "programs": programs, "GB/s": rate})
    return rows


if __name__ == "__main__":
    main()
