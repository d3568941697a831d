"""`ragserve bench kernels-compose`, the half that composes a context: rotate_gather, host transfers,
prefix_rows_attention, block_summary.

Each figure stands beside its rival and the ceiling of this machine, measured in the same run; nothing is
timed before its result agrees with the plain reference. Shapes are Llama-3.1-8B's: 32 layers, 32 query and 8
KV heads of 128, bfloat16."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ragserve.bench.kernels.compose_attention import block_summary_rows, prefix_rows_attention_rows
from ragserve.bench.kernels.compose_beside import beside_decode_rows
from ragserve.bench.kernels.compose_load import gather_h2d_rows, rotate_gather_rows, scatter_d2h_rows
from ragserve.bench.kernels.parts import begin, run_parts
from ragserve.bench.kernels.timing import (
    HEAD_DIM,
    KV_HEADS,
    LAYERS,
    QUERY_HEADS,
    Row,
    copy_gb_per_s,
    link_gb_per_s,
)

PARTS: dict[str, Callable[[dict[str, float], bool], Iterator[Row]]] = {
    "rotate_gather": rotate_gather_rows,
    "rotate_gather beside decode": beside_decode_rows,
    "gather_h2d": gather_h2d_rows,
    "scatter_d2h": scatter_d2h_rows,
    "block_summary": block_summary_rows,
    "prefix_rows_attention": prefix_rows_attention_rows,
}


def run(out_dir: Path | None, *, quick: bool = False, parts: Sequence[str] = ()) -> dict[str, Any]:
    """Measure and write ``kernels_compose.json``; ``parts``: names out of :data:`PARTS`, default all.

    Raises: InvalidRequest: no CUDA device, or no such part. RagserveError: a kernel's result disagrees with
        its reference.
    """
    chosen = begin("kernels-compose", parts, list(PARTS))
    up, down = link_gb_per_s()
    ceilings = {
        "copy_gb_per_s": round(copy_gb_per_s()),
        "link_up_gb_per_s": round(up, 1),
        "link_down_gb_per_s": round(down, 1),
    }
    print(json.dumps(ceilings), flush=True)
    return run_parts(
        "kernels_compose",
        {name: partial(measure, ceilings, quick) for name, measure in PARTS.items()},
        chosen,
        workload={"model shape": f"{LAYERS} layers, {QUERY_HEADS}/{KV_HEADS} heads x {HEAD_DIM}, bfloat16"},
        ceilings=ceilings,
        note="Times are medians with a cold L2, from CUDA graphs where an engine would use one. "
        "GB count every byte that must move.",
        out_dir=out_dir,
    )
