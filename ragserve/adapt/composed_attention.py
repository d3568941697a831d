"""Attention over packed sequences, as `packing` describes it, for models of transformers.

Tokens see their own segment and, where they are documents, the prefix. The tokens of questions and answers
see their whole sequence instead, over keys that are turned to their places. FlexAttention on a GPU, in two
passes over the pack. On a CPU, and wherever FlexAttention cannot be compiled, one part of the pack after
another, over the keys that it sees, with masks that are added to the scores. A very negative number is added,
not minus infinity, and each token sees at least itself, so that no row is empty: empty rows make NaN of
gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ragserve.adapt.packing import PackedSequences

if TYPE_CHECKING:
    import torch

NAME = "ragserve_packed"  # of the attention, for transformers
ROWS = 4096  # FlexAttention is compiled for multiples of so many asked tokens, so that there are few shapes


@dataclass(frozen=True, slots=True)
class _Part:
    """Tokens that follow each other. They see the parts ``before`` and, causally, each other. ``asked``: with
    keys at their places in the prompt. ``mask``: additive [rows, keys]; None with nothing before."""

    rows: int
    before: range
    asked: bool
    mask: torch.Tensor | None


class PackedAttention:
    """The attention of one pack, on one device."""

    def __init__(self, packed: PackedSequences, rotary: Any, device: torch.device, *, flex: bool) -> None:
        """``rotary``: the model's rotary embedding, called with values and positions."""
        import torch

        self.ids = torch.tensor([packed.ids], device=device)
        self.positions = torch.tensor([packed.positions], device=device)
        self._segments = torch.tensor(packed.segments, device=device)
        self._samples = torch.tensor(packed.samples, device=device)
        self._tails = torch.tensor(packed.tails, device=device)
        self._behind = torch.tensor(packed.behind, device=device)
        self._in_prefix = torch.arange(len(packed.ids), device=device) < packed.prefix
        self._asked = torch.tensor(packed.asked, dtype=torch.int64, device=device)
        self._parts = [] if flex else list(self._divided(packed))
        shifts = torch.tensor([packed.shifts], device=device)
        self._cos, self._sin = rotary(torch.zeros(1, device=device), shifts)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
        """q [1, heads, tokens, head_dim], k and v [1, kv_heads, tokens, head_dim]; returns [1, tokens, heads,
        head_dim]."""
        if self._parts:
            return self._by_parts(q, k, v, scaling).transpose(1, 2).contiguous()
        out = self._by_flex(q, k, v, scaling, asked=False)
        if len(self._asked):
            own = self._by_flex(q[:, :, self._rows], self.turned(k), v, scaling, asked=True)
            out = out.index_copy(2, self._asked, own[:, :, : len(self._asked)].to(out.dtype))
        return out.transpose(1, 2).contiguous()

    def turned(self, k: torch.Tensor) -> torch.Tensor:
        """Keys at their places in the prompts."""
        import torch

        x, half = k.float(), k.shape[-1] // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), -1)
        return (x * self._cos[:, None] + turned * self._sin[:, None]).to(k.dtype)

    @cached_property
    def _rows(self) -> torch.Tensor:
        """The asked tokens in a multiple of `ROWS`, the last one repeated."""
        import torch

        return torch.cat((self._asked, self._asked[-1:].expand(-len(self._asked) % ROWS)))

    def _sees(self, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        own = self._segments[row] == self._segments[key]
        return (key <= row) & (own | (self._behind[row] & self._in_prefix[key]))

    def _asked_sees(self, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        own = (self._tails[key] == 0) | (self._tails[key] == self._tails[row])
        return (key <= row) & (self._samples[row] == self._samples[key]) & own

    def _divided(self, packed: PackedSequences) -> Iterator[_Part]:
        """All tokens, in order: segments, and each sequence's questions and answers as one part."""
        import torch

        kinds = [
            (sample, 0 if tail else segment, bool(tail))
            for sample, segment, tail in zip(packed.samples, packed.segments, packed.tails, strict=True)
        ]
        places = torch.arange(len(kinds), device=self._segments.device)
        first: dict[int, tuple[int, int]] = {}  # part and token of each sequence
        end = 0
        for number, ((sample, _, asked), same) in enumerate(groupby(kinds)):
            start, end = end, end + sum(1 for _ in same)
            first.setdefault(sample, (number, start))
            rows, before, mask = places[start:end], range(0), None
            if asked:
                before = range(first[sample][0], number)
                keys = places[first[sample][1] : end]
                mask = _additive(self._asked_sees(rows[:, None], keys))
            elif packed.behind[start] and packed.prefix:
                before, keys = range(1), torch.cat((places[: packed.prefix], rows))
                mask = _additive(self._sees(rows[:, None], keys))
            yield _Part(end - start, before, asked, mask)

    def _by_parts(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        # Not cuDNN: given a mask, its gradients can be NaN (pytorch/pytorch#196678)
        kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        groups, sizes = q.shape[1] // k.shape[1], [part.rows for part in self._parts]
        turned = self.turned(k) if len(self._asked) else k
        # Not slices, whose gradients are as large as the pack, each
        keys, turned_keys, values = (
            each.repeat_interleave(groups, 1).split(sizes, 2) for each in (k, turned, v)
        )
        found = []
        for number, (part, rows) in enumerate(zip(self._parts, q.split(sizes, 2), strict=True)):
            seen = turned_keys if part.asked else keys
            own_k, own_v = (
                torch.cat([*(each[n] for n in part.before), each[number]], 2) for each in (seen, values)
            )
            mask = None if part.mask is None else part.mask.to(q.dtype)
            with sdpa_kernel(kernels):
                found.append(
                    scaled_dot_product_attention(
                        rows, own_k, own_v, mask, is_causal=mask is None, scale=scaling
                    )
                )
        return torch.cat(found, 2)

    def _by_flex(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, *, asked: bool
    ) -> torch.Tensor:
        import torch

        blocks, compiled = self._blocks[asked], _flex_attention(q.device.type)
        with torch.autocast(q.device.type, enabled=False):  # a caller's would be compiled for anew
            return compiled(q, k, v, block_mask=blocks, scale=scaling, enable_gqa=True)

    @cached_property
    def _blocks(self) -> tuple[Any, Any]:
        from torch.nn.attention.flex_attention import create_block_mask

        tokens, device = len(self._segments), str(self._segments.device)

        def sees(b: Any, h: Any, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return self._sees(row, key)

        first = create_block_mask(sees, None, None, tokens, tokens, device=device)
        if not len(self._asked):
            return first, None
        rows = self._rows

        def asked_sees(b: Any, h: Any, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return self._asked_sees(rows[row], key)

        return first, create_block_mask(asked_sees, None, None, len(rows), tokens, device=device)


def _additive(seen: torch.Tensor) -> torch.Tensor:
    import torch

    mask = torch.zeros(seen.shape, dtype=torch.bfloat16, device=seen.device)
    return mask.masked_fill(~seen, torch.finfo(torch.bfloat16).min / 2)


@cache
def _flex_attention(device: str) -> Callable[..., torch.Tensor]:
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    # One for each number of asked tokens, with and without gradients.
    torch._dynamo.config.recompile_limit = max(32, torch._dynamo.config.recompile_limit)
    compiled = torch.compile(flex_attention, dynamic=False) if device == "cuda" else flex_attention
    found: Callable[..., torch.Tensor] = compiled
    return found


def flex_differs(model: Any, device: torch.device, tokens: int) -> str:
    """Why FlexAttention is not to be used with a model's heads for packs of so many tokens, 1,024 at least;
    empty if it gives what masks give, in values and gradients."""
    import torch

    if device.type != "cuda":
        return "it needs a GPU"
    from ragserve.adapt.packing import TrainingSequence, packed

    config = model.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    documents = ([1] * 150, [2] * 201)
    sequences = [TrainingSequence([3] * 20, documents, [4] * 30, [5] * 9, composed=True)] * 2
    draw = torch.Generator(device).manual_seed(0)
    given = [
        torch.randn(1, tokens, count, size, generator=draw, device=device, dtype=torch.bfloat16).transpose(
            1, 2
        )
        for count in (heads, kv_heads, kv_heads)
    ]
    found = []
    try:
        for flex in (True, False):
            pack = packed(sequences, [6] * 100)
            pack.pad(tokens)
            inputs = [each.clone().requires_grad_() for each in given]
            q, k, v = inputs
            out = PackedAttention(pack, model.model.rotary_emb, device, flex=flex)(q, k, v, size**-0.5)
            out.float().square().sum().backward()
            found.append([out.detach(), *(each.grad for each in inputs if each.grad is not None)])
    except Exception as error:  # noqa: BLE001 - whatever the compiler says
        return f"it failed here: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    for one, other in zip(*found, strict=True):
        difference = float((one.float() - other.float()).norm() / other.float().norm())
        if not difference < 0.02:
            return f"it differs from masks by {difference:.3f}"
    return ""


class DecodeAttention:
    """The attention of a decode step: one token a row, over a cache that is padded on the left. A group's
    heads are rows of one product, so that K and V are read once, not copied for each head."""

    def __init__(self, seen: torch.Tensor) -> None:
        """``seen``: bool [rows, keys]."""
        self._unseen = ~seen[:, None, None]

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
        """q [rows, heads, 1, head_dim], k and v [rows, kv_heads, keys, head_dim]; returns [rows, 1, heads,
        head_dim]."""
        rows, heads, _, size = q.shape
        scores = (q.view(rows, k.shape[1], -1, size) @ k.transpose(2, 3)).float() * scaling
        weights = scores.masked_fill_(self._unseen, float("-inf")).softmax(-1)
        return (weights.to(v.dtype) @ v).view(rows, 1, heads, size)


def attend_packed(model: Any) -> None:
    """Let a model of transformers attend by the `PackedAttention` or `DecodeAttention` that its forward is
    given as ``packed``."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attend)
    model.set_attn_implementation(NAME)


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float,
    *,
    packed: PackedAttention | DecodeAttention,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    return packed(query, key, value, scaling), None
