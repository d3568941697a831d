"""Which stage loses the answer where few tokens are kept? Strategies as a server runs them, outside an engine.

    python -m examples.reuse_rules.kept MODEL DATA_DIR CACHE_DIR OUT.json --sets onehop:100 needle:60 --strategies samkv samkv:places=full

Drafts, selections and rules are the server's own code (`sglang_ext.context`) with the options of a request; K and V are those of a plain
Llama in float32, documents computed alone. What a document has at ingestion (K and V in half precision, sensitivity) stays in CACHE_DIR.
For every question and strategy: F1 of the greedy answer, what share of the sentences of the gold documents that say the answer was kept
(``held``), and how many tokens were kept and computed again. A run goes on where another one stopped; ``--seconds`` bounds it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from examples.reuse_rules.model import Cache, Llama
from ragserve.answering.prompt import PromptBuilder, PromptDocument, load_tokenizer
from ragserve.eval.data import Question, find, load
from ragserve.eval.metrics import contains_answer, token_f1
from ragserve.profiles.samkv import FILE_NAME, SAMKV
from ragserve.strategy_spec import StrategySpec, parse
from sglang_ext.analysis.summary import Analysis, quantize
from sglang_ext.analysis.texts import Texts, foreign_contexts
from sglang_ext.context.rope import Rotation
from sglang_ext.context.selection.profile import Profile
from sglang_ext.context.selection.samkv import choose_sentences
from sglang_ext.context.selection.strategies import Selection, Shape, draft
from sglang_ext.documents.build import model_fingerprint
from sglang_ext.protocol import ContextPlan, Span

HEADS = ((7, 0),)  # what sglang_ext.analysis.retrieval_heads finds for ragserve-tiny
BLOCK = 16
END = 2


class Lab:
    """A model with what the server knows of it."""

    def __init__(self, folder: Path) -> None:
        tokenizer = load_tokenizer(str(folder))
        self.model, self.tokenizer, self.prompts = Llama(folder, torch.device("cpu")), tokenizer, PromptBuilder(tokenizer)
        self.texts = Texts.of(tokenizer, self.model.w["model.embed_tokens.weight"].shape[0])
        self.rotation = Rotation(self.model.frequencies, self.model.dim, neox=True)
        found = SAMKV.load(folder / FILE_NAME, model_fingerprint(str(folder), ""))  # the server's defaults, where the model brings some
        self.profile = Profile() if found is None else Profile.of(found.engine, self.model.layers, self.model.kv_heads)
        self._foreign: list[tuple[Cache, torch.Tensor]] = []
        for ids in foreign_contexts(tokenizer):
            steps = torch.arange(len(ids))[None]
            self._foreign.append((self.model.prefill(torch.tensor([ids]), steps), steps))

    def alone(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One document or system text [n] alone: K before rotation and V, [layers, kv_heads, n, head_dim], in half precision."""
        found = self.model.prefill(ids[None], torch.arange(len(ids))[None])
        return found.k[:, 0].half(), found.v[:, 0].half()

    def sensitivity(self, ids: torch.Tensor) -> torch.Tensor:
        """f32 [n] of one document."""
        steps = torch.arange(len(ids))[None]
        alone, moved = self.model.prefill(ids[None], steps), torch.zeros(len(ids))
        for cache, before in self._foreign:
            behind = self.model.prefill(ids[None], steps + before.shape[1], cache, before)
            moved += (behind.v - alone.v).square().sum((0, 1, 2, 4))
        return moved

    def analysis(self, ids: torch.Tensor, keys: torch.Tensor) -> Analysis:
        """Of a document: its sentences and the ``keys`` [n, heads, head_dim] of the retrieval heads; the rest, of blocks, is empty."""
        n, model = len(ids), self.model
        blocks = -(-n // BLOCK)
        token_k, scale = quantize(keys)
        return Analysis(
            n, BLOCK, 2,
            mean_k=torch.zeros(model.layers, blocks, model.kv_heads, model.dim, dtype=torch.int8),
            mean_k_scale=torch.zeros(model.layers, blocks, model.kv_heads, dtype=torch.float16),
            local_q=torch.zeros(model.layers, model.heads, model.dim, dtype=torch.int8),
            local_q_scale=torch.zeros(model.layers, model.heads, dtype=torch.float16),
            token=torch.zeros(model.layers, blocks, dtype=torch.uint8),
            attention=torch.zeros(model.layers, blocks),
            exponent=torch.zeros(model.layers, blocks, dtype=torch.float16),
            sensitivity=torch.zeros(n),
            begins=self.texts.begins(ids.tolist()),
            heads=torch.tensor(HEADS, dtype=torch.uint8),
            token_k=token_k,
            token_k_scale=scale,
        )  # fmt: skip


@dataclass
class Asked:
    """A question whose documents are cached. ``k`` and ``v`` [layers, kv_heads, N, head_dim], keys rotated for their places."""

    question: Question
    ids: torch.Tensor
    bounds: list[int]
    k: torch.Tensor
    v: torch.Tensor
    analyses: list[Analysis]
    sensitivity: Path

    @property
    def plan(self) -> tuple[Span, ...]:
        return tuple(Span(a, b) for a, b in pairwise(self.bounds))

    def with_sensitivity(self, lab: Lab) -> list[Analysis]:
        if not self.sensitivity.exists():
            torch.save(torch.cat([lab.sensitivity(self.ids[a:b]) for a, b in pairwise(self.bounds)]), self.sensitivity)
        found = torch.load(self.sensitivity)
        return [replace(one, sensitivity=found[a:b]) for one, (a, b) in zip(self.analyses, pairwise(self.bounds[1:]), strict=True)]

    @property
    def start(self) -> int:
        """N: where the question begins."""
        return self.bounds[-1]

    def answering(self, tokenizer: Any) -> torch.Tensor:
        """bool [N]: tokens of sentences of the gold documents that say the answer."""
        found = torch.zeros(self.start, dtype=torch.bool)
        for number, (begin, end) in enumerate(pairwise(self.bounds[1:])):
            if self.question.documents[number] not in self.question.gold:
                continue
            starts = [*self.analyses[number].begins.nonzero()[:, 0].tolist(), end - begin]
            for a, b in pairwise(starts):
                if contains_answer(tokenizer.decode(self.ids[begin + a : begin + b].tolist()), self.question.answers):
                    found[begin + a : begin + b] = True
        return found


@torch.no_grad()
def asked(lab: Lab, question: Question, file: Path) -> Asked:
    """The question over its cached documents; K and V that are not in ``file`` are computed and kept there."""
    documents = [PromptDocument(d.key, d.title, d.text) for d in question.documents]
    prompt = lab.prompts.build(question.question, documents, max_prompt_tokens=10**9)
    ids, bounds = torch.tensor(prompt.input_ids), [0, *(segment.end for segment in prompt.segments[:-1])]
    parts = [ids[a:b] for a, b in pairwise(bounds)]
    if not file.exists():
        found = [lab.alone(part) for part in parts]
        torch.save([torch.cat([own[0] for own in found], 2), torch.cat([own[1] for own in found], 2)], file)
    k, v = (half.float() for half in torch.load(file))
    local = torch.cat([torch.arange(len(part)) for part in parts])
    heads = torch.stack([lab.model.rotate(k[layer][None], local[None])[0, head] for layer, head in HEADS], dim=1)
    analyses = [lab.analysis(ids[a:b], heads[a:b]) for a, b in pairwise(bounds[1:])]
    return Asked(question, ids, bounds, k, v, analyses, file.with_suffix(".sensitivity.pt"))


class Context:
    """Kept tokens, some computed again, and what is asked over them."""

    def __init__(self, model: Llama, one: Asked, selection: Selection) -> None:
        self.model, self.one, self.kept = model, one, selection.kept
        n = len(self.kept)
        self.places = torch.arange(n) if selection.closed else self.kept
        self.end = n if selection.closed else one.start
        k = one.k[:, :, self.kept]
        self.k = [model.rotate(layer[None], self.places[None])[0] for layer in k]
        self.v = list(one.v[:, :, self.kept])

    def redo(self, positions: torch.Tensor) -> None:
        """Compute these kept tokens again: each over what stands before it, all in one pass."""
        if len(positions):
            self._pass(torch.searchsorted(self.kept, positions), self.one.ids[positions])

    def attention(self) -> torch.Tensor:
        """f32 [document tokens] as `sglang_ext.context.recompute.question_attention.attention` gives it."""
        model, looked = self.model, torch.zeros(len(self.kept))
        queries, keys = self._ask(self.one.ids[self.one.start :])[1:]
        for layer in range(model.layers // 2, model.layers):
            q = queries[layer][:, -1].unflatten(0, (model.kv_heads, -1))
            looked += (torch.einsum("hgd,hnd->hgn", q, keys[layer]) / model.dim**0.5).softmax(-1).amax((0, 1))[: len(looked)]
        out = torch.zeros(self.one.start)
        out[self.kept] = looked
        return out[self.one.bounds[1] :]

    def query(self) -> torch.Tensor:
        """f32 [layers, heads, head_dim] of the question's last token."""
        return torch.stack([q[:, -1] for q in self._ask(self.one.ids[self.one.start :])[1]])

    def answer(self, most: int = 24) -> list[int]:
        """Greedy."""
        past: list[tuple[torch.Tensor, torch.Tensor]] = []
        step, out = self.one.ids[self.one.start :], list[int]()
        while len(out) < most:
            hidden = self._ask(step, past)[0]
            token = int(self.model.logits(hidden[:, -1]).argmax())
            if token == END:
                break
            out.append(token)
            step = torch.tensor([token])
        return out

    def _ask(
        self, ids: torch.Tensor, past: list[tuple[torch.Tensor, torch.Tensor]] | None = None
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        model = self.model
        before = past[0][0].shape[1] if past else 0
        places = (self.end + before + torch.arange(len(ids)))[None]
        hidden = model.w["model.embed_tokens.weight"][ids][None]
        queries, seen = [], []
        for layer in range(model.layers):
            q, k, v = model.project(layer, hidden)
            q, k = model.rotate(q, places)[0], model.rotate(k, places)[0]
            v = v[0]
            if before and past is not None:
                k, v = torch.cat((past[layer][0], k), 1), torch.cat((past[layer][1], v), 1)
            if past is not None:
                past[layer : layer + 1] = [(k, v)]
            keys, values = torch.cat((self.k[layer], k), 1), torch.cat((self.v[layer], v), 1)
            mask = torch.ones(len(ids), keys.shape[1], dtype=torch.bool).tril(keys.shape[1] - len(ids))
            out = scaled_dot_product_attention(q[None], model.wide(keys[None]), model.wide(values[None]), attn_mask=mask)
            queries.append(q)
            seen.append(keys)
            hidden = model.finish(layer, hidden, out)
        return hidden, queries, seen

    def _pass(self, rows: torch.Tensor, ids: torch.Tensor) -> None:
        model = self.model
        places = self.places[rows][None]
        hidden = model.w["model.embed_tokens.weight"][ids][None]
        mask = torch.arange(len(self.kept))[None] <= rows[:, None]
        for layer in range(model.layers):
            q, k, v = model.project(layer, hidden)
            q, k = model.rotate(q, places), model.rotate(k, places)
            self.k[layer] = self.k[layer].index_copy(1, rows, k[0])
            self.v[layer] = self.v[layer].index_copy(1, rows, v[0])
            out = scaled_dot_product_attention(q, model.wide(self.k[layer][None]), model.wide(self.v[layer][None]), attn_mask=mask)
            hidden = model.finish(layer, hidden, out)


@torch.no_grad()
def answer(lab: Lab, one: Asked, spec: StrategySpec) -> tuple[str, torch.Tensor, torch.Tensor]:
    """The answer, and the positions kept and computed again."""
    made = draft(ContextPlan("compose", "n", spec.name, one.plan, spec.options), Shape(lab.model.layers, profile=lab.profile))
    analyses = one.with_sensitivity(lab) if made.rule.needs_analysis else one.analyses
    chosen = None
    if made.selects and made.samkv is not None and made.blocks is not None:
        if not made.samkv.by_sentence:
            raise SystemExit(f"{spec.label}: only selections of sentences are computed here")
        query = None
        if made.needs_query:
            none = torch.empty(0, dtype=torch.int64)
            query = Context(lab.model, one, Selection(torch.arange(one.bounds[1]), none)).query()
        chosen = choose_sentences(
            made.samkv, made.blocks, analyses, query, one.start, lab.rotation,
            one.ids[one.bounds[1] : one.start], lab.texts.telling(one.ids[one.start :]),
        )  # fmt: skip
    selection = made.settle(analyses, chosen)
    context = Context(lab.model, one, selection)
    recomputed = selection.recomputed
    if selection.asks:
        recomputed = made.recomputed(selection.kept, analyses, context.attention())
    context.redo(recomputed)
    return lab.tokenizer.decode(context.answer()).strip(), selection.kept, recomputed


def asks(lab: Lab, folder: Path, data: Path, sets: Sequence[str], every: slice) -> Iterator[tuple[str, int, Asked]]:
    for entry in sets:
        name, _, count = entry.partition(":")
        questions = list(enumerate(load(find(name, data))))
        for number, question in questions[: int(count or len(questions))][every]:
            yield name, number, asked(lab, question, folder / f"{name}-{number}.pt")


def summary(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By set and strategy: questions, mean F1 and held in percent, shares kept and computed again of the document tokens."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for key, row in rows.items():
        name, _, label = key.split("/", 2)
        groups.setdefault((name, label), []).append(row)
    found: dict[str, dict[str, Any]] = {}
    for (name, label), own in groups.items():
        held = [row["held"] for row in own if row["held"] is not None]
        found.setdefault(name, {})[label] = {
            "n": len(own),
            "f1": round(100 * sum(row["f1"] for row in own) / len(own), 1),
            "held": round(100 * sum(held) / len(held), 1) if held else None,
            "kept": round(sum(row["kept"] for row in own) / sum(row["tokens"] for row in own), 3),
            "recomputed": round(sum(row["recomputed"] for row in own) / sum(row["tokens"] for row in own), 3),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("cache", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sets", nargs="+", default=["onehop:100"], help="NAME or NAME:n, the first n questions")
    parser.add_argument("--strategies", nargs="+", default=["samkv"])
    parser.add_argument("--half", choices=["all", "even", "odd"], default="all", help="the defaults were tuned on even questions")
    parser.add_argument("--seconds", type=float, default=1e9)
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.cache.mkdir(parents=True, exist_ok=True)
    started, lab = time.monotonic(), Lab(given.model)
    specs = [parse(text)[0] for text in given.strategies]
    rows: dict[str, dict[str, Any]] = json.loads(given.out.read_text())["rows"] if given.out.exists() else {}
    every = {"all": slice(None), "even": slice(0, None, 2), "odd": slice(1, None, 2)}[given.half]
    for name, number, one in asks(lab, given.cache, given.data, given.sets, every):
        first, saying = one.bounds[1], one.answering(lab.tokenizer)
        for spec in specs:
            key = f"{name}/{number}/{spec.label}"
            if key in rows:
                continue
            said, kept, recomputed = answer(lab, one, spec)
            rows[key] = {
                "f1": round(token_f1(said, one.question.answers), 4),
                "held": float(torch.isin(saying.nonzero()[:, 0], kept).float().mean()) if saying.any() else None,
                "kept": int((kept >= first).sum()),
                "recomputed": int((recomputed >= first).sum()),
                "tokens": one.start - first,
                "answer": said,
            }
        if time.monotonic() - started > given.seconds:
            break
    given.out.write_text(json.dumps({"model": given.model.name, "half": given.half, "sets": summary(rows), "rows": rows}, indent=0))
    for name, found in summary(rows).items():
        for label, row in found.items():
            print(f"{name:14s} {label:60s} n={row['n']:3d} F1 {row['f1']:5.1f} held {row['held']} kept {row['kept']} {row['recomputed']}")


if __name__ == "__main__":
    main()
