"""Which tokens of reused documents must be computed again? Rules for choosing them, compared at equal shares.

    python examples/reuse_rules.py MODEL DATA_DIR OUT.json --sets crossdoc mid_crossdoc --n 200 --rules concat static oracle --shares 2 5 10

No engine: a plain Llama in float32 that does what the composition path does. Every document's K and V are computed alone and moved to its
place in the prompt; the chosen tokens then run through the model again behind everything that stands before them, and write their new K
and V; the question is computed over the result. A question counts as right when every token of the gold answer and its end is the most
likely one under teacher forcing, which is the same as greedy decoding giving exactly these tokens.

Rules may use what is stored with a document at ingestion (passes of the document behind foreign texts, which know nothing of the query)
and the question's attention over the reused KV (one more pass, of the question's tokens alone). Rules whose names start with `oracle` use
the full prefill and only show what is possible; `cacheblend` sees the exact values of layer 1.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

SYSTEM = "<|bos|><|system|>\nAnswer the question from the documents.\n"
PAIRS = 200_000_000  # rows x keys of one batched pass: bounds the memory of its mask


# ---------------------------------------------------------------- model


@dataclass
class Cache:
    """K before rotation and V, each [layers, batch, kv_heads, tokens, head_dim]."""

    k: torch.Tensor
    v: torch.Tensor


class Llama:
    """The decoder in plain torch, float32: rows of tokens over given K and V."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.device, self.layers, self.heads = device, config["num_hidden_layers"], config["num_attention_heads"]
        self.kv_heads, self.dim, self.eps = config["num_key_value_heads"], config["head_dim"], config["rms_norm_eps"]
        self.w = {name: tensor.float().to(device) for name, tensor in load_file(folder / "model.safetensors").items()}
        steps = torch.arange(0, self.dim, 2, device=device).float() / self.dim
        self.frequencies = 1.0 / (config["rope_theta"] ** steps)

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [batch, heads, tokens, head_dim], positions [batch or 1, tokens]."""
        angle = positions[:, None, :, None].float() * self.frequencies
        cos, sin = torch.cat((angle.cos(),) * 2, -1), torch.cat((angle.sin(),) * 2, -1)
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    def project(self, layer: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [B, heads, R, d], k and v [B, kv_heads, R, d] of hidden [B, R, width]; not rotated."""
        p = f"model.layers.{layer}."
        x = rms_norm(hidden, hidden.shape[-1:], self.w[p + "input_layernorm.weight"], self.eps)
        q, k, v = (linear(x, self.w[f"{p}self_attn.{n}_proj.weight"]).unflatten(-1, (-1, self.dim)).transpose(1, 2) for n in "qkv")
        return q, k, v

    def finish(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        p = f"model.layers.{layer}."
        hidden = hidden + linear(attended.transpose(1, 2).flatten(2), self.w[p + "self_attn.o_proj.weight"])
        x = rms_norm(hidden, hidden.shape[-1:], self.w[p + "post_attention_layernorm.weight"], self.eps)
        gate = silu(linear(x, self.w[p + "mlp.gate_proj.weight"])) * linear(x, self.w[p + "mlp.up_proj.weight"])
        return hidden + linear(gate, self.w[p + "mlp.down_proj.weight"])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        embedding = self.w["model.embed_tokens.weight"]
        return linear(rms_norm(hidden, hidden.shape[-1:], self.w["model.norm.weight"], self.eps), embedding)

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(self.heads // self.kv_heads, 1)

    def prefill(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        past: Cache | None = None,
        past_positions: torch.Tensor | None = None,
        share: list[torch.Tensor] | None = None,
    ) -> Cache:
        """Tokens ids, positions [B, R] behind ``past`` (batch 1, the same for all; None: nothing). Their own K and V.

        ``share`` receives for each layer what part of every head's attention goes to ``past``, [B, heads, R].
        """
        hidden = self.w["model.embed_tokens.weight"][ids]
        n = 0 if past is None else past.v.shape[3]
        rows, batch = ids.shape[1], ids.shape[0]
        mask = torch.ones(rows, n + rows, dtype=torch.bool, device=self.device).tril(n)
        keys, values = [], []
        for layer in range(self.layers):
            q, k, v = self.project(layer, hidden)
            keys.append(k)
            values.append(v)
            q, k = self.rotate(q, positions), self.rotate(k, positions)
            if past is not None and past_positions is not None:
                old = self.rotate(past.k[layer], past_positions)
                k = torch.cat((old.expand(batch, -1, -1, -1), k), 2)
                v = torch.cat((past.v[layer].expand(batch, -1, -1, -1), v), 2)
            if share is not None:
                score = (q @ self.wide(k).transpose(-1, -2)) / math.sqrt(self.dim)
                share.append(score.masked_fill_(~mask, -torch.inf).softmax(-1)[..., :n].sum(-1))
            attended = scaled_dot_product_attention(q, self.wide(k), self.wide(v), attn_mask=mask)
            hidden = self.finish(layer, hidden, attended)
        return Cache(torch.stack(keys), torch.stack(values))

    def rows(
        self, ids: torch.Tensor, where: torch.Tensor, cache: Cache, *, weights: bool = False, written: list[Cache] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the rows at positions ``where`` [B, R] again over ``cache`` (batch 1), each after everything before it.

        ids [T]: the whole prompt. Returns hidden [B, R, width] and, if asked, attention [layers, B, heads, R, T]. ``written`` receives
        the rows' own K and V.
        """
        hidden = self.w["model.embed_tokens.weight"][ids[where]]
        batch, total = len(where), cache.v.shape[3]
        everywhere = torch.arange(total, device=self.device)
        mask = (everywhere[None, None] <= where[:, :, None])[:, None]
        place = where[:, None, :, None].expand(-1, self.kv_heads, -1, self.dim)
        seen, new_k, new_v = [], [], []
        for layer in range(self.layers):
            q, k, v = self.project(layer, hidden)
            if written is not None:
                new_k.append(k)
                new_v.append(v)
            q, k = self.rotate(q, where), self.rotate(k, where)
            old = self.rotate(cache.k[layer], everywhere[None])
            k_all = old.expand(batch, -1, -1, -1).scatter(2, place, k)
            v_all = cache.v[layer].expand(batch, -1, -1, -1).scatter(2, place, v)
            if weights:
                score = (q @ self.wide(k_all).transpose(-1, -2)) / math.sqrt(self.dim)
                score = score.masked_fill(~mask, -torch.inf).softmax(-1)
                seen.append(score)
                attended = score @ self.wide(v_all)
            else:
                attended = scaled_dot_product_attention(q, self.wide(k_all), self.wide(v_all), attn_mask=mask)
            hidden = self.finish(layer, hidden, attended)
        if written is not None:
            written.append(Cache(torch.stack(new_k), torch.stack(new_v)))
        return hidden, torch.stack(seen) if weights else None


# ---------------------------------------------------------------- questions


@dataclass
class Prompt:
    """ids [T] of system, documents, question and gold answer; ``segment`` [T]: 0 system, 1.. documents, -1 question and answer."""

    ids: torch.Tensor
    segment: torch.Tensor
    question: int  # position of the question's first token
    answer: int  # position of the token whose logits give the answer's first token

    @property
    def documents(self) -> int:
        return int(self.segment.max())


class Reader:
    def __init__(self, folder: Path, device: torch.device) -> None:
        self.tokenizer, self.device = Tokenizer.from_file(str(folder / "tokenizer.json")), device

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def document(self, title: str, text: str) -> list[int]:
        return self.ids(f"<|doc|>{title}\n{text}\n")

    def prompt(self, row: dict[str, Any]) -> Prompt:
        parts = [self.ids(SYSTEM), *(self.document(*d) for d in row["docs"])]
        segment = [i for i, part in enumerate(parts) for _ in part]
        tail = self.ids(f"<|question|>{row['question']}\n<|answer|>")
        gold = [*self.ids(" " + row["answers"][0]), 2]
        ids = [token for part in parts for token in part] + tail + gold
        segment += [-1] * (len(tail) + len(gold))
        start = segment.index(-1)
        return Prompt(torch.tensor(ids).to(self.device), torch.tensor(segment).to(self.device), start, start + len(tail) - 1)

    def foreign(self, row: dict[str, Any], tokens: int) -> torch.Tensor:
        """The first ``tokens`` tokens of a row's documents, behind the system text."""
        ids = self.ids(SYSTEM)
        for d in row["docs"]:
            ids += self.document(*d)
        return torch.tensor(ids[:tokens]).to(self.device)

    def texts(self, file: Path, tokens: int) -> dict[str, torch.Tensor]:
        """The first ``tokens`` tokens of each text of a file, as they are and as documents behind the system text.

        Lines of ==== stand between texts; a text's passages have a blank line between them and begin with their title.
        """
        parts = [text.strip() for text in file.read_text(encoding="utf-8").split("\n====\n")]
        if len(parts) != 2:
            raise SystemExit(f"{file} holds {len(parts)} texts, not two with a line of ==== between them")
        found = {f"text {i}": self.ids(part) for i, part in enumerate(parts)}
        for i, part in enumerate(parts):
            passages = [passage.partition("\n") for passage in part.split("\n\n")]
            documents = [self.document(title, text) for title, _, text in passages]
            found[f"documents {i}"] = [*self.ids(SYSTEM), *(token for document in documents for token in document)]
        return {name: torch.tensor(ids[:tokens]).to(self.device) for name, ids in found.items()}


def rows_of(folder: Path, name: str) -> list[dict[str, Any]]:
    with gzip.open(folder / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def ends_sentence(text: str) -> bool:
    """Whether a token that reads ``text`` is the last one of a sentence."""
    return "\n" in text or text.rstrip().rstrip("\"'”’)]").endswith((".", "!", "?", "。", "！", "？"))


class Documents:
    """The prompt's segments as one padded batch: [D, n] token ids, and the way from there back to [T]."""

    def __init__(self, prompt: Prompt) -> None:
        parts = [(prompt.segment == i).nonzero()[:, 0] for i in range(prompt.documents + 1)]
        self.length = max(len(p) for p in parts)
        self.ids = torch.stack([torch.nn.functional.pad(prompt.ids[p], (0, self.length - len(p))) for p in parts])
        self.starts = torch.stack([p[0] for p in parts])
        self.lengths = torch.tensor([len(p) for p in parts], device=prompt.ids.device)
        self.valid = torch.arange(self.length, device=prompt.ids.device)[None] < self.lengths[:, None]


@dataclass
class Foreign:
    cache: Cache
    positions: torch.Tensor


@torch.no_grad()
def ingest(model: Llama, prompt: Prompt, contexts: Sequence[Foreign]) -> tuple[Cache, dict[str, torch.Tensor]]:
    """K and V of the documents, each computed alone, and what a server could store with them; [.., T'] over system and documents.

    sv, sk [contexts, layers, T']: squared deviation of values and keys behind each foreign context; mass [contexts, layers, heads, T']:
    attention to it; norm [layers, T']: squared norm of the values.
    """
    documents = Documents(prompt)
    steps = torch.arange(documents.length, device=model.device)[None]
    alone = model.prefill(documents.ids, steps.expand(len(documents.ids), -1))

    def flat(cache: Cache) -> Cache:  # -> [layers, 1, kv_heads, T', d]
        return Cache(*(x.transpose(2, 3)[:, documents.valid].transpose(1, 2)[:, None] for x in (cache.k, cache.v)))

    cache, room = flat(alone), len(prompt.ids) - prompt.question
    sv, sk, mass = [], [], []
    for context in contexts:
        share: list[torch.Tensor] = []
        n = context.positions.shape[1]
        behind = flat(model.prefill(documents.ids, steps + n, context.cache, context.positions, share))
        sv.append((behind.v - cache.v).square().sum((1, 2, 4)))
        sk.append((behind.k - cache.k).square().sum((1, 2, 4)))
        mass.append(torch.stack(share).transpose(2, 3)[:, documents.valid].transpose(1, 2))
    features = {"sv": torch.stack(sv), "sk": torch.stack(sk), "mass": torch.stack(mass), "norm": cache.v.square().sum((1, 2, 4))}
    wide = Cache(*(torch.nn.functional.pad(x, (0, 0, 0, room)) for x in (cache.k, cache.v)))  # zeros where the question will stand
    return wide, features


@dataclass
class Outcome:
    """One recomputed variant: every gold token most likely, mean log probability of the gold tokens, KL of the first against `full`."""

    right: bool
    score: float
    kl: float


@torch.no_grad()
def outcomes(
    model: Llama, prompt: Prompt, cache: Cache, choices: torch.Tensor, reference: torch.Tensor | None = None
) -> tuple[list[Outcome], torch.Tensor]:
    """Answers over ``cache`` with the tokens ``choices`` [B, R] recomputed; and the first answer token's log probabilities [B, vocab]."""
    total = len(prompt.ids)
    tail = torch.arange(prompt.question, total - 1, device=model.device)
    gold = prompt.ids[prompt.answer + 1 :]
    found: list[Outcome] = []
    firsts = []
    rows = choices.shape[1] + len(tail)
    step = max(1, int(PAIRS // (rows * total)))
    for part in choices.split(step):
        hidden, _ = model.rows(prompt.ids, torch.cat((part, tail.expand(len(part), -1)), 1), cache)
        logp = model.logits(hidden[:, -len(gold) :]).log_softmax(-1)
        right = (logp.argmax(-1) == gold).all(-1)
        score = logp.gather(-1, gold[None, :, None].expand(len(part), -1, 1))[..., 0].mean(-1)
        firsts.append(logp[:, 0])
        base = logp[:, 0] if reference is None else reference.expand(len(part), -1)
        kl = (base.exp() * (base - logp[:, 0])).sum(-1)
        found += [Outcome(bool(r), float(s), float(d)) for r, s, d in zip(right.tolist(), score.tolist(), kl.tolist(), strict=True)]
    return found, torch.cat(firsts)


# ---------------------------------------------------------------- rules


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
        ends = torch.isin(ids, STOPS.to(ids.device))
        starts = torch.cat((ends.new_zeros(1), ends[:-1])) | (self.offset == 0)
        steps = torch.arange(len(ids), device=ids.device)
        starts |= (steps - torch.where(starts, steps, 0).cummax(0).values) % LONGEST == 0
        return starts.long().cumsum(0)

    @property
    def openings(self) -> torch.Tensor:
        """[N] whether a token is in its document's first sentence: a title line where there is one."""
        sentences = self.sentences
        return torch.isin(sentences, sentences[self.offset == 0])


STOPS = torch.zeros(0, dtype=torch.long)  # ids of tokens that end a sentence; set from the tokenizer
LONGEST = 64  # tokens of a sentence
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
CONTEXTS = (("crossdoc", 490, 1200), ("crossdoc", 491, 1200), ("onehop", 490, 1200), ("needle", 490, 1200), ("crossdoc", 492, 400))


# ---------------------------------------------------------------- measurement


def question_attention(model: Llama, prompt: Prompt, cache: Cache) -> torch.Tensor:
    """[layers, heads, question tokens, N]: what the question's tokens attend to over the given KV."""
    tail = torch.arange(prompt.question, prompt.answer + 1, device=model.device)[None]
    weights = model.rows(prompt.ids, tail, cache, weights=True)[1]
    if weights is None:
        raise RuntimeError("the pass returned no attention")
    return weights[:, 0, :, :, : prompt.question]


def gradient(model: Llama, prompt: Prompt, cache: Cache, full: Cache) -> torch.Tensor:
    """[N] first-order change of the gold answer's log probability when a token's K and V become those of the full prefill."""
    with torch.enable_grad():
        k, v = cache.k.clone().requires_grad_(), cache.v.clone().requires_grad_()
        tail = torch.arange(prompt.question, len(prompt.ids) - 1, device=model.device)[None]
        hidden, _ = model.rows(prompt.ids, tail, Cache(k, v))
        gold = prompt.ids[prompt.answer + 1 :]
        logp = model.logits(hidden[0, -len(gold) :]).log_softmax(-1).gather(-1, gold[:, None]).sum()
        gk, gv = torch.autograd.grad(logp, (k, v))
    change = (gk * (full.k - cache.k)).sum((0, 1, 2, 4)) + (gv * (full.v - cache.v)).sum((0, 1, 2, 4))
    return change[: prompt.question].abs()


@torch.no_grad()
def look(model: Llama, prompt: Prompt, contexts: Sequence[Foreign], *, slope: bool = True) -> tuple[Cache, Seen, torch.Tensor, Outcome]:
    """Everything the rules see of one question, the reused cache, and what the full prefill answers. ``slope``: the gradient too."""
    cache, stored = ingest(model, prompt, contexts)
    total, n = len(prompt.ids), prompt.question
    steps = torch.arange(total, device=model.device)
    full = model.prefill(prompt.ids[None], steps[None])
    [outcome], reference = outcomes(model, prompt, full, torch.empty(1, 0, dtype=torch.long, device=model.device))
    segment = prompt.segment[:n]
    starts = torch.cat((torch.ones(1, dtype=torch.bool, device=model.device), segment[1:] != segment[:-1]))
    oracle = {
        "v": (full.v - cache.v).square().sum((1, 2, 4))[:, :n],
        "k": (full.k - cache.k).square().sum((1, 2, 4))[:, :n],
        "knorm": cache.k.square().sum((1, 2, 4))[:, :n].mean(1, True),
        "last": question_attention(model, prompt, full)[:, :, -1].mean(1).sum(0),
    }
    if slope:
        oracle["gradient"] = gradient(model, prompt, cache, full)
    offset = steps[:n] - torch.where(starts, steps[:n], 0).cummax(0).values
    seen = Seen(
        prompt, stored["sv"], stored["sk"], stored["mass"], stored["norm"], question_attention(model, prompt, cache), offset, oracle
    )
    return cache, seen, reference[0], outcome


@torch.no_grad()
def staged(model: Llama, seen: Seen, cache: Cache, documents: torch.Tensor, name: str, count: int) -> torch.Tensor:
    """Tokens of a two-stage rule; both stages together recompute ``count`` tokens."""
    first, part, second = STAGED[name]
    number = max(1, round(part * count))
    chosen = choose(RULES[first](seen), documents, number)
    written: list[Cache] = []
    model.rows(seen.prompt.ids, chosen[None], cache, written=written)
    place = chosen[None, None, None, :, None].expand(*cache.v.shape[:3], -1, cache.v.shape[4])
    repaired = Cache(cache.k.scatter(3, place, written[0].k), cache.v.scatter(3, place, written[0].v))
    again = replace(seen, attention=question_attention(model, seen.prompt, repaired))
    return choose(RULES[second](again), documents, max(1, count - number))


def measure(
    model: Llama,
    reader: Reader,
    rows: Sequence[dict[str, Any]],
    contexts: Sequence[Foreign],
    rules: Sequence[str],
    shares: Sequence[float],
    dump: int,
) -> tuple[dict[str, Any], list[dict[str, torch.Tensor]]]:
    """All rules at all shares over the rows. Returns the report of one set and, for the first ``dump`` rows, what the rules saw."""
    table: dict[str, dict[str, list[Outcome]]] = {}
    dumped = []
    started = time.perf_counter()
    tokens = questions = 0
    for i, row in enumerate(rows):
        prompt = reader.prompt(row)
        cache, seen, reference, full = look(model, prompt, contexts, slope=i < dump or any("gradient" in name for name in rules))
        documents = seen.groups > 0
        available = int(documents.sum())
        tokens, questions = tokens + available, questions + prompt.answer + 1 - prompt.question
        table.setdefault("full", {}).setdefault("100", []).append(full)
        none = torch.empty(1, 0, dtype=torch.long, device=model.device)
        table.setdefault("concat", {}).setdefault("0", []).append(outcomes(model, prompt, cache, none, reference)[0][0])
        plain = [name for name in rules if name in RULES]
        scores = {name: RULES[name](seen) for name in plain}
        for share in shares:
            count = max(1, round(share / 100 * available))
            choices = torch.stack([choose(scores[name], documents, count) for name in plain])
            found = outcomes(model, prompt, cache, choices, reference)[0]
            for name, outcome in zip(plain, found, strict=True):
                table.setdefault(name, {}).setdefault(f"{share:g}", []).append(outcome)
            for name in rules:
                if name in STAGED:
                    chosen = staged(model, seen, cache, documents, name, count)[None]
                    table.setdefault(name, {}).setdefault(f"{share:g}", []).append(outcomes(model, prompt, cache, chosen, reference)[0][0])
        if i < dump and tokens < 36_000:
            dumped.append(
                {
                    "ids": prompt.ids.short().cpu(),
                    "segment": prompt.segment.char().cpu(),
                    "question": torch.tensor([prompt.question, prompt.answer]),
                    "last": seen.attention[:, :, -1].half().cpu(),
                    "all": seen.attention.sum(2).mean(1).half().cpu(),
                    "sv": seen.sv.bfloat16().cpu(),
                    "mass": seen.mass.mean(2).half().cpu(),
                    "norm": seen.norm.bfloat16().cpu(),
                    "true": seen.oracle["v"].bfloat16().cpu(),
                    "gradient": seen.oracle["gradient"].cpu(),
                    "full_last": seen.oracle["last"].half().cpu(),
                }
            )
        if i % 20 == 19:
            print(f"  {i + 1} of {len(rows)}, {time.perf_counter() - started:.0f} s", flush=True)
    report: dict[str, Any] = {
        "n": len(rows),
        "document tokens": round(tokens / len(rows)),
        "question tokens, % of document tokens": round(100 * questions / tokens, 2),
        "seconds": round(time.perf_counter() - started, 1),
        "rules": {},
    }
    for name, curve in table.items():
        report["rules"][name] = {
            share: {
                "EM": round(100 * sum(o.right for o in found) / len(found), 1),
                "log p": round(sum(o.score for o in found) / len(found), 4),
                "KL": round(sum(o.kl for o in found) / len(found), 4),
                "right": "".join("01"[o.right] for o in found),
            }
            for share, found in curve.items()
        }
    return report, dumped


def check(model: Llama, folder: Path, prompt: Prompt, contexts: Sequence[Foreign]) -> dict[str, float]:
    """Largest differences of logits against transformers: full prefill, nothing and a random tenth of the tokens recomputed.

    The reference sees documents alone in one copy of the prompt, and a second copy of the recomputed tokens and the question that
    attends to the first copy's tokens that are not recomputed, and to itself.
    """
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(model.device).eval()
    cache = look(model, prompt, contexts)[0]
    n, total = prompt.question, len(prompt.ids)
    found: dict[str, float] = {}
    for name, share in (("nothing", 0.0), ("a tenth", 0.1), ("everything", 1.0)):
        redone = torch.rand(n, generator=torch.Generator().manual_seed(1)).to(model.device) < share
        where = torch.cat((redone.nonzero()[:, 0], torch.arange(n, total, device=model.device)))
        ids, position = torch.cat((prompt.ids[:n], prompt.ids[where])), torch.cat((torch.arange(n, device=model.device), where))
        second = torch.arange(len(ids), device=model.device) >= n
        segment = torch.cat((prompt.segment[:n], prompt.segment[where]))
        frozen = torch.cat((~redone, torch.ones(len(where), dtype=torch.bool, device=model.device)))
        before = position[None] <= position[:, None]
        alone = before & (segment[:, None] == segment[None]) & ~second[None]
        mask = torch.where(second[:, None], before & frozen[None], alone)
        bias = torch.where(mask, 0.0, torch.finfo(torch.float32).min)[None, None]
        with torch.no_grad():
            wanted = reference(ids[None], attention_mask=bias, position_ids=position[None]).logits[0, n:]
            hidden, _ = model.rows(prompt.ids, where[None], cache)
            found[name] = round(float((model.logits(hidden[0]) - wanted).abs().max()), 5)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sets", nargs="+", default=["crossdoc"], help="NAME, NAME:n or NAME:n:shares, as crossdoc:200:2,5,10")
    parser.add_argument("--n", type=int, default=200)
    parser.add_argument("--rules", nargs="+", default=["static", "v_quarter_linear"], help=f"of {', '.join([*RULES, *STAGED])}")
    parser.add_argument("--shares", nargs="+", type=float, default=[2, 5, 10, 15, 20, 30], help="percent of the documents' tokens")
    parser.add_argument("--dump", type=int, default=0, help="write what the rules saw of this many questions of every set to OUT.SET.pt")
    parser.add_argument("--foreign", type=Path, help="texts with lines of ==== between them: contexts that come first, as the server's do")
    arguments = parser.parse_args()
    for name in arguments.rules:
        if name not in RULES and name not in STAGED:
            parser.error(f"no rule {name!r}: choose from {', '.join([*RULES, *STAGED])}")
        if name.startswith(("framed", "likely", "other")) and arguments.foreign is None:
            parser.error(f"rule {name!r} needs --foreign")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, reader = Llama(arguments.model, device), Reader(arguments.model, device)
    vocabulary = reader.tokenizer.get_vocab()
    global STOPS
    STOPS = torch.tensor(sorted(i for i in vocabulary.values() if ends_sentence(reader.tokenizer.decode([i]))))
    texts = {f"{name} {row}": reader.foreign(rows_of(arguments.data, name)[row], tokens) for name, row, tokens in CONTEXTS}
    if arguments.foreign is not None:
        texts = reader.texts(arguments.foreign, 512) | texts
    contexts = []
    for ids in texts.values():
        positions = torch.arange(len(ids), device=device)[None]
        with torch.no_grad():
            contexts.append(Foreign(model.prefill(ids[None], positions), positions))
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "model": arguments.model.name,
        "contexts": {name: len(ids) for name, ids in texts.items()},
        "check": check(model, arguments.model, reader.prompt(rows_of(arguments.data, "crossdoc")[0]), contexts),
        "sets": {},
    }
    print(json.dumps(report["check"]), flush=True)
    if max(report["check"].values()) > 0.01:
        raise SystemExit(f"differs from transformers: {report['check']}")
    for spec in arguments.sets:
        name, n, some = [*spec.split(":"), "", ""][:3]
        rows = rows_of(arguments.data, name)[: int(n or arguments.n)]
        shares = [float(share) for share in some.split(",")] if some else arguments.shares
        report["sets"][name], dumped = measure(model, reader, rows, contexts, arguments.rules, shares, arguments.dump)
        arguments.out.write_text(json.dumps(report, indent=1))
        if dumped:
            torch.save(dumped, arguments.out.with_suffix(f".{name}.pt"))
        print(f"{name}: n={len(rows)}, {report['sets'][name]['seconds']} s", flush=True)
        for rule, curve in report["sets"][name]["rules"].items():
            print(f"{rule:28s} " + "  ".join(f"{share}: {c['EM']:5.1f} {c['log p']:6.3f}" for share, c in curve.items()), flush=True)


if __name__ == "__main__":
    main()
