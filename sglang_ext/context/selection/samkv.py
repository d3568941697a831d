"""SamKV's selection (docs/methods.md, section 1; the paper's sections 3.1 and 3.2): from the question's
queries and the documents' summaries to the tokens that each layer keeps. Reads no K or V of a document.
Batched over documents and layers.

Equations, per layer n and document i of D:

    q_i = q + 1/(D-1) * sum_{j != i} |cos(q, loc_j)| loc_j                 (1), the personalised query
    s_b = <q_i, mean K of block b> / sqrt(head_dim)                        summed over heads
    P_i = mean over stable layers of (s_max - s_anc) / (s_max - s_min)     (2), (3)

A layer counts with 0 in P_i unless s_min < s_anc <= s_max. q_i and mean K are rotated to their positions in
the prompt.
anc is the mean K of initial and local blocks, max the middle block with the smallest exponent, min the one
with the least attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sglang_ext.analysis.document_analysis import Analysis, Cut
from sglang_ext.context.selection.base import ModelShape, PartialSelection
from sglang_ext.context.selection.blocks import Blocks
from sglang_ext.context.selection.queries import block_attention, block_products, document_queries
from sglang_ext.context.selection.recompute_rules import Rule
from sglang_ext.tensors.rope import Rotation
from sglang_ext.wire.protocol import ContextPlan
from sglang_ext.wire.request_options import SamKvOptions

KEEP = 0.15  # default share of the document tokens, for sentences
MOST = 0.6  # default ceiling of that share with `top_p`


def select_by_samkv(plan: ContextPlan, options: SamKvOptions, shape: ModelShape) -> PartialSelection:
    """Keep the system text, initial and local blocks, and leave the other document tokens to the selector.

    With sentences there are no initial and local blocks; where the budget covers all tokens, all are kept."""
    block = shape.cut.block if options.block_size is None else options.block_size
    cut = Cut(block, options.local_blocks or shape.cut.local_blocks)
    documents = plan.spans[1:]  # the system text is exact: nothing stands before it
    kept, blocks, tokens = torch.arange(plan.question_start), None, 0
    if documents:
        sizes = [cut.size(span.end - span.start, shape.kv_itemsize) for span in documents]
        initial, local = (0, 0) if options.by_sentence else (options.initial_blocks, cut.local_blocks)
        blocks = Blocks.build(documents, sizes, initial=initial, local=local)
        tokens = budget(options, blocks)
        if options.by_sentence and tokens == blocks.tokens:
            blocks, tokens = None, 0
        else:
            kept = torch.arange(plan.spans[0].end)
            kept = kept if options.by_sentence else torch.cat((kept, blocks.fixed()))
    return PartialSelection(
        plan,
        kept,
        Rule.of(plan, options),
        fuse=options.update == "fusion",
        cut=cut,
        compact=options.kept_positions == "compact",
        samkv=options,
        blocks=blocks,
        budget=tokens,
    )


def budget(options: SamKvOptions, blocks: Blocks) -> int:
    """Most tokens per layer to keep besides initial and local blocks: the rest of ``keep``, or the paper's
    total / D."""
    if options.selection == "none":
        return 0
    if options.by_sentence:
        share = options.keep or (KEEP if options.top_p is None else MOST)
        return min(blocks.tokens, max(1, options.min_tokens, round(share * blocks.tokens)))
    if options.keep is None:
        return min(blocks.middle_tokens, blocks.tokens // blocks.documents)
    left = round(options.keep * blocks.tokens) - (blocks.tokens - blocks.middle_tokens)
    return max(0, min(blocks.middle_tokens, left))


@dataclass(frozen=True, eq=False)
class Chosen:
    """``kept`` int64 [S] or [layers, S] on the CPU: positions of the kept document tokens, ascending.
    ``proportion`` f32 [D]: P, for blocks. ``reason``: why so many are kept."""

    kept: torch.Tensor
    proportion: torch.Tensor | None = None
    reason: str = ""


def stable_layers(layers: int) -> range:
    """N* without calibration: the last eighth of the layers (the paper: 29 to 32 of 32, 32 to 36 of 36)."""
    return range(layers - -(-layers // 8), layers)


def choose(
    options: SamKvOptions,
    blocks: Blocks,
    analyses: Sequence[Analysis],
    query: torch.Tensor,
    question_start: int,
    rotation: Rotation,
    *,
    reduce: Callable[[torch.Tensor], torch.Tensor] = lambda part: part,
    highest: Callable[[torch.Tensor], torch.Tensor] = lambda part: part,
    stable: Sequence[int] | None = None,
    prior: torch.Tensor | None = None,
) -> Chosen:
    """Choose the blocks that each layer keeps.

    Args:
        analyses: one per document, cut as ``blocks`` are. query: f32 [layers, heads, head_dim], the
        question's, of this rank's heads, rotated to its position. The
            work runs on its device.
        reduce: sums over ranks.
        highest: takes the maximum over ranks.
        stable: layers over which P is averaged; default: :func:`stable_layers`.
        prior: f32 [D] in (0, 1], multiplies P and the pooled scores of each document's blocks; for scores
            that may be negative its logarithm is added.
    """
    layers, device = query.shape[0], query.device
    left = budget(options, blocks)
    if left == 0:
        return Chosen(blocks.fixed(), torch.zeros(blocks.documents))
    by_attention = options.scoring == "attention"
    # Attention is scored by query head; for the other scores, the sum of a query group is enough.
    queries = document_queries(options, blocks, analyses, query, question_start, rotation, reduce)
    products = block_products(queries, analyses, blocks, fold=not by_attention)
    scores = reduce(products.sum(-1))  # [layers, D, M]
    middle, size = blocks.middle.to(device), blocks.size.to(device)
    proportion = _proportion(scores, blocks, analyses, stable_layers(layers) if stable is None else stable)
    if prior is not None:
        proportion = proportion * prior.to(device)
    count = middle.sum(1)
    if options.keep is None:
        count = (proportion * count).round().to(torch.int64)
    left = min(left, int((count * size).sum()))
    ranked = scores.masked_fill(~middle, -torch.inf)
    rank = ranked.argsort(-1, descending=True).argsort(-1)
    among = middle & (rank < count[None, :, None])
    pooled = (
        highest(block_attention(products, blocks))
        if by_attention
        else _normalised(scores, middle, options.scoring)
    )
    if prior is not None:
        by_block = prior.to(device)[None, :, None]
        positive = options.scoring in ("attention", "softmax")
        pooled = pooled * by_block if positive else pooled + by_block.log()
    if options.selection == "shared":
        late = slice(len(pooled) // 2, None) if by_attention else slice(None)
        among, pooled = among.any(0, keepdim=True), pooled[late].sum(0, keepdim=True)
    kept = _take(pooled.masked_fill(~among, -torch.inf), among, blocks, left)
    return Chosen(kept.cpu() if options.selection == "layers" else kept[0].cpu(), proportion.cpu())


def _proportion(
    scores: torch.Tensor, blocks: Blocks, analyses: Sequence[Analysis], stable: Sequence[int]
) -> torch.Tensor:
    """Equations 2 and 3: P, f32 [D]."""
    device = scores.device
    middle, length = blocks.middle.to(device), blocks.length.to(device)
    layers = list(stable)
    scores = scores[layers]
    ends = (length * ~middle).float()
    anchor = (scores * ends).sum(-1) / ends.sum(-1).clamp(min=1)
    chosen = []
    for name in ("exponent", "attention"):
        padded = torch.full_like(scores, torch.inf)
        padded[:, length > 0] = (
            torch.cat([getattr(a, name) for a in analyses], dim=1)[layers].float().to(device)
        )
        chosen.append(padded.masked_fill(~middle, torch.inf).argmin(-1, keepdim=True))
    largest, smallest = (scores.gather(-1, block)[..., 0] for block in chosen)
    inside = (anchor > smallest) & (anchor <= largest) & middle.any(1)
    ratio = (largest - anchor) / (largest - smallest).where(inside, 1.0)
    return ratio.where(inside, 0.0).mean(0)


def _normalised(scores: torch.Tensor, middle: torch.Tensor, scoring: str) -> torch.Tensor:
    """Scores made comparable between documents, over the middle blocks of each."""
    if scoring == "raw":
        return scores
    if scoring == "softmax":
        return scores.masked_fill(~middle, -torch.inf).softmax(-1).nan_to_num(0.0)
    count = middle.sum(-1).clamp(min=1)
    values = scores * middle
    mean = values.sum(-1) / count
    off = (scores - mean[..., None]) * middle
    deviation = (off.square().sum(-1) / count).sqrt().clamp(min=1e-9)
    return off / deviation[..., None]


def _take(scores: torch.Tensor, among: torch.Tensor, blocks: Blocks, left: int) -> torch.Tensor:
    """Take the best blocks until ``left`` tokens, equally many in every layer; of a block that does not fit,
    its first tokens.

    ``scores`` and ``among`` [L, D, M]. Returns positions int64 [L, S], initial and local blocks included."""
    device = scores.device
    order = scores.flatten(1).argsort(dim=-1, descending=True, stable=True)
    tokens = (blocks.length.to(device) * among).flatten(1).gather(1, order)
    before = tokens.cumsum(1) - tokens
    taken = torch.zeros_like(tokens).scatter(1, order, (left - before).clamp(min=0).minimum(tokens))
    block, offset = blocks.token_block.to(device), blocks.token_offset.to(device)
    mask = (offset < taken[:, block]) | ~blocks.middle.to(device).flatten()[block]
    return blocks.first + mask.nonzero()[:, 1].view(len(mask), -1)
