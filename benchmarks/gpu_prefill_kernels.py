"""FlashInfer's FA2 and FA3 and SGLang's FA4 on a Hopper GPU: are they right, and how long does each take?

    python -m benchmarks.gpu_prefill_kernels OUT_FOLDER

One layer with the heads of Llama-3.1-8B in bfloat16. Attention of new tokens to cached ones (paged KV) is
compared with float32 attention and timed; attention of new tokens to each other (ragged KV) is timed. FA4
(SGLang's `--prefill-attention-backend fa4`) is timed where `nvidia-cutlass-dsl` and `quack-kernels` are
installed, on KV in one piece: its pages have 128 tokens. Writes OUT_FOLDER/h200-prefill-kernels.json. Takes
about ten seconds, and three and a half minutes more where FlashInfer has to compile both kernels."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from flashinfer import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper

from ragserve.bench.kernels.timing import event_ms
from ragserve.verification import report
from sglang_ext.attention.prefill.flashinfer_prefill import PrefillKernels

try:
    from sglang.kernels.ops.attention.flash_attn.cute import flash_attn_func as fa4
except ImportError as error:
    print(f"FA4 is not measured: {error}", file=sys.stderr)
    fa4 = None

HEADS, KV_HEADS, DIM = 32, 8, 128
KERNELS = ("fa2", "fa3")
# new and cached tokens of each request of a batch
COMPARED = (
    ([1000, 700, 64], [5000, 0, 333]),  # a request without cached tokens: FA3 reads KV that is not there
    ([2048], [9000]),
    ([640, 1], [3000, 77]),
    ([129], [1]),
)
TIMED = (
    *(([8192], [cached]) for cached in (8192, 24_576, 92_160)),
    ([32], [102_400]),
    *(([new], [32_768]) for new in (256, 320, 384, 448, 512, 640, 1024, 2048)),
    ([1024], [8192]),
    *(([new], [102_400]) for new in (512, 1024)),
    ([256] * 8, [5000] * 8),
    ([64] * 16, [5000] * 16),
)
RAGGED = (8192, 32_768, 102_400)
NOTE = (
    "One layer, milliseconds, medians. error: relative, against float32 attention (norms); lse apart: the "
    "kernels' largest difference of log-sum-exp; fa4 apart: from FA2's result, relative. taken: what "
    "ragserve takes for such a batch; where nothing is cached, the choice is FlashInfer's own."
)


def tensors(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]


def planned(
    workspace: torch.Tensor, kernel: str, new: Sequence[int], cached: Sequence[int], slots: torch.Tensor
) -> Any:
    """FlashInfer's wrapper for new tokens that attend to cached ones in ``slots``, planned as SGLang does."""
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=kernel)
    starts = [
        torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda") for lengths in (new, cached)
    ]
    padded = torch.cat([slots, torch.zeros(256, dtype=torch.int32, device="cuda")])
    last_page = torch.ones(len(new), dtype=torch.int32, device="cuda")
    kinds = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    wrapper.begin_forward(*starts, padded, last_page, HEADS, KV_HEADS, DIM, 1, non_blocking=True, **kinds)
    return wrapper


def attend(wrapper: Any, q: torch.Tensor, kv: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return wrapper.forward_return_lse(q, tuple(kv), causal=False, sm_scale=DIM**-0.5, logits_soft_cap=0.0)


def attend_fa4(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """SGLang's FA4: ``q`` [tokens, heads, dim], ``k`` and ``v`` in one piece, [tokens, KV heads, dim]."""
    found = fa4(q[None], k[None], v[None], softmax_scale=DIM**-0.5, causal=causal)
    return (found[0] if isinstance(found, tuple) else found)[0]


def fa4_figures(right: torch.Tensor, *inputs: torch.Tensor, causal: bool, repeats: int) -> dict[str, float]:
    """FA4's milliseconds and its relative distance from ``right``, [tokens, heads, dim]; {} without FA4."""
    if fa4 is None:
        return {}
    apart = (attend_fa4(*inputs, causal).float() - right.float()).norm() / right.float().norm()
    return {
        "fa4 ms": event_ms(lambda: attend_fa4(*inputs, causal), repeats),
        "fa4 apart": float(apart),
    }


def reference(
    q: torch.Tensor,
    kv: Sequence[torch.Tensor],
    new: Sequence[int],
    cached: Sequence[int],
    slots: torch.Tensor,
) -> torch.Tensor:
    """Attention in float32, [tokens, heads, dim]; zeros for a request without cached tokens."""
    parts = []
    for rows, taken in zip(q.split(list(new)), slots.long().split(list(cached)), strict=True):
        k, v = (side[taken].float().repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1) for side in kv)
        weights = (rows.float().transpose(0, 1) @ k.transpose(1, 2) * DIM**-0.5).softmax(-1)
        parts.append((weights @ v).transpose(0, 1))
    return torch.cat(parts)


def shown(lengths: Sequence[int]) -> str:
    if len(lengths) > 1 and len(set(lengths)) == 1:
        return f"{len(lengths)} x {lengths[0]:,}"
    return " + ".join(f"{length:,}" for length in lengths)


def batch_row(new: Sequence[int], cached: Sequence[int], processors: int) -> dict[str, Any]:
    taken = PrefillKernels(["fa2"], ["fa3"], HEADS, processors).wrappers(new, cached)[0]
    return {"new tokens": shown(new), "cached tokens": shown(cached), "taken": taken}


def compared(workspace: torch.Tensor, processors: int) -> Iterator[dict[str, Any]]:
    for new, cached in COMPARED:
        torch.manual_seed(sum(new))
        n_slots = sum(cached) + 1000
        q, *kv = tensors((sum(new), HEADS, DIM), *[(n_slots, KV_HEADS, DIM)] * 2)
        slots = torch.randperm(n_slots, device="cuda")[: sum(cached)].to(torch.int32)
        right = reference(q, kv, new, cached, slots)
        row, lse = batch_row(new, cached, processors), {}
        for kernel in KERNELS:
            found, lse[kernel] = attend(planned(workspace, kernel, new, cached, slots), q, kv)
            row[f"{kernel} error"] = float((found.float() - right).norm() / right.norm())
        finite = torch.isfinite(lse["fa2"]) & torch.isfinite(lse["fa3"])
        yield row | {"lse apart": float((lse["fa2"] - lse["fa3"])[finite].abs().max())}


def timed(workspace: torch.Tensor, processors: int) -> Iterator[dict[str, Any]]:
    for new, cached in TIMED:
        q, *kv = tensors((sum(new), HEADS, DIM), *[(sum(cached) + 10, KV_HEADS, DIM)] * 2)
        slots = torch.arange(sum(cached), device="cuda", dtype=torch.int32)
        row = batch_row(new, cached, processors)
        for kernel in KERNELS:
            wrapper = planned(workspace, kernel, new, cached, slots)
            row[f"{kernel} ms"] = event_ms(lambda w=wrapper, q=q, kv=kv: attend(w, q, kv), 5)
        if len(new) == 1:
            right = attend(planned(workspace, "fa2", new, cached, slots), q, kv)[0]
            in_one_piece = [side[: sum(cached)] for side in kv]
            row |= fa4_figures(right, q, *in_one_piece, causal=False, repeats=5)
        yield row


def ragged(workspace: torch.Tensor) -> Iterator[dict[str, Any]]:
    for length in RAGGED:
        q, k, v = tensors((length, HEADS, DIM), *[(length, KV_HEADS, DIM)] * 2)
        starts = torch.tensor([0, length], dtype=torch.int32, device="cuda")
        row: dict[str, Any] = {"new tokens": shown([length]), "cached tokens": "0"}
        for kernel in (*KERNELS, "auto"):
            wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=kernel)
            wrapper.begin_forward(starts, starts, HEADS, KV_HEADS, DIM, q_data_type=torch.bfloat16)
            if kernel == "auto":
                row["taken"] = wrapper._backend  # it has no public name
            else:
                row[f"{kernel} ms"] = event_ms(
                    lambda w=wrapper, q=q, k=k, v=v: w.forward(q, k, v, causal=True, sm_scale=DIM**-0.5), 3
                )
        right = wrapper.forward(q, k, v, causal=True, sm_scale=DIM**-0.5)
        yield row | fa4_figures(right, q, k, v, causal=True, repeats=3)


def main() -> int:
    workspace = torch.empty(512 * 2**20, dtype=torch.uint8, device="cuda")
    processors = torch.cuda.get_device_properties("cuda").multi_processor_count
    rows = [*compared(workspace, processors), *timed(workspace, processors), *ragged(workspace)]
    workload = {"query heads": HEADS, "KV heads": KV_HEADS, "head size": DIM, "dtype": "bfloat16"}
    path = Path(sys.argv[1]) / "h200-prefill-kernels.json"
    report.write("prefill kernels", workload, rows, out=path, note=NOTE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
