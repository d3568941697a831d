"""Which pages requests with a lag choose: written down in the engine's process, followed by other requests,
and compared (gpu_offloaded_stress.py).

`install` belongs into the main module, where it runs in the processes that the engine spawns: there every
choice by budget is kept, with the scores that it was made by, and written to the folder that
``RAGSERVE_EXAMPLE_CHOICES`` names whenever the engine is checked. While that folder has a file ``follow``, a
new request reads the pages that the request of that phase has chosen at the same token."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sglang_ext.wire.protocol import DECODE_FIELD

FOLDER = "RAGSERVE_EXAMPLE_CHOICES"
ROUNDED = "RAGSERVE_EXAMPLE_ROUNDED"  # if set, linear layers round their results to bfloat16
PLAIN = "RAGSERVE_EXAMPLE_PLAIN"  # if set, layers run in plain torch: SGLang's CUDA kernels have no float32
PHASE, FOLLOW = "phase", "follow"  # files there: the name of what runs now, and of the phase that it follows
_MOST_PENDING = 400  # choices that wait on the device to be written down
_WHEREABOUTS = ("offloaded", "resident_blocks")  # options that say where KV is, and not what is chosen


class Key(NamedTuple):
    """``job``: of prompt and options; the same wherever its KV is."""

    phase: str
    job: str


@dataclass(frozen=True, eq=False, slots=True)
class Choice:
    """Of the step of ``tokens`` tokens: pages int16 [layers, kv_heads, n], -1 behind the last, and scores of
    all whole pages float32 [layers, kv_heads, pages]."""

    tokens: int
    pages: torch.Tensor
    scores: torch.Tensor


def job_of(ids: list[int], decode: dict[str, Any]) -> str:
    """Return the job of a `Key`. ``decode``: options of the request, as it sends them."""
    kept = {name: value for name, value in sorted(decode.items()) if name not in _WHEREABOUTS}
    return hashlib.sha256(json.dumps([ids, kept]).encode()).hexdigest()[:24]


def install() -> None:
    """Let the plugin of this process's SGLang, which is loaded later, note choices if the variable is set."""
    if os.environ.get(ROUNDED):
        _round_linear_layers()
    folder = os.environ.get(FOLDER)
    if not folder:
        return
    from sglang_ext import plugin

    original = plugin._wrap_attention

    def wrap_attention() -> None:
        original()
        if os.environ.get(PLAIN):
            _run_layers_in_torch()
        _Notes(Path(folder)).patch()

    plugin._wrap_attention = wrap_attention


def _round_linear_layers() -> None:
    linear = torch.nn.functional.linear

    def rounded(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = linear(*args, **kwargs)
        return out.bfloat16().to(out.dtype)

    torch.nn.functional.linear = rounded  # type: ignore[assignment]


def _run_layers_in_torch() -> None:
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    for layer in (SiluAndMul, RMSNorm, RotaryEmbedding):
        layer.forward_cuda = layer.forward_native


class _Notes:
    """The choices of one engine process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._of: dict[int, tuple[Any, Key, dict[int, torch.Tensor]]] = {}  # by state
        self._pending: list[tuple[Key, int, torch.Tensor, torch.Tensor]] = []
        self._asked: tuple[Any, torch.Tensor, torch.Tensor] | None = None  # of the extend at hand
        self._followed: dict[str, dict[int, torch.Tensor]] = {}
        self._written = self._rank = 0

    def patch(self) -> None:
        from sglang_ext.attention.decode.backend import SparseDecodeBackend
        from sglang_ext.attention.decode.step_planner import StepPlanner
        from sglang_ext.attention.decode_runtime import DecodeRuntime
        from sglang_ext.attention.offload.extends import OffloadedExtends
        from sglang_ext.attention.offload.lagged_selection import LaggedSelection

        _around(StepPlanner, "admit", self._admit)
        _around(SparseDecodeBackend, "choose", self._score)
        _around(OffloadedExtends, "_choice", self._extend)
        _around(LaggedSelection, "_chosen", self._step)
        _around(DecodeRuntime, "check_integrity", self._check)

    def _admit(self, original: Callable[..., Any], planner: Any, req: Any) -> Any:
        original(planner, req)
        state = planner.state(req)
        options = state.options
        if options.mode != "hierarchical" or not options.lag_steps:
            return
        phase = _read(self._folder / PHASE) or "stress"
        sent = json.loads(req.sampling_params.custom_params[DECODE_FIELD])
        ids = getattr(getattr(req, "ragserve", None), "ids", None)  # of a composed context
        key = Key(phase, job_of(list(ids or req.origin_input_ids), sent))
        follows = _read(self._folder / FOLLOW)
        self._of[id(state)] = state, key, self._choices(follows, key.job) if follows else {}
        if len(self._of) > 2000:  # their states are kept so that no other has their number
            del self._of[next(iter(self._of))]

    def _choices(self, phase: str, job: str) -> dict[int, torch.Tensor]:
        if not self._followed:
            for key, choice in read(self._folder):
                if key.phase == phase:
                    self._followed.setdefault(key.job, {})[choice.tokens] = choice.pages
        return self._followed.get(job, {})

    def _score(
        self, original: Callable[..., Any], backend: Any, queries: Any, batch: Any, options: Any
    ) -> Any:
        self._rank, self._asked = backend.rank, (backend, queries, batch.page_table[0])
        return original(backend, queries, batch, options)

    def _extend(self, original: Callable[..., Any], extends: Any, each: Any) -> Any:
        named, asked, self._asked = original(extends, each), self._asked, None
        if asked is None:  # a row that ranks its pages in the pass itself
            return named
        return self._note(each.state, each.tokens, named, _scores(*asked, each.tokens))

    def _step(self, original: Callable[..., Any], lagged: Any, i: int, row: Any, *, wanted: bool) -> Any:
        named = original(lagged, i, row, wanted=wanted)
        if row.progressive:
            return named
        tables, self._rank = lagged._backend._tables, lagged._backend.rank
        pages = tables.scored_pages if wanted else tables.pages
        scores = _scores(lagged._backend, tables.queries[:, i], pages[i], row.tokens)
        return self._note(row.state, row.tokens, named, scores, follow=wanted)

    def _note(self, state: Any, tokens: int, named: Any, scores: Any, *, follow: bool = True) -> Any:
        known = self._of.get(id(state))
        if known is None:
            return named
        _, key, followed = known
        behind = torch.arange(named.blocks.shape[-1], device=named.blocks.device) >= named.counts[..., None]
        self._pending.append((key, tokens, named.blocks.masked_fill(behind, -1).to(torch.int16), scores))
        if len(self._pending) >= _MOST_PENDING:
            self._write()
        if not follow or (pages := followed.get(tokens)) is None:
            return named
        pages = pages.to(named.blocks)
        return type(named)(pages.clamp_min(0), (pages >= 0).sum(-1).to(named.counts))

    def _check(self, original: Callable[..., Any], runtime: Any, tree: Any) -> Any:
        self._write()
        return original(runtime, tree)

    def _write(self) -> None:
        pending, self._pending = self._pending, []
        if self._rank or not pending:
            return
        kept = [
            (tuple(key), Choice(tokens, pages.cpu(), scores.cpu())) for key, tokens, pages, scores in pending
        ]
        path = self._folder / f"choices-{os.getpid()}-{self._written:06d}"
        path.with_suffix(".part").write_bytes(pickle.dumps(kept))
        path.with_suffix(".part").rename(path)
        self._written += 1


def _around(owner: Any, name: str, function: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    setattr(owner, name, call)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None


def _scores(backend: Any, queries: torch.Tensor, pages: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return the bounds of one request's whole pages, float32 [layers, kv_heads, pages].

    ``queries`` [layers, heads, head_dim]; ``pages``: where their statistics lie."""
    stats = backend._statistics.tables
    rows = stats.rows(pages[: (tokens - 1) // backend.shape.page_size])
    found = []
    for layer, query in enumerate(queries.float()):
        high, low = (each[layer, rows].float() for each in (stats.k_max, stats.k_min))
        grouped = query.view(high.shape[1], -1, query.shape[-1])
        bounds = torch.einsum("hgd,rhd->hgr", grouped.clamp_min(0), high)
        bounds += torch.einsum("hgd,rhd->hgr", grouped.clamp_max(0), low)
        found.append(bounds.amax(1).unflatten(-1, (-1, stats.per_page)).amax(-1))
    return torch.stack(found)


def read(folder: Path) -> Iterator[tuple[Key, Choice]]:
    """Yield all choices that have been written down, in order."""
    for path in sorted(folder.glob("choices-*")):
        if path.suffix != ".part":
            for key, choice in pickle.loads(path.read_bytes()):
                yield Key(*key), choice


class Parting(NamedTuple):
    """How the choices of two answers to one job differ.

    Attributes:
        choices: that both have made, before their tokens part.
        first: tokens of the first choice whose pages are not the same; None: there is none.
        heads: share of layers and heads that differ there.
        gap: the largest distance there between the scores of a page that only one has and of a page that only
            the other has, by the first one's scores; in standard deviations of the head's scores.
        shift: how far scores are apart, up to that choice: median and largest over layers, heads and pages,
            in the same unit.
    """

    choices: int
    first: int | None
    heads: float
    gap: float
    shift: tuple[float, float]


def parting(one: dict[int, Choice], other: dict[int, Choice], until: int) -> Parting:
    """Compare the choices that both made in steps of up to ``until`` tokens."""
    both = [tokens for tokens in sorted(one.keys() & other.keys()) if tokens <= until]
    medians, largest = [0.0], 0.0
    for number, tokens in enumerate(both):
        a, b = one[tokens], other[tokens]
        unit = a.scores.std(-1, keepdim=True).clamp_min(1e-9)
        shifts = ((a.scores - b.scores).abs() / unit).flatten()
        medians.append(float(shifts.median()))
        largest = max(largest, float(shifts.max()))
        pages = a.scores.shape[-1]
        differ = _is_chosen(a.pages, pages) != _is_chosen(b.pages, pages)  # [layers, kv_heads, pages]
        if bool(differ.any()):
            only = differ & _is_chosen(a.pages, pages), differ & _is_chosen(b.pages, pages)
            best = a.scores.masked_fill(~only[0], -torch.inf).amax(-1)
            worst = a.scores.masked_fill(~only[1], torch.inf).amin(-1)
            there = torch.isfinite(best) & torch.isfinite(worst)
            gaps = ((best - worst).abs() / unit[..., 0])[there]
            gap = float(gaps.max()) if len(gaps) else 0.0
            heads = float(differ.any(-1).float().mean())
            return Parting(number + 1, tokens, heads, gap, (max(medians), largest))
    return Parting(len(both), None, 0.0, 0.0, (max(medians), largest))


def _is_chosen(pages: torch.Tensor, count: int) -> torch.Tensor:
    """Bool [layers, kv_heads, count]; the newest page, which has no scores yet, is left out."""
    found = torch.zeros(*pages.shape[:2], count + 1, dtype=torch.bool)
    places = pages.long().masked_fill((pages < 0) | (pages >= count), count)
    return found.scatter_(-1, places, value=True)[..., :count]


def by_job(folder: Path) -> dict[Key, dict[int, Choice]]:
    """Return the choices of every job, by tokens; a job that was sent again has its latest ones."""
    found: dict[Key, dict[int, Choice]] = defaultdict(dict)
    for key, choice in read(folder):
        found[key][choice.tokens] = choice
    return dict(found)
