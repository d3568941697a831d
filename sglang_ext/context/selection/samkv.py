"""SamKV's selection (METHODS, section 1; the paper's sections 3.1 and 3.2): from the question's queries and
the documents' summaries to the tokens that each layer keeps. No K or V of any document is read. Batched over
documents and layers.

Equations, per layer n and document i of D:

    q_i  = q + 1/(D-1) * sum_{j != i} |cos(q, loc_j)| loc_j                      (1) personalised query s_b  =
    <q_i, mean K of block b> / sqrt(head_dim), both at their places in the prompt, summed over heads P_i  =
    mean over stable layers of (s_max - s_anc) / (s_max - s_min) where s_min < s_anc <= s_max, else 0     (2),
    (3)

anc is the mean K of initial and local blocks, max the middle block with the smallest exponent, min the one
with the least attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from sglang_ext.analysis.document_analysis import Analysis
from sglang_ext.context.rope import Rotation
from sglang_ext.context.selection import sentences
from sglang_ext.context.selection.blocks import Blocks

Scope = Literal["sentences", "shared", "layers", "none"]
Scoring = Literal["keys", "attention", "zscore", "softmax", "raw"]
Ask = Literal["mean", "last"]
Positions = Literal["full", "near"]
# The first of each is the default: README.md has the measurements.
SCOPES: tuple[Scope, ...] = ("sentences", "shared", "layers", "none")
SCORINGS: tuple[Scoring, ...] = ("attention", "zscore", "softmax", "raw")
SENTENCE_SCORINGS: tuple[Scoring, ...] = ("keys", "attention")
ASKS: tuple[Ask, ...] = ("last", "mean")
POSITIONS: tuple[Positions, ...] = ("full", "near")
KEEP, WORDS, OPENINGS, SHARPNESS, LENGTH = 0.15, 0.3, 0.6, 0.5, 0.5  # of `sentences`
LEAST = 1024  # tokens: so few cost next to nothing, and a share of them answers less
_CHUNK_BYTES = 256 * 2**20  # of mean keys in float32 at a time


@dataclass(frozen=True)
class SamKv:
    """Options of the method; README.md says what each does."""

    initial_blocks: int = 1
    scope: Scope = "sentences"
    personalised: bool = False
    scoring: Scoring = "keys"
    positions: Positions = "full"
    ask: Ask = "last"
    keep: float | None = None
    words: float = WORDS
    openings: float = OPENINGS
    sharpness: float = SHARPNESS
    length: float = LENGTH
    least: int = 0

    @property
    def by_sentence(self) -> bool:
        """Whether sentences are chosen, from all tokens, instead of blocks between initial and local ones."""
        return self.scope == "sentences"

    @property
    def asks(self) -> bool:
        """Whether it looks at the question's queries."""
        return not (self.scope == "none" or (self.by_sentence and self.words == 1))

    def budget(self, blocks: Blocks) -> int:
        """Most tokens that a layer keeps beside initial and local blocks: what ``keep`` leaves for them, or
        the paper's total / D.
        """
        if self.scope == "none":
            return 0
        if self.by_sentence:
            return min(
                blocks.tokens,
                max(1, self.least, round((KEEP if self.keep is None else self.keep) * blocks.tokens)),
            )
        if self.keep is None:
            return min(blocks.middle_tokens, blocks.tokens // blocks.documents)
        return max(
            0,
            min(
                blocks.middle_tokens,
                round(self.keep * blocks.tokens) - (blocks.tokens - blocks.middle_tokens),
            ),
        )


@dataclass(frozen=True, eq=False)
class Chosen:
    """``kept`` int64 [S] or [layers, S] on the CPU: positions of the kept document tokens, ascending.
    ``proportion`` f32 [D]: P.
    """

    kept: torch.Tensor
    proportion: torch.Tensor


def stable_layers(layers: int) -> range:
    """N* where no calibration says otherwise: the last eighth (the paper's models: layers 29 to 32 of 32, 32
    to 36 of 36).
    """
    return range(layers - -(-layers // 8), layers)


def choose(
    options: SamKv,
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
    """What each layer keeps.

    ``query`` f32 [layers, heads, head_dim]: the question's mean query, of this rank's heads, rotated for its
    place; the work runs on its device. ``analyses``: one a document, cut as ``blocks`` are. ``reduce`` sums
    over ranks, ``highest`` takes their maximum."""
    layers, device = query.shape[0], query.device
    budget = options.budget(blocks)
    if budget == 0:
        return Chosen(blocks.fixed(), torch.zeros(blocks.documents))
    # By head only where heads are looked at one by one: otherwise a KV head serves the sum of its query
    # group.
    queries = _queries(options, blocks, analyses, query, question_start, rotation, reduce)
    products = _products(queries, analyses, blocks, fold=options.scoring != "attention")
    scores = reduce(products.sum(-1))  # [layers, D, M]
    middle, size = blocks.middle.to(device), blocks.size.to(device)
    proportion = _proportion(scores, blocks, analyses, stable_layers(layers) if stable is None else stable)
    count = middle.sum(1)
    if options.keep is None:
        count = (proportion * count).round().to(torch.int64)
    budget = min(budget, int((count * size).sum()))
    ranked = scores.masked_fill(~middle, -torch.inf)
    rank = ranked.argsort(-1, descending=True).argsort(-1)
    among = middle & (rank < count[None, :, None])
    pooled = (
        highest(_attention(products, blocks))
        if options.scoring == "attention"
        else _normalised(scores, middle, options.scoring)
    )
    if options.scope == "shared":
        late = slice(len(pooled) // 2, None) if options.scoring == "attention" else slice(None)
        among, pooled = among.any(0, keepdim=True), pooled[late].sum(0, keepdim=True)
    kept = _take(pooled.masked_fill(~among, -torch.inf), among, blocks, budget)
    return Chosen(kept.cpu() if options.scope == "layers" else kept[0].cpu(), proportion.cpu())


def choose_sentences(
    options: SamKv,
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
    """What every layer keeps with scope `sentences`, as in `Chosen`; further arguments as in :func:`choose`.

    ``ids`` int64 [N]: the documents' tokens; ``question`` int64: those of the question whose occurrence says
    something. ``query`` is None where only words count. All ranks choose the same."""
    lengths = torch.tensor([analysis.n_tokens for analysis in analyses])
    first = lengths.cumsum(0) - lengths
    sentence = sentences.numbered(torch.cat([analysis.begins for analysis in analyses]), first)
    held = sentences.words(ids, sentence, question) if options.words else None
    attention = None
    if query is not None:
        queries = _queries(options, blocks, analyses, query, question_start, rotation, reduce)
        if options.scoring == "keys":
            found = reduce(sentences.looked_at(queries, analyses)).cpu()
        else:
            share = highest(_attention(_products(queries, analyses, blocks, fold=False), blocks))
            found = share[len(share) // 2 :].sum(0).flatten().cpu()[blocks.token_block]
        attention = sentences.largest(found, sentence)
    score = sentences.by_length(
        sentences.scores(held, attention, options.words, options.sharpness), sentence, options.length
    )
    score = sentences.opened(score, sentence, first, options.openings)
    return blocks.first + sentences.best(score, sentence, options.budget(blocks))


def _queries(
    options: SamKv,
    blocks: Blocks,
    analyses: Sequence[Analysis],
    query: torch.Tensor,
    question_start: int,
    rotation: Rotation,
    reduce: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Each document's query, f32 [layers, D, heads, head_dim], moved so that it meets the keys where they are
    stored.
    """
    shifts = blocks.start[:, 0]
    if options.positions == "near":  # every document as if it stood right before the question
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
    """Equation 1: f32 [layers, D, heads, head_dim]. The cosine is that of whole layers, all heads of all
    ranks as one vector.
    """
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
    """<q_i, mean K> / sqrt(head_dim), f32 [layers, D, M, heads], or summed over query groups (``fold``)
    [layers, D, M, kv_heads]; 0 where there is no block."""
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
        products = (keys[rows].float()[:, :, :, None] * grouped[rows][:, document]).sum(
            -1
        )  # [rows, blocks, kv_heads, group]
        found.append((products * scale[rows].float()[..., None]).flatten(2))
    flat = torch.cat(found) / dim**0.5
    padded = torch.zeros(layers, documents, blocks.start.shape[1], flat.shape[-1], device=queries.device)
    padded[:, (blocks.length > 0).to(queries.device)] = flat
    return padded


def _attention(products: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """f32 [layers, D, M]: the largest share that a head would give a block, were all its keys their mean;
    softmax over all blocks.
    """
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
    largest, least = (scores.gather(-1, block)[..., 0] for block in chosen)
    inside = (anchor > least) & (anchor <= largest) & middle.any(1)
    ratio = (largest - anchor) / (largest - least).where(inside, 1.0)
    return ratio.where(inside, 0.0).mean(0)


def _normalised(scores: torch.Tensor, middle: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """Scores made comparable between documents, over each document's middle blocks."""
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


def _take(scores: torch.Tensor, among: torch.Tensor, blocks: Blocks, budget: int) -> torch.Tensor:
    """The best blocks of the pool until ``budget`` tokens, in every layer as many: the last block's first
    tokens where it does not fit.

    scores and among [L, D, M]; returns positions int64 [L, S] with the fixed tokens.
    """
    device = scores.device
    order = scores.flatten(1).argsort(dim=-1, descending=True, stable=True)
    tokens = (blocks.length.to(device) * among).flatten(1).gather(1, order)
    before = tokens.cumsum(1) - tokens
    taken = torch.zeros_like(tokens).scatter(1, order, (budget - before).clamp(min=0).minimum(tokens))
    block, offset = blocks.token_block.to(device), blocks.token_offset.to(device)
    mask = (offset < taken[:, block]) | ~blocks.middle.to(device).flatten()[block]
    return blocks.first + mask.nonzero()[:, 1].view(len(mask), -1)
