"""GB/s of the copies of hosted requests: pages to the host, and pages of KV heads back into columns.

    python examples/gpu_hosted_copies.py OUT.json [--shape llama-3.1-8b] [--gb GB]

To the host: what `HostedRows.copy` launches, permuted on the device, with one copy for a run of host pages;
as long runs and as single pages. Back: `column_gather` of random pages, by the number of its programs. The
rival is one copy of as many bytes between pinned memory and the device. Every figure is the best of five."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ragserve.bench.model_shapes import SHAPES
from ragserve.files import write_json
from ragserve_kernels.column_gather import column_gather
from ragserve_kernels.kv import KVLayers
from sglang_ext.documents.fill import DocumentKv, fill_pages
from sglang_ext.documents.types import KvShape
from sglang_ext.hosting.host_pages import HostPages

PAGE, CHOSEN = 64, 32  # tokens; pages that a layer and KV head misses
REPEATS = 5


def gb_per_s(size: int, work: Callable[[], Any]) -> float:
    best = float("inf")
    for _ in range(REPEATS):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begun.record()
        work()
        ended.record()
        torch.cuda.synchronize()
        best = min(best, begun.elapsed_time(ended) / 1e3)
    return round(size / best / 1e9, 2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--gb", type=float, default=2.0)
    given = parser.parse_args()
    model = SHAPES[given.shape]
    layers, heads, dim = model["num_hidden_layers"], model["num_key_value_heads"], model["head_dim"]
    shape = KvShape(layers, heads, dim, torch.bfloat16, PAGE)
    count = int(given.gb * 1e9) // shape.page_bytes
    pages = HostPages(shape, count * shape.page_bytes, pin=True)
    size = count * shape.page_bytes
    kv = KVLayers(
        *(
            [torch.randn(count * PAGE, heads, dim, device="cuda").bfloat16() for _ in range(layers)]
            for _ in range(2)
        )
    )
    source = DocumentKv(kv.k, kv.v, torch.arange(count * PAGE, device="cuda"))
    blocks, mixed = list(range(count)), random.Random(3).sample(range(count), count)
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "page bytes": shape.page_bytes}
    flat, there = pages.pool.view(-1), torch.empty(pages.pool.numel(), dtype=torch.bfloat16, device="cuda")
    found["one copy"] = {
        "to host": gb_per_s(size, lambda: flat.copy_(there, non_blocking=True)),
        "to device": gb_per_s(size, lambda: there.copy_(flat, non_blocking=True)),
    }
    found["pages to host"] = {
        name: gb_per_s(size, lambda n=numbers: fill_pages(pages.pool, shape, blocks, n, source))
        for name, numbers in (("in a row", blocks), ("scattered", mixed))
    }
    wanted = torch.argsort(torch.rand(layers, heads, count, device="cuda"), -1)[..., :CHOSEN]
    wanted = wanted.to(torch.int32).contiguous()
    target = torch.arange(CHOSEN, device="cuda", dtype=torch.int32).expand_as(wanted).contiguous()
    moved = wanted.numel() * shape.page_bytes // (layers * heads)
    found["pages of heads to columns, by programs"] = {
        str(n): gb_per_s(moved, lambda n=n: column_gather(pages.pool, kv, wanted, target, programs=n))
        for n in (1, 2, 3, 4, 8, 32)
    }
    write_json(given.out, found)
    print(found)


if __name__ == "__main__":
    main()
