"""The rules: what they may look at, and which tokens they choose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from examples.reuse_rules.questions import Prompt

LONGEST = 64  # tokens of a sentence


@dataclass
class Seen:
    """What a rule may look at. N: tokens of system and documents. ``oracle`` holds what only the full prefill knows."""

    prompt: Prompt
    sv: torch.Tensor  # [contexts, layers, N] squared deviation of values behind foreign contexts
    sk: torch.Tensor  # the same of keys
    mass: torch.Tensor  # [contexts, layers, heads, N] attention to them
    norm: torch.Tensor  # [layers, N] squared norm of the values
    attention: torch.Tensor  # [layers, heads, question tokens, N] the question's attention over the reused KV
    offset: torch.Tensor  # [N] index of a token within its document
    oracle: dict[str, torch.Tensor]
    relevance: torch.Tensor | None = None  # [N], see `last`; a two-stage rule replaces it

    @property
    def static(self) -> torch.Tensor:
        return self.sv[:2].mean(0).sum(0)

    @property
    def last(self) -> torch.Tensor:
        """[N] attention of the last question token, mean over heads, summed over layers."""
        return self.attention[:, :, -1].mean(1).sum(0)

    @property
    def groups(self) -> torch.Tensor:
        """[N] number of a token's document."""
        return self.prompt.segment[: self.prompt.question]

    @property
    def sentences(self) -> torch.Tensor:
        """[N] number of a token's sentence; sentences end with a full stop or a line break and never cross documents.

        One longer than LONGEST tokens is cut into pieces of that length.
        """
        ids = self.prompt.ids[: self.prompt.question]
        ends = torch.isin(ids, self.prompt.stops)
        starts = torch.cat((ends.new_zeros(1), ends[:-1])) | (self.offset == 0)
        steps = torch.arange(len(ids), device=ids.device)
        starts |= (steps - torch.where(starts, steps, 0).cummax(0).values) % LONGEST == 0
        return starts.long().cumsum(0)

    @property
    def openings(self) -> torch.Tensor:
        """[N] whether a token is in its document's first sentence: a title line where there is one."""
        sentences = self.sentences
        return torch.isin(sentences, sentences[self.offset == 0])


Rule = Callable[[Seen], torch.Tensor]


def pool(x: torch.Tensor, width: int, kind: str = "mean") -> torch.Tensor:
    """Mean or maximum over ``width`` tokens to each side."""
    w, x = 2 * width + 1, x[None, None]
    if kind == "max":
        return torch.nn.functional.max_pool1d(x, w, 1, width)[0, 0]
    return torch.nn.functional.avg_pool1d(x, w, 1, width)[0, 0]


def over(x: torch.Tensor, groups: torch.Tensor, kind: str) -> torch.Tensor:
    """Sum, mean or maximum of x [N] over groups, given back to every member."""
    out = torch.zeros(int(groups.max()) + 1, device=x.device)
    kind = {"sum": "sum", "mean": "mean", "max": "amax"}[kind]
    return out.scatter_reduce(0, groups, x, kind, include_self=False)[groups]


def rank(x: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Negative rank of a token within its group as a share of the group: choosing by it is an equal share of every group."""
    same = groups[:, None] == groups[None]
    return -((x[None] > x[:, None]) & same).sum(1) / same.sum(1)


def sink_free(s: Seen) -> torch.Tensor:
    """The last question token's attention without each document's first three tokens, where models park attention."""
    return s.last * (s.offset > 2)


def late(s: Seen) -> torch.Tensor:
    a = s.attention[s.attention.shape[0] // 2 :]
    return a[:, :, -1].amax(1).sum(0) * (s.offset > 2)


def everyone(s: Seen) -> torch.Tensor:
    """All question tokens, the strongest head of each layer."""
    return s.attention.amax(1).sum((0, 1)) * (s.offset > 2)


def titled(score: torch.Tensor, s: Seen) -> torch.Tensor:
    """A sentence's score also for the first eight tokens of its document: the title says that it goes on where another one ended."""
    return torch.maximum(score, 0.999 * over(score, s.groups, "max") * (s.offset < 8))


SIGNALS: dict[str, Rule] = {  # how much a token depends on what stands before its document
    "v": lambda s: s.static,
    "framed": lambda s: s.sv[2:4].mean(0).sum(0),  # with --foreign: the same texts as the documents of a prompt
    "likely": lambda s: s.sv[4:6].mean(0).sum(0),  # with --foreign: other documents of the same kind
    "other": lambda s: s.sv[6:8].mean(0).sum(0),  # with --foreign: documents of other kinds
    "k": lambda s: s.sk[:2].mean(0).sum(0),
    "framed-k": lambda s: s.sk[2:4].mean(0).sum(0),
    "none": lambda s: torch.ones_like(s.last),
}


def linked(s: Seen, sentences: torch.Tensor, openings: torch.Tensor, kind: str) -> torch.Tensor:
    """What the question looks at: each sentence's largest attention, and for a document's opening also the document's.

    "Continued", "Part 2" or "It ..." say that a document goes on where another one ended: what it holds needs them. ``kind``: `full`
    gives the opening all of the document's, `quarter` a quarter, `sharp` less the further the document is from the best one.
    """
    own, document = over(late(s), sentences, "max"), over(late(s), s.groups, "max")
    factor = {"plain": 0.0, "quarter": 0.25, "full": 1.0, "sharp": document / document.max()}[kind]
    return torch.where(openings, torch.maximum(own, factor * document), own)


def sentences(signal: str, kind: str, power: float) -> Rule:
    """Sentences that depend on what stands before their document and that the question looks at."""
    return lambda s: in_order(over(SIGNALS[signal](s), s.sentences, "mean") * linked(s, s.sentences, s.openings, kind).pow(power))


def spans(s: Seen, width: int) -> torch.Tensor:
    """Spans of ``width`` tokens instead of sentences: what is left without punctuation."""
    number = (s.offset % width == 0).long().cumsum(0)
    return in_order(over(s.static, number, "mean") * linked(s, number, s.offset < width, "sharp"))


def in_order(score: torch.Tensor) -> torch.Tensor:
    """Negative rank, equal scores in the order of the text."""
    order = score.argsort(descending=True, stable=True)
    return -torch.empty_like(score).scatter_(0, order, torch.arange(len(score), device=score.device).to(score.dtype))


RULES: dict[str, Rule] = {
    **{
        f"{signal}_{kind}_{name}": sentences(signal, kind, power)
        for signal in SIGNALS
        for kind in ("plain", "quarter", "sharp", "full")
        for name, power in (("root", 0.5), ("linear", 1.0))
    },
    "framed_spans16": lambda s: spans(replace(s, sv=s.sv[2:]), 16),
    "framed_spans32": lambda s: spans(replace(s, sv=s.sv[2:]), 32),
    "spans16": lambda s: spans(s, 16),
    "spans32": lambda s: spans(s, 32),
    "random": lambda s: torch.rand(len(s.norm[0]), generator=torch.Generator().manual_seed(len(s.norm[0]))).to(s.norm.device),
    "epic": lambda s: -s.offset.float(),
    "cacheblend": lambda s: s.oracle["v"][1],  # exact: layer 0 of every token runs with the true context (2 of the layers' cost)
    "oracle": lambda s: s.oracle["v"].sum(0),
    "oracle_kv": lambda s: (s.oracle["v"] / s.norm.mean(1, True) + s.oracle["k"] / s.oracle["knorm"]).sum(0),
    "oracle_gradient": lambda s: s.oracle["gradient"],
    "oracle_gradient_w4": lambda s: pool(s.oracle["gradient"], 4),
    "oracle_x_last16": lambda s: s.oracle["v"].sum(0) * pool(s.last, 16),
    "oracle_x_full16": lambda s: s.oracle["v"].sum(0) * pool(s.oracle["last"] * (s.offset > 2), 16),
    "static": lambda s: s.static,
    "static_c0": lambda s: s.sv[0].sum(0),
    "static_c1": lambda s: s.sv[1].sum(0),
    "static_c2": lambda s: s.sv[2].sum(0),
    "static_c3": lambda s: s.sv[3].sum(0),
    "static_c4": lambda s: s.sv[4].sum(0),
    "static_all": lambda s: s.sv.mean(0).sum(0),
    "static_all_max": lambda s: s.sv.sum(1).amax(0),
    "static_rel": lambda s: (s.sv.mean(0) / s.norm).sum(0),
    "static_layernorm": lambda s: (s.sv.mean(0) / s.norm.mean(1, True)).sum(0),
    "static_sqrt": lambda s: s.sv.mean(0).sqrt().sum(0),
    "static_early": lambda s: s.sv.mean(0)[:4].sum(0),
    "static_mid": lambda s: s.sv.mean(0)[3:7].sum(0),
    "static_late": lambda s: s.sv.mean(0)[6:].sum(0),
    "static_k": lambda s: s.sk.mean(0).sum(0),
    "static_kv": lambda s: (s.sv.mean(0) / s.norm.mean(1, True) + s.sk.mean(0) / s.oracle["knorm"]).sum(0),
    "mass_mean": lambda s: s.mass.mean((0, 2)).sum(0),
    "mass_max": lambda s: s.mass.mean(0).amax(1).sum(0),
    "static_quota": lambda s: rank(s.sv.mean(0).sum(0), s.groups),
    "static_w1": lambda s: pool(s.static, 1, "max") + 0.01 * s.static,
    "static_w3": lambda s: pool(s.static, 3),
    "static_w8": lambda s: pool(s.static, 8),
    "static_sentence": lambda s: over(s.static, s.sentences, "mean"),
    "static_sentence_max": lambda s: over(s.static, s.sentences, "max") + 1e-3 * s.static,
    "last": lambda s: s.last,
    "last_w8": lambda s: pool(sink_free(s), 8),
    "last_sentence": lambda s: over(sink_free(s), s.sentences, "sum"),
    "late_sentence": lambda s: over(late(s), s.sentences, "max"),
    "static_x_document": lambda s: s.static * over(s.last, s.groups, "sum"),
    "static_x_last": lambda s: s.static * s.last,
    "static_x_last16": lambda s: s.static * pool(sink_free(s), 16),
    "static_x_last16_half": lambda s: s.static * pool(sink_free(s), 16).sqrt(),
    "static_x_last32": lambda s: s.static * pool(sink_free(s), 32),
    "static_x_late16": lambda s: s.static * pool(late(s), 16),
    "static_x_late16_half": lambda s: s.static * pool(late(s), 16).sqrt(),
    "static_x_late_document": lambda s: s.static * over(late(s), s.groups, "max"),
    "static_x_sentence": lambda s: s.static * over(sink_free(s), s.sentences, "sum"),
    "static_x_late_sentence": lambda s: s.static * over(late(s), s.sentences, "max"),
    "static_x_everyone16": lambda s: s.static * pool(everyone(s), 16),
    "static_x_everyone_sentence": lambda s: s.static * over(everyone(s), s.sentences, "max"),
    "sentence_product": lambda s: over(s.static, s.sentences, "mean") * over(sink_free(s), s.sentences, "sum"),
    "sentence_product_late": lambda s: over(s.static, s.sentences, "mean") * over(late(s), s.sentences, "max"),
    "sentence_product_half": lambda s: over(s.static, s.sentences, "mean") * over(late(s), s.sentences, "max").sqrt(),
    "sentence_product_everyone": lambda s: over(s.static, s.sentences, "mean") * over(everyone(s), s.sentences, "max"),
    "sentence_mass_late": lambda s: over(s.mass.mean((0, 2)).sum(0), s.sentences, "mean") * over(late(s), s.sentences, "max"),
    "title_sentence": lambda s: titled(over(late(s), s.sentences, "max"), s),
    "title_sentence_product": lambda s: titled(over(s.static, s.sentences, "mean") * over(late(s), s.sentences, "max"), s),
    "document_late": lambda s: over(late(s), s.groups, "max") + 1e-3 * over(late(s), s.sentences, "max"),
    "static_title_x_late_sentence": lambda s: (
        s.static * torch.maximum(over(late(s), s.sentences, "max"), over(late(s), s.groups, "max") * (s.offset < 8))
    ),
}


def choose(score: torch.Tensor, documents: torch.Tensor, count: int) -> torch.Tensor:
    """Positions of the ``count`` document tokens with the highest score, ascending."""
    return score.masked_fill(~documents, -torch.inf).topk(count).indices.sort().values


# name -> (rule of the first stage, its part of the budget, rule of the second, which sees the question's attention after the repair)
STAGED: dict[str, tuple[str, float, str]] = {
    "staged_static_4": ("static", 0.25, "static_x_late16"),
    "staged_static_2": ("static", 0.5, "static_x_late16"),
    "staged_sentence_4": ("static_x_late16_half", 0.25, "static_x_late16"),
    "staged_sentence_3": ("static_x_late_sentence", 0.33, "static_x_late_sentence"),
    "staged_product": ("static_sentence", 0.33, "sentence_product_late"),
}
