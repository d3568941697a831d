"""Attention over packed samples with hidden documents and separate questions.

A query sees a key of the same sample that does not come after it, if their segments allow it (`opens`).
`reference` defines it; `flex` does it on a GPU. `flash` is faster to build but ignores segments: it is taken
only where `flex` fails, and then nothing is hidden."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

BLOCK = 128
SEEN = -1
BRANCH = 10_000
"""Segments from here on are questions of their own over the same documents."""
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class Visible:
    """What the tokens of a batch may attend to: sample and segment numbers, both [tokens], on the device."""

    sample: torch.Tensor
    segment: torch.Tensor
    blocks: Any = None
    offsets: torch.Tensor | None = None


def opens(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Tell which segments of queries may look at which segments of keys: -1 at all, a document at itself, a
    question of its own at itself and at what is no such question."""
    return (query == SEEN) | (query == key) | ((query >= BRANCH) & (key < BRANCH))


def mask(sample: torch.Tensor, segment: torch.Tensor) -> torch.Tensor:
    """The rule as a boolean [tokens, tokens]."""
    same = sample[:, None] == sample[None]
    return same & opens(segment[:, None], segment[None]) & torch.ones_like(same).tril()


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: Visible) -> torch.Tensor:
    """Attend sample by sample with a mask. q [tokens, heads, 64], k and v [tokens, KV heads, 64]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    out = []
    for start, end in zip(*_bounds(visible.sample), strict=True):
        rows = slice(start, end)
        allowed = mask(visible.sample[rows], visible.segment[rows])
        heads = [x[rows].transpose(0, 1) for x in (q, k, v)]
        out.append(F.scaled_dot_product_attention(*heads, attn_mask=allowed).transpose(0, 1))
    return torch.cat(out)


def _bounds(sample: torch.Tensor) -> tuple[list[int], list[int]]:
    changes = torch.nonzero(sample[1:] != sample[:-1])[:, 0] + 1
    inner = changes.tolist()
    return [0, *inner], [*inner, len(sample)]


def flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: Visible) -> torch.Tensor:
    """The same with FlexAttention; call `prepare` once for each batch."""
    heads = [x.transpose(0, 1)[None].contiguous() for x in (q, k, v)]
    grouped = q.shape[1] != k.shape[1]
    out = _compiled_flex()(*heads, block_mask=visible.blocks, enable_gqa=grouped)
    return out[0].transpose(0, 1)


def flex_repeated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: Visible) -> torch.Tensor:
    """`flex` with keys and values repeated for each query head, should it not build for groups of three."""
    group = q.shape[1] // k.shape[1]
    return flex(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), visible)


_cache: dict[str, Any] = {}


def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    if "flex" not in _cache:
        _cache["flex"] = torch.compile(flex_attention, dynamic=False)
    return _cache["flex"]


def prepare_flex(visible: Visible) -> None:
    """Name the blocks of keys for each block of queries: from the start of the first query's sample.

    Where every query of a block sees every key of another the rule is not asked; of long samples these are
    most."""
    from torch.nn.attention.flex_attention import BlockMask

    sample, segment = visible.sample, visible.segment
    number = torch.arange(len(sample), device=sample.device)
    begins = torch.cat([number[:1], torch.where(sample[1:] != sample[:-1], number[1:], 0)]).cummax(0).values
    first = begins[::BLOCK] // BLOCK
    block = torch.arange(len(sample) // BLOCK, device=sample.device)
    near = (block[None] >= first[:, None]) & (block[None] <= block[:, None])
    samples, segments = sample.view(-1, BLOCK), segment.view(-1, BLOCK)
    single = (samples == samples[:, :1]).all(1)
    queries = single & ((segments == SEEN) | (segments >= BRANCH)).all(1)
    keys = single & (segments < BRANCH).all(1)
    whole = near & (block[None] < block[:, None]) & queries[:, None] & keys[None]
    whole &= samples[:, :1] == samples[None, :, 0]

    def allowed(b: Any, h: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (sample[q] == sample[k]) & opens(segment[q], segment[k]) & (q >= k)

    visible.blocks = BlockMask.from_kv_blocks(
        *_listed(near & ~whole),
        *_listed(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=allowed,
        seq_lengths=(len(sample), len(sample)),
    )


def _listed(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts [1, 1, rows] and indices [1, 1, rows, columns] of a mask [rows, columns]: what is chosen comes
    first, the rest of a row is never read."""
    order = torch.argsort(chosen.to(torch.int8), dim=1, descending=True, stable=True)
    return chosen.sum(1).to(torch.int32)[None, None], order.to(torch.int32)[None, None].contiguous()


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: Visible) -> torch.Tensor:
    """FlashAttention over samples; segments are not looked at."""
    at, longest = visible.offsets, len(visible.sample)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    found = torch.ops.aten._flash_attention_forward(q, k, v, at, at, longest, longest, 0.0, True, False)
    return found[0]


def prepare_flash(visible: Visible) -> None:
    starts, _ = _bounds(visible.sample)
    ends = [*starts, len(visible.sample)]
    visible.offsets = torch.tensor(ends, dtype=torch.int32, device=visible.sample.device)


def prepare_nothing(visible: Visible) -> None:
    """`reference` needs no preparation."""


@dataclass(frozen=True)
class Choice:
    """An attention, its preparation for a batch, and whether it can hide documents."""

    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Visible], torch.Tensor]
    prepare: Callable[[Visible], None]
    hides: bool


REFERENCE = Choice(reference, prepare_nothing, True)
FLEX = Choice(flex, prepare_flex, True)
FLEX_REPEATED = Choice(flex_repeated, prepare_flex, True)
FLASH = Choice(flash, prepare_flash, False)


def choose(heads: int, kv_heads: int) -> Choice:
    """Return the first attention of a GPU whose output and gradients agree with `reference`."""
    for choice in (FLEX, FLEX_REPEATED, FLASH):
        try:
            error = _error(choice, heads, kv_heads)
        except Exception as failure:  # noqa: BLE001 - a kernel that does not build is passed over, and named
            print(f"attention {choice.attend.__name__} failed: {str(failure)[:500]}", flush=True)
            continue
        print(f"attention {choice.attend.__name__}: relative error {error:.4f}", flush=True)
        if error < 0.02:
            return choice
    raise RuntimeError("No packed attention works on this GPU: look at the lines above.")


def _error(choice: Choice, heads: int, kv_heads: int) -> float:
    """The largest relative error of output and gradients against `reference`, in bfloat16."""
    generator = torch.Generator("cuda").manual_seed(0)
    sample = torch.tensor([0] * 70 + [1] * 430 + [2] * 524, device="cuda", dtype=torch.int32)
    segment = torch.full((1024,), -1, device="cuda", dtype=torch.int32)
    if choice.hides:
        segment[70:200], segment[200:400] = 0, 1
        segment[800:900], segment[900:] = BRANCH, BRANCH + 1
    visible = Visible(sample, segment)
    choice.prepare(visible)
    sizes = (heads, kv_heads, kv_heads)
    make = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
    inputs = [torch.randn(1024, n, 64, **make) for n in sizes]
    upstream = torch.randn(1024, heads, 64, **make)

    def run(attend: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        own = [x.clone().requires_grad_() for x in inputs]
        out = attend(*own, visible)
        out.backward(upstream)
        return [out.detach(), *(x.grad for x in own if x.grad is not None)]

    pairs = zip(run(choice.attend), run(reference), strict=True)
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)
