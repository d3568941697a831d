"""Milliseconds per decode step inside the engine: dense and sparse modes by context length and batch size,
one attention backend per run.

Every request has a context of random tokens of its own, prefilled once and found in the prefix cache
afterwards, so only decoding is timed. The weights are random too: this measures no quality."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ragserve.bench import model_shapes
from ragserve.engine.base import GenerateRequest, Sampling
from ragserve.errors import EngineError
from ragserve.verification.engine_run import DECODE_TOKENS, decode_step, first_token, prefill, random_tokens
from ragserve.verification.report import environment

COPY_BANDWIDTH = {"H200": 4.29e12, "H100": 3.0e12}  # bytes a second of a device copy, for the bound
_WARM_TOKENS = 32  # generated before the measurement, to warm up a mode
_LOGICAL = 16

Write = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class DecodeMode:
    """Decode options of a run's requests; empty for an engine without sparse decoding."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


def _by_budget(budget: int, reuse: int) -> DecodeMode:
    return DecodeMode(
        f"budget {budget}, reuse {reuse}",
        {"mode": "hierarchical", "budget": budget, "reuse": reuse, "dense_below": 0},
    )


OURS = (
    DecodeMode("dense", {"mode": "dense"}),
    *(_by_budget(2048, reuse) for reuse in (16, 4, 1, 64)),  # 64: attention nearly without selection
    _by_budget(4096, 16),
)
OBSERVERS = (  # what choosing pages costs: one query more a layer and step is added in each
    OURS[0],
    *(
        DecodeMode(f"{who}, {scores}", {**OURS[1].options, "observe": who, "scores": scores})
        for who, scores in (("window", "bound"), ("last", "bound"), ("recent", "bound"), ("window", "exact"))
    ),
)
BY_THRESHOLD = DecodeMode("threshold 0.95", {"mode": "progressive", "threshold": 0.95, "dense_below": 0})
PLAIN = (DecodeMode("dense"),)


@dataclass(frozen=True)
class Backend:
    """SGLang's ``attention`` with or without sparse decoding, in pages of ``page`` tokens and KV of ``bits``
    bits."""

    attention: str = "flashinfer"
    sparse: bool = True
    page: int = 64
    bits: int = 16


BACKENDS = {
    "ragserve": Backend(),
    "flashinfer": Backend(sparse=False),
    "triton": Backend("triton", sparse=False),
    "ragserve-8-bit": Backend(bits=8),
    "ragserve-page-16": Backend(page=16),
}


def run(
    backend: str,
    points: Sequence[tuple[int, int]],
    *,
    write: Write,
    shape: str = "llama-3.1-8b",
    engine_args: Mapping[str, Any] | None = None,
    threshold: bool = False,
    until: float | None = None,
    modes: Sequence[DecodeMode] | None = None,
    tp_size: int = 1,
) -> dict[str, Any]:
    """Measure a row for each point and mode, in the points' order by length.

    Args:
        points: (context tokens, requests in a batch).
        write: Called with the report after every row.
        shape: `llama-3.1-8b` with random weights, or `embedded`, the small model.
        threshold: Measure progressive decoding as well.
        modes: Of an engine with sparse decoding, instead of OURS.
        until: Seconds of ``time.monotonic``: points that would begin later are ``left out``.
        tp_size: GPUs of the engine.

    Raises:
        EngineError: The engine's own check failed.
    """
    chosen = BACKENDS[backend]
    if modes is None or not chosen.sparse:
        modes = (*OURS, *[BY_THRESHOLD] * threshold) if chosen.sparse else PLAIN
    lengths = list(dict.fromkeys(length for length, _ in points))
    batches = sorted({batch for _, batch in points})
    largest = max(length * batch for length, batch in points)
    report: dict[str, Any] = {"backend": backend, "shape": shape, "tp_size": tp_size, "rows": []}
    flags: dict[str, Any] = {"kv_disk_bytes": 0, "kv_host_bytes": 2**28, "tp_size": tp_size}
    flags["engine_args"] = {"sampling_backend": "pytorch", "max_running_requests": max(batches)}
    if chosen.sparse:
        flags |= {"sparse_attention": "on", "decode_mode": "dense", "decode_logical_page": _LOGICAL}
        flags |= {"decode_page_size": chosen.page, "kv_bits": chosen.bits}
    flags["max_total_tokens"] = largest + (4096 if shape == "embedded" else 16_384)
    if shape != "embedded":
        flags["engine_args"] |= {
            "attention_backend": chosen.attention,
            "mem_fraction_static": 0.85,
            "disable_prefill_cuda_graph": True,
            "cuda_graph_bs_decode": batches,
        }
    flags["engine_args"] |= engine_args or {}
    started = time.perf_counter()

    async def work(engine: Any) -> None:
        info = engine.info
        report["gpu"] = environment()["gpu"]
        report["start s"] = round(time.perf_counter() - started, 1)
        report["engine"] = {
            "device": info.device,
            "attention": info.attention_backend,
            "version": info.version,
        }
        print(f"{backend}: engine up after {report['start s']} s", flush=True)
        for length in lengths:
            sizes = [batch for n, batch in points if n == length]
            await _measure(engine, length, sizes, modes, report, write, until)
        if chosen.sparse:
            await engine.control("check")
            report["statistics checked"] = True
        write(report)

    model_shapes.run_engine(shape, work, **flags)
    return report


async def _measure(
    engine: Any,
    length: int,
    batches: Sequence[int],
    modes: Sequence[DecodeMode],
    report: dict[str, Any],
    write: Write,
    until: float | None,
) -> None:
    """Add the rows of one context length to the report."""
    backend, shape = BACKENDS[report["backend"]], report["shape"]
    draw = random.Random(length)
    contexts = [random_tokens(draw, length) for _ in range(max(batches))]
    prefilled = 0
    for batch in batches:
        if until is not None and time.monotonic() > until:
            report.setdefault("left out", []).append([length, batch])
            write(report)
            continue
        if batch > prefilled:
            started = time.perf_counter()
            await prefill(engine, contexts[prefilled:batch], "bench")
            seconds = time.perf_counter() - started
            print(f"{length} tokens x {batch - prefilled} prefilled in {seconds:.1f} s", flush=True)
            prefilled = batch
            if backend.sparse:
                await engine.control("check")  # statistics of the prefilled pages, before anything is timed
                report.setdefault("agreement", {})[str(length)] = await _agreement(engine, contexts[0])
        for mode in modes:
            await decode_step(engine, contexts[:batch], mode.options, tokens=_WARM_TOKENS)
            seconds, last = await decode_step(engine, contexts[:batch], mode.options)
            row: dict[str, Any] = {
                "context": length,
                "batch": batch,
                "mode": mode.name,
                "ms a step": round(seconds * 1e3, 3),
            }
            row["tokens a second"] = round(batch / seconds, 1)
            if last is not None:
                row |= {
                    "pages": round(last.pages, 1),
                    "share read": round(last.share, 4),
                    "weight": last.weight,
                }
            speed = next((v for name, v in COPY_BANDWIDTH.items() if name in str(report["gpu"])), None)
            if shape != "embedded" and speed:
                share = None if last is None else last.share
                moved = _least_bytes(shape, length, batch, mode, share, backend.bits)
                bound = moved / report["tp_size"] / speed
                row |= {"bound ms": round(bound * 1e3, 3), "of bound": round(bound / seconds, 3)}
            report["rows"].append(row)
            print(row, flush=True)
            write(report)


async def _agreement(engine: Any, ids: list[int]) -> dict[str, Any]:
    """Compare the text of dense decoding with that of our kernels over all pages (threshold 1): equal up to
    rounding, which random weights make visible. Raises EngineError if they differ from the first
    character."""
    texts = []
    sampling = Sampling(max_new_tokens=16, ignore_eos=True)
    for options in ({"mode": "dense"}, {"mode": "progressive", "threshold": 1.0, "dense_below": 0}):
        request = GenerateRequest("check", ids, "bench", "prefix", sampling, decode=options)
        texts.append((await first_token(engine, request)).text)
    same = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
    if not same:
        raise EngineError(
            "Our kernels over all pages answer differently from dense decoding, from the first token on.",
            hint="Do not time this.",
        )
    return {"characters in common": same, "of": max(map(len, texts))}


def _least_bytes(
    shape: str, length: int, batch: int, mode: DecodeMode, share: float | None, bits: int
) -> float:
    """What a step has to read: each byte of the weights, of the KV that it attends to, and of the page
    statistics (once per ``reuse`` steps)."""
    c = model_shapes.SHAPES[shape]
    kv_width = c["num_key_value_heads"] * c["head_dim"]
    layer = (
        2 * c["hidden_size"] ** 2
        + 2 * c["hidden_size"] * kv_width
        + 3 * c["hidden_size"] * c["intermediate_size"]
    )
    weights = 2 * (c["num_hidden_layers"] * layer + c["hidden_size"] * c["vocab_size"])
    token = model_shapes.kv_bytes_per_token(shape)
    # share of bfloat16's bytes, scales included
    stored = 1.0 if bits == 16 else (c["head_dim"] * bits / 8 + 4) / (2 * c["head_dim"])
    kv = batch * (length + DECODE_TOKENS / 2) * token * stored * (1.0 if share is None else share)
    sparse = mode.options.get("mode") in ("hierarchical", "progressive")
    statistics = batch * length / _LOGICAL * token / mode.options.get("reuse", 1) if sparse else 0.0
    return float(weights + kv + statistics)
