"""Decode batches of Llama-3.1-8B's shape, with several layers so that none finds its KV in the L2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ragserve.bench.kernels.timing import HEAD_DIM, KV_HEADS, L2_FLUSH_BYTES, QUERY_HEADS, median_ms, normal

if TYPE_CHECKING:
    import torch

    from ragserve_kernels.page_select import PageSelection

LOGICAL = 16  # tokens of a logical page
TOKEN_BYTES = 2 * 2 * HEAD_DIM  # K and V of one token and head in bf16
TOPICS, RUN_TOKENS = 48, 96  # of `topic_case`: a run of keys is about one topic


@dataclass
class Layer:
    """The KV of a layer: pages in random order over the pool, all of them used."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_min: Any = None  # tensors once `add_summaries` has run
    k_max: Any = None
    k_center: Any = None


@dataclass
class DecodeCase:
    """A decode batch. ``table`` int32 [batch, pages], ``lens`` int32 [batch], at most ``context``."""

    batch: int
    context: int
    page: int
    table: torch.Tensor
    lens: torch.Tensor
    layers: list[Layer]

    def __post_init__(self) -> None:
        from ragserve_kernels.paged import PagedBatch

        self.paged = PagedBatch(self.table, self.lens, self.page)

    @property
    def kv_heads(self) -> int:
        return self.layers[0].k.shape[1]

    @property
    def blocks(self) -> torch.Tensor:
        """Pages of each request, int64 [batch]."""
        return -(-self.lens.long() // self.page)

    @property
    def token_bytes(self) -> int:
        """K and V of one token and KV head."""
        k = self.layers[0].k
        return 2 * k.shape[2] * k.itemsize

    @property
    def kv_bytes(self) -> int:
        """Bytes of one layer's KV."""
        return int(self.lens.sum()) * self.kv_heads * self.token_bytes

    def attend(self, layer: Layer, selection: PageSelection | None = None, **options: Any) -> torch.Tensor:
        """Attend to all pages of ``layer``, or to a selection."""
        from ragserve_kernels.sparse_decode import sparse_decode

        return sparse_decode(layer.q, (layer.k, layer.v), self.paged, selection=selection, **options)

    def select(self, layer: Layer, budget_tokens: int | None, scoring: str = "minmax") -> PageSelection:
        """Choose pages of ``layer`` within a budget; None ranks them."""
        from ragserve_kernels.page_select import KeySummary, page_select

        per_page = max(1, self.page // LOGICAL)
        center = scoring == "center"
        keys = KeySummary(
            layer.k_center if center else layer.k_max, None if center else layer.k_min, per_page
        )
        return page_select(layer.q, self.paged, keys, budget_tokens=budget_tokens)


def add_summaries(layer: Layer, page: int) -> None:
    """Fill in the summaries of ``layer``'s keys, a row per logical page."""
    import torch

    from ragserve_kernels.page_select import summarise

    chunk = 1 << 20  # slots at a time: the mean is taken in float32
    parts = [
        summarise(layer.k[at : at + chunk], min(LOGICAL, page)) for at in range(0, layer.k.shape[0], chunk)
    ]
    layer.k_min, layer.k_max, layer.k_center = (torch.cat([part[i] for part in parts]) for i in (0, 1, 3))


def slots_of(table: torch.Tensor, tokens: int, page: int) -> torch.Tensor:
    """Pool slots of the first tokens, int64 [..., tokens], by a page table [..., pages]."""
    import torch

    positions = torch.arange(tokens, device=table.device)
    return table[..., positions // page].long() * page + positions % page


def random_case(
    batch: int, context: int, *, page: int = 64, summaries: bool = False, touched: int | None = None
) -> DecodeCase:
    """Random Q, K and V; as many layers, at most 8, as make ``touched`` bytes a layer (default all its KV)
    exceed the L2 several times.
    """
    import torch

    slots = batch * context
    size = slots * KV_HEADS * HEAD_DIM * 4
    count = max(1, min(8, -(-2 * L2_FLUSH_BYTES // (touched or size))))
    table = torch.randperm(slots // page, device="cuda").to(torch.int32).view(batch, context // page)
    made = []
    for _ in range(count):
        k, v = (normal(slots, KV_HEADS, HEAD_DIM) for _ in "kv")
        layer = Layer(normal(batch, QUERY_HEADS, HEAD_DIM), k, v)
        if summaries:
            add_summaries(layer, page)
        made.append(layer)
    lens = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    return DecodeCase(batch, context, page, table, lens, made)


def topic_case(batch: int, context: int, *, strength: float) -> DecodeCase:
    """Make a layer with structure: keys come in runs about one of TOPICS, and each query head asks for a few
    of them with unequal weight.

    Summaries included. ``strength`` is the distance, in scores, between the topic asked for most and the
    noise of the others."""
    import torch

    case = random_case(batch, context, touched=1 << 40)
    layer = case.layers[0]
    scale = HEAD_DIM**0.25
    directions = torch.nn.functional.normalize(torch.randn(KV_HEADS, TOPICS, HEAD_DIM, device="cuda"), dim=-1)
    group = QUERY_HEADS // KV_HEADS
    for b in range(batch):
        starts = torch.rand(context, device="cuda") < 1 / RUN_TOKENS
        topic = torch.randint(0, TOPICS, (context,), device="cuda")[starts.cumsum(0)]
        keys = 0.6 * torch.randn(context, KV_HEADS, HEAD_DIM, device="cuda")
        keys += scale * strength**0.5 * directions[:, topic].transpose(0, 1)
        slots = slots_of(case.table[b], context, case.page)
        layer.k[slots] = keys.to(layer.k.dtype)
        interest = torch.rand(KV_HEADS, group, TOPICS, device="cuda").pow(12)  # few topics matter much
        asked = torch.einsum("hgt,htd->hgd", interest, directions) * scale * strength**0.5
        layer.q[b] = asked.view(QUERY_HEADS, HEAD_DIM) + 0.6 * torch.randn(
            QUERY_HEADS, HEAD_DIM, device="cuda"
        )
    add_summaries(layer, case.page)
    return case


def block_weights(case: DecodeCase, layer: Layer) -> torch.Tensor:
    """The share of each query head's attention weight that every block really holds: float32 [batch, heads,
    blocks], 0 past the end.
    """
    import torch

    heads, head_dim = layer.q.shape[1:]
    blocks = int(case.blocks.max())
    positions = torch.arange(blocks * case.page, device=layer.q.device)
    parts = []
    for b in range(case.batch):
        slots = slots_of(case.table[b], len(positions), case.page)
        q = layer.q[b].float().view(case.kv_heads, -1, head_dim)
        scores = torch.einsum("hgd,thd->hgt", q, layer.k[slots].float()).flatten(0, 1) / head_dim**0.5
        scores = scores.masked_fill(positions >= case.lens[b], -torch.inf)
        parts.append(torch.softmax(scores, -1).view(heads, blocks, case.page).sum(-1))
    return torch.stack(parts)


def layer_ms(run: Callable[[int], object], layers: int, *, calls: int = 8) -> float:
    """Return the median milliseconds of ``run(layer)`` in a CUDA graph of ``calls``, layer after layer.

    The L2 is emptied before each replay; with several layers none finds its own data there."""
    for i in range(layers):
        run(i)

    def step() -> None:
        for i in range(calls):
            run(i % layers)

    return median_ms(step) / calls
