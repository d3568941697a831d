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
from sglang_ext.context.rope import Rotation
from sglang_ext.context.selection import sentences
from sglang_ext.context.selection.base import ModelShape, PartialSelection
from sglang_ext.context.selection.blocks import Blocks
from sglang_ext.context.selection.recompute_rules import Rule
from sglang_ext.protocol import ContextPlan
from sglang_ext.request_options import SamKvOptions

KEEP = 0.15  # default share of the document tokens, for sentences
_CHUNK_BYTES = 256 * 2**20  # of mean keys in float32 at a time


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
            kept = torch.cat((torch.arange(plan.spans[0].end), blocks.fixed()))
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
        share = KEEP if options.keep is None else options.keep
        return min(blocks.tokens, max(1, options.min_tokens, round(share * blocks.tokens)))
    if options.keep is None:
        return min(blocks.middle_tokens, blocks.tokens // blocks.documents)
    left = round(options.keep * blocks.tokens) - (blocks.tokens - blocks.middle_tokens)
    return max(0, min(blocks.middle_tokens, left))


@dataclass(frozen=True, eq=False)
class Chosen:
    """``kept`` int64 [S] or [layers, S] on the CPU: positions of the kept document tokens, ascending.
    ``proportion`` f32 [D]: P."""

    kept: torch.Tensor
    proportion: torch.Tensor


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
) -> Chosen:
    """Choose the blocks that each layer keeps.

    Args:
        analyses: one per document, cut as ``blocks`` are. query: f32 [layers, heads, head_dim], the
        question's, of this rank's heads, rotated to its position. The
            work runs on its device.
        reduce: sums over ranks.
        highest: takes the maximum over ranks.
        stable: layers over which P is averaged; default: :func:`stable_layers`.
    """
    layers, device = query.shape[0], query.device
    left = budget(options, blocks)
    if left == 0:
        return Chosen(blocks.fixed(), torch.zeros(blocks.documents))
    by_attention = options.scoring == "attention"
    # Attention is scored by query head; for the other scores, the sum of a query group is enough.
    queries = _queries(options, blocks, analyses, query, question_start, rotation, reduce)
    products = _products(queries, analyses, blocks, fold=not by_attention)
    scores = reduce(products.sum(-1))  # [layers, D, M]
    middle, size = blocks.middle.to(device), blocks.size.to(device)
    proportion = _proportion(scores, blocks, analyses, stable_layers(layers) if stable is None else stable)
    count = middle.sum(1)
    if options.keep is None:
        count = (proportion * count).round().to(torch.int64)
    left = min(left, int((count * size).sum()))
    ranked = scores.masked_fill(~middle, -torch.inf)
    rank = ranked.argsort(-1, descending=True).argsort(-1)
    among = middle & (rank < count[None, :, None])
    pooled = (
        highest(_block_attention(products, blocks))
        if by_attention
        else _normalised(scores, middle, options.scoring)
    )
    if options.selection == "shared":
        late = slice(len(pooled) // 2, None) if by_attention else slice(None)
        among, pooled = among.any(0, keepdim=True), pooled[late].sum(0, keepdim=True)
    kept = _take(pooled.masked_fill(~among, -torch.inf), among, blocks, left)
    return Chosen(kept.cpu() if options.selection == "layers" else kept[0].cpu(), proportion.cpu())


def choose_sentences(
    options: SamKvOptions,
    blocks: Blocks,
    analyses: Sequence[Analysis],
    query: torch.Tensor | None,
    question_start: int,
    rotation: Rotation,
    ids: torch.Tensor,
    question: torch.Tensor,
    *,
    reduce: Callable[[torch.Tensor], torch.Tensor] = lambda part: part,
    highest: Callable[[torch.Tensor], torch.Tensor] = lambda part: part,
) -> torch.Tensor:
    """Choose the sentences that every layer keeps: positions as `Chosen.kept`. All ranks choose the same.

    ``ids`` int64 [N]: the documents' token ids; ``question`` int64: those of the question that carry meaning.
    ``query`` is None where words alone count. Other arguments as in :func:`choose`."""
    tuned = options.experimental
    sentence, first = sentences.number_sentences(analyses)
    lexical = sentences.lexical_scores(ids, sentence, question) if tuned.lexical_weight else None
    attention = None
    if query is not None:
        queries = _queries(options, blocks, analyses, query, question_start, rotation, reduce)
        if options.scoring == "keys":
            token = reduce(sentences.head_attention(queries, analyses)).cpu()
        else:
            share = highest(_block_attention(_products(queries, analyses, blocks, fold=False), blocks))
            token = share[len(share) // 2 :].sum(0).flatten().cpu()[blocks.token_block]
        attention = sentences.max_per_sentence(token, sentence)
    score = sentences.blend(lexical, attention, tuned.lexical_weight, tuned.attention_power)
    score = sentences.penalize_length(score, sentence, tuned.length_penalty)
    score = sentences.lift_titles(score, sentence, first, tuned.title_weight)
    return blocks.first + sentences.take_best(score, sentence, budget(options, blocks))


def _queries(
    options: SamKvOptions,
    blocks: Blocks,
    analyses: Sequence[Analysis],
    query: torch.Tensor,
    question_start: int,
    rotation: Rotation,
    reduce: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Each document's query, f32 [layers, D, heads, head_dim], rotated to where the document's keys are
    stored."""
    shifts = blocks.start[:, 0]
    if options.score_positions == "adjacent":  # every document right before the question
        shifts = question_start - blocks.length.sum(1)
    shifts = shifts.to(query.device)
    queries = (
        personalised(query, analyses, shifts, rotation, reduce)
        if options.personalised
        else query[:, None].expand(-1, len(shifts), -1, -1)
    )
    return _moved(queries, -shifts, rotation)


def personalised(
    query: torch.Tensor,
    analyses: Sequence[Analysis],
    shifts: torch.Tensor,
    rotation: Rotation,
    reduce: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Equation 1: f32 [layers, D, heads, head_dim]. The cosine takes all heads of all ranks as one vector."""
    documents = len(analyses)
    if documents == 1:
        return query[:, None]
    local = torch.stack([a.local_q.to(query.device) for a in analyses], dim=1).float()
    local = (
        local * torch.stack([a.local_q_scale.to(query.device) for a in analyses], dim=1).float()[..., None]
    )
    local = _moved(local, shifts, rotation)
    whole = query[:, None].expand_as(local)
    parts = reduce(
        torch.stack([(a * b).sum((-1, -2)) for a, b in ((whole, local), (whole, whole), (local, local))])
    )
    weight = (parts[0] / (parts[1] * parts[2]).sqrt().clamp(min=1e-12)).abs()
    biased = weight[..., None, None] * local
    return query[:, None] + (biased.sum(1, keepdim=True) - biased) / (documents - 1)


def _moved(queries: torch.Tensor, shifts: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """[layers, D, heads, head_dim] rotated by each document's shift."""
    flat = queries.flatten(0, 1)
    return rotation.rotate(flat, shifts.repeat(queries.shape[0])).view_as(queries)


def _products(
    queries: torch.Tensor, analyses: Sequence[Analysis], blocks: Blocks, *, fold: bool
) -> torch.Tensor:
    """<q_i, mean K> / sqrt(head_dim): f32 [layers, D, M, heads], or [layers, D, M, kv_heads] summed over
    query groups (``fold``). 0 where there is no block."""
    layers, documents, heads, dim = queries.shape
    kv_heads = analyses[0].mean_k.shape[2]
    grouped = queries.unflatten(2, (kv_heads, heads // kv_heads))
    if fold:
        grouped = grouped.sum(3, keepdim=True)
    counts = torch.tensor([analysis.blocks for analysis in analyses])
    document = torch.repeat_interleave(torch.arange(documents), counts).to(queries.device)
    keys = torch.cat([a.mean_k.to(queries.device) for a in analyses], dim=1)
    scale = torch.cat([a.mean_k_scale.to(queries.device) for a in analyses], dim=1)
    step = max(1, _CHUNK_BYTES // (4 * len(document) * grouped.shape[2] * grouped.shape[3] * dim))
    found = []
    for at in range(0, layers, step):
        rows = slice(at, min(at + step, layers))
        # [rows, blocks, kv_heads, group]
        products = (keys[rows].float()[:, :, :, None] * grouped[rows][:, document]).sum(-1)
        found.append((products * scale[rows].float()[..., None]).flatten(2))
    flat = torch.cat(found) / dim**0.5
    padded = torch.zeros(layers, documents, blocks.start.shape[1], flat.shape[-1], device=queries.device)
    padded[:, (blocks.length > 0).to(queries.device)] = flat
    return padded


def _block_attention(products: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """f32 [layers, D, M]: largest share of attention that a head gives a block, with every key of a block
    taken as its mean; softmax over all blocks."""
    length = blocks.length.to(products.device)
    logits = products + length.float().log()[..., None]  # -inf where there is no block
    return logits.flatten(1, 2).softmax(1).amax(-1).view(products.shape[:-1])


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
