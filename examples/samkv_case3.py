"""Compare two readings of case 3 in figure 5 of the SamKV paper: a recomputed token in a layer that does not
keep it.

    python examples/samkv_case3.py OUT.json SET.jsonl.gz ... [--rows 24 ...]

There it attends to itself besides the kept tokens: in the paper to its prefilled KV (`prefilled`), in ours
to its newly computed KV (`new`). Both readings answer each question; everything else is the same, and
selection, rules and fusion are ragserve's own functions, in transformers with exact masks and float32. Each
is compared with full prefill: F1 of the answer, and the divergence KL(full || reading) of the first token's
distribution. Intervals are 95 % of the mean of paired differences."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ragserve.engine.compat import prepare

prepare()
import torch  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

from ragserve.answering.prompt import PromptBuilder, PromptDocument, load_tokenizer  # noqa: E402
from ragserve.config import DEFAULT_MODEL  # noqa: E402
from ragserve.eval.data import Question, load, set_name  # noqa: E402
from ragserve.verification.metrics import token_f1  # noqa: E402
from ragserve.verification.report import GrowingReport  # noqa: E402
from ragserve_kernels.block_summary import BlockPlan, block_summary_naive  # noqa: E402
from sglang_ext.analysis.document_analysis import Analysis, quantize  # noqa: E402
from sglang_ext.context.recompute.row_attention import fused  # noqa: E402
from sglang_ext.context.selection.base import ContextSelection, ModelShape  # noqa: E402
from sglang_ext.context.selection.samkv import choose, select_by_samkv  # noqa: E402
from sglang_ext.tensors.rope import Rotation  # noqa: E402
from sglang_ext.wire.protocol import ContextPlan, Span  # noqa: E402
from sglang_ext.wire.request_options import SamKvOptions  # noqa: E402

READINGS = ("prefilled", "new")
NEW_TOKENS = 24
_PAPER = {"selection": "layers", "experimental": {"question_query": "mean", "scoring": "zscore"}}
SETTINGS: dict[str, dict[str, Any]] = {
    "the paper's": {**_PAPER, "update": "fusion"},
    "half kept": {**_PAPER, "update": "fusion", "keep": 0.5},
    "half kept, 30 % recomputed at random": {**_PAPER, "keep": 0.5, "recompute": "random", "share": 0.3},
}


@dataclass
class Context:
    """KV by layer at the prompt's positions. ``k``, ``v`` [layers, positions, kv_heads, head_dim]; ``kept``
    bool [layers, positions]."""

    k: torch.Tensor
    v: torch.Tensor
    kept: torch.Tensor

    def copy(self) -> Context:
        return Context(self.k.clone(), self.v.clone(), self.kept.clone())


@dataclass
class Step:
    """Rows of a forward pass: their positions, the context that they read and write, what was seen."""

    positions: torch.Tensor
    context: Context
    reading: str = "new"
    fuse: bool = False
    queries: list[torch.Tensor] = field(default_factory=list)  # by layer, [rows, heads, head_dim]

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Write K and V where the layer keeps the rows, and attend to kept positions up to each row's."""
        self.queries.append(q)
        own, keys, values = self.positions, self.context.k[layer], self.context.v[layer]
        alone = ~self.context.kept[layer, own]
        old_k, old_v = keys[own], values[own]
        written = own[~alone]
        new_k, new_v = (fused(k, old_k), fused(v, old_v)) if self.fuse else (k, v)
        keys[written], values[written] = new_k[~alone], new_v[~alone]
        self_k, self_v = (old_k, old_v) if self.reading == "prefilled" else (k, v)
        places = self.context.kept[layer].nonzero()[:, 0]
        mask = torch.cat((places[None, :] <= own[:, None], torch.diag(alone)), dim=1)
        out = scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            torch.cat((keys[places], self_k)).transpose(0, 1)[None],
            torch.cat((values[places], self_v)).transpose(0, 1)[None],
            attn_mask=mask,
            scale=scaling,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)


class Model:
    """A Llama in transformers whose attention is that of a `Step`."""

    def __init__(self, path: str) -> None:
        ALL_ATTENTION_FUNCTIONS.register("step", self._attention)
        self.hf = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="step"
        ).eval()
        config = self.hf.config
        self.shape = ModelShape(config.num_hidden_layers, kv_itemsize=4)
        self.sizes = (config.num_key_value_heads, config.head_dim)
        rope = self.hf.model.rotary_emb
        self.rotation = Rotation(rope.inv_freq, config.head_dim, neox=True)
        self.eos = config.eos_token_id
        self._step: Step | None = None

    def _attention(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        scaling: float,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        assert self._step is not None
        q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
        return self._step.attend(module.layer_idx, q, k, v, scaling)[None], None

    @torch.no_grad()
    def run(self, step: Step, ids: list[int]) -> torch.Tensor:
        """Run tokens; returns log-probabilities behind the last one, [vocabulary]."""
        self._step = step
        out = self.hf(torch.tensor([ids]), position_ids=step.positions[None], use_cache=False)
        logits: torch.Tensor = out.logits[0, -1]
        return logits.log_softmax(-1)

    def empty(self, n: int) -> Context:
        shape = (self.shape.layers, n, *self.sizes)
        kept = torch.zeros(self.shape.layers, n, dtype=torch.bool)
        return Context(torch.zeros(shape), torch.zeros(shape), kept)

    def extend(self, context: Context, ids: list[int], start: int) -> tuple[torch.Tensor, Step]:
        """Run tokens from position ``start`` on, and keep them."""
        positions = torch.arange(start, start + len(ids))
        context.kept[:, positions] = True
        step = Step(positions, context)
        return self.run(step, ids), step

    def answer(self, context: Context, ids: list[int], start: int) -> tuple[list[int], torch.Tensor]:
        """Answer a question greedily; returns tokens, and the first one's log-probabilities."""
        first, _ = self.extend(context, ids, start)
        logprobs, tokens, at = first, [], start + len(ids)
        while len(tokens) < NEW_TOKENS and (token := int(logprobs.argmax())) != self.eos:
            tokens.append(token)
            logprobs, _ = self.extend(context, [token], at)
            at += 1
        return tokens, first

    def analyse(self, step: Step, k: torch.Tensor) -> Analysis:
        """The analysis of a document that ``step`` has prefilled alone; ``k`` [layers, n, kv_heads, dim]."""
        n, cut = k.shape[1], self.shape.cut
        block = cut.size(n, self.shape.kv_itemsize)
        plan = BlockPlan.build([n], block_tokens=block, local_blocks=cut.local_blocks, device=k.device)
        found = [
            block_summary_naive(q, keys, plan, scale=k.shape[-1] ** -0.5, precision=torch.float32)
            for q, keys in zip(step.queries, k, strict=True)
        ]
        mean_k, mean_scale = quantize(torch.stack([one.mean_k for one in found]))
        local_q, local_scale = quantize(torch.stack([one.local_q[0] for one in found]))
        nothing = torch.empty(0)
        token = torch.stack([(one.token - plan.block_start[:-1]).clamp(min=0) for one in found])
        return Analysis(
            n,
            block,
            cut.local_blocks,
            mean_k,
            mean_scale,
            local_q,
            local_scale,
            token=token.to(torch.uint8),
            attention=torch.stack([one.attention for one in found]),
            exponent=torch.stack([one.exponent.half() for one in found]),
            **dict.fromkeys(("sensitivity", "begins", "heads", "token_k", "token_k_scale"), nothing),
        )


class Asked:
    """A question whose documents are prefilled alone, moved to their places and analysed."""

    def __init__(self, model: Model, builder: PromptBuilder, question: Question) -> None:
        documents = [PromptDocument(str(i), d.title, d.text) for i, d in enumerate(question.documents)]
        prompt = builder.build(question.question, documents, max_prompt_tokens=8000)
        self.model, self.ids, self.answers = model, prompt.input_ids, question.answers
        self.spans = [Span(s.start, s.end) for s in prompt.spans]
        self.start = self.spans[-1].end
        self.room = len(self.ids) + NEW_TOKENS
        self.prefilled = model.empty(self.room)
        self.analyses = []
        for number, span in enumerate(self.spans):
            alone = model.empty(span.end - span.start)
            _, step = model.extend(alone, self.ids[span.start : span.end], 0)
            shifts = torch.full((span.end - span.start,), span.start)
            place = slice(span.start, span.end)
            for layer, keys in enumerate(alone.k):
                self.prefilled.k[layer, place] = model.rotation.rotate(keys, shifts)
            self.prefilled.v[:, place] = alone.v
            if number:
                self.analyses.append(model.analyse(step, alone.k))

    def full(self) -> tuple[list[int], torch.Tensor]:
        """Answer from full prefill."""
        return self.model.answer(self.model.empty(self.room), self.ids, 0)

    def select(self, settings: dict[str, Any]) -> ContextSelection:
        """The tokens that samkv keeps and computes again."""
        model, options = self.model, SamKvOptions.model_validate(settings)
        plan = ContextPlan("compose", "n", "samkv", tuple(self.spans), settings)
        partial = select_by_samkv(plan, options, model.shape)
        seen = self.prefilled.copy()
        seen.kept[:, partial.kept] = True
        _, step = model.extend(seen, self.ids[self.start :], self.start)
        query = torch.stack([q.mean(0) for q in step.queries])
        assert partial.blocks is not None
        chosen = choose(options, partial.blocks, self.analyses, query, self.start, model.rotation)
        return partial.settle(self.analyses, chosen.kept)

    def composed(self, selected: ContextSelection, reading: str) -> tuple[list[int], torch.Tensor]:
        """Answer from the composed context."""
        context = self.prefilled.copy()
        kept = selected.kept.expand(self.model.shape.layers, -1)
        context.kept.scatter_(1, kept, torch.ones_like(kept, dtype=torch.bool))
        rows = selected.recomputed
        self.model.run(Step(rows, context, reading, selected.fuse), [self.ids[i] for i in rows.tolist()])
        return self.model.answer(context, self.ids[self.start :], self.start)

    def left_out(self, selected: ContextSelection) -> float:
        """Share of rows and layers in which a layer does not keep a row."""
        there = [torch.isin(selected.recomputed, row) for row in torch.atleast_2d(selected.kept)]
        return 1 - float(torch.stack(there).float().mean())


def compared(model: Model, builder: PromptBuilder, path: Path, rows: int) -> Iterator[dict[str, Any]]:
    """A row for each setting."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in SETTINGS}
    tokenizer = load_tokenizer(DEFAULT_MODEL)
    for question in load(path, rows):
        asked = Asked(model, builder, question)

        def f1(tokens: list[int], asked: Asked = asked) -> float:
            return token_f1(tokenizer.decode(tokens, skip_special_tokens=True), asked.answers)

        tokens, exact = asked.full()
        for name, settings in SETTINGS.items():
            selected = asked.select(settings)
            one = {"left out": asked.left_out(selected), "f1 full": f1(tokens)}
            for reading in READINGS:
                answer, first = asked.composed(selected, reading)
                one[f"f1 {reading}"] = f1(answer)
                one[f"kl {reading}"] = float((exact.exp() * (exact - first)).sum())
            found[name].append(one)
    for name, each in found.items():
        means = {key: round(statistics.fmean(one[key] for one in each), 4) for key in each[0]}
        yield {
            "set": set_name(path),
            "setting": name,
            "questions": len(each),
            **means,
            "f1 prefilled - new": interval([one["f1 prefilled"] - one["f1 new"] for one in each]),
            "kl prefilled - new": interval([one["kl prefilled"] - one["kl new"] for one in each]),
        }


def interval(differences: list[float]) -> list[float]:
    """Mean, and half the width of its 95 % interval."""
    half = 1.96 * statistics.stdev(differences) / math.sqrt(len(differences))
    return [round(statistics.fmean(differences), 4), round(half, 4)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("sets", type=Path, nargs="+")
    parser.add_argument("--rows", type=int, nargs="+", default=[24], help="questions of each set, or of all")
    options = parser.parse_args()
    model, builder = Model(DEFAULT_MODEL), PromptBuilder.load(DEFAULT_MODEL)
    note = "Differences: mean and half the width of the 95 % interval. Lower KL is nearer to full prefill."
    report = GrowingReport("samkv-case3", options.out, note=note)
    given = [path.name for path in options.sets] + ["--rows", *map(str, options.rows)]
    report.workload = {
        "command": f"python examples/samkv_case3.py OUT.json {' '.join(given)}",
        "model": Path(DEFAULT_MODEL).name,
    }
    counts = options.rows * len(options.sets) if len(options.rows) == 1 else options.rows
    for path, count in zip(options.sets, counts, strict=True):
        for row in compared(model, builder, path, count):
            report.add(row)
    report.show()


if __name__ == "__main__":
    main()
