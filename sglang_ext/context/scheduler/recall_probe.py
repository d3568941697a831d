"""Recall of the tokens that a question needs, by retrieval head and by choice of stable layers, measured on
probes whose needed tokens are known.

Documents are prefilled behind the engine's prefix, and questions behind what the selector's query pass reads,
all through the model's own layers in memory (`sglang_ext.analysis.forward`). The selections are the engine's
own code. All ranks take part in every call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sglang_ext.analysis.analyser import Analyser
from sglang_ext.analysis.document_analysis import Analysis
from sglang_ext.analysis.forward import Kv, LayerState, Text, run
from sglang_ext.analysis.stability import outlying
from sglang_ext.context.selection.base import ModelShape, PartialSelection
from sglang_ext.context.selection.choose import Selector
from sglang_ext.context.selection.profile import Profile
from sglang_ext.context.selection.samkv import stable_layers
from sglang_ext.context.selection.sentences import SINKS, Sentences, take_best
from sglang_ext.context.selection.signals.attention import attention
from sglang_ext.context.selection.strategies import partial_selection
from sglang_ext.tensors.rope import Rotation
from sglang_ext.wire.protocol import ContextPlan, PlanError, RetrievalScores, Span

_HEADS_KEEP = 0.05  # share of the tokens that one head alone may keep


@dataclass(frozen=True)
class ProbeEngine:
    """The parts of the running engine that a probe uses. ``analyse`` returns the analysis of a document,
    given a key for it and its token ids."""

    model_runner: Any
    rotation: Rotation
    analyser: Analyser
    selector: Selector
    analyse: Callable[[str, Sequence[int]], Analysis]
    shape: ModelShape


@dataclass(frozen=True)
class RecallQuestion:
    """Token ``ids`` of the question, which follows all documents. ``needed``: spans of the prompt that hold
    its answer.
    """

    ids: tuple[int, ...]
    needed: tuple[Span, ...]


class RecallProbe:
    """A prompt of documents with several questions."""

    def __init__(
        self,
        engine: ProbeEngine,
        ids: Sequence[int],
        spans: Sequence[Span],
        questions: Sequence[RecallQuestion],
        scores: RetrievalScores | None = None,
    ) -> None:
        """Prefill system text and documents, token ``ids`` cut into ``spans`` as in a plan.

        Raises PlanError for a probe without documents or questions.
        """
        if len(spans) < 2 or spans[-1].end != len(ids) or not questions:
            raise PlanError("a probe needs a system text, documents and questions")
        self._engine = engine
        self._shape = replace(engine.shape, profile=Profile())
        self._ids = list(ids)
        self._spans = tuple(spans)
        self._questions = questions
        self._scores = scores
        self._whole = [torch.tensor([*ids, *question.ids]) for question in questions]
        self._device = torch.device(engine.model_runner.device)
        self._kv: list[Kv] = []  # of the whole prompt by layer, keys at their positions
        self._queries_of: dict[bool, list[dict[str, torch.Tensor]]] = {}
        self._prefill()
        self._analyses = [engine.analyse(f"probe:{hash(tuple(part))}", part) for part in self._documents()]

    def survey(self) -> dict[str, Any]:
        """``heads`` [questions][layers][kv_heads of all ranks]: recall of needed tokens among the best 5 % by
        that head's keys alone; ``stable`` [documents][layers]: see `sglang_ext.analysis.stability`;
        ``built_in``: what the engine uses without a profile.
        """
        return {
            "heads": [self._by_head(number).tolist() for number in range(len(self._questions))],
            "stable": [found.tolist() for found in map(outlying, self._analyses) if found is not None],
            "built_in": {
                "stable": list(stable_layers(self._shape.layers)),
                "heads": [list(head) for head in self._engine.analyser.found_heads],
            },
        }

    def proportion(self, stable: Sequence[int]) -> dict[str, Any]:
        """Return for the stable layers ``built_in`` and ``found`` (``stable``) the ``recall`` [questions] of
        needed tokens and the mean share ``kept`` of the document tokens, where P decides how much."""
        sets = {"built_in": list(stable_layers(self._shape.layers)), "found": list(stable)}
        return {"proportion": {name: self._by_proportion(layers) for name, layers in sets.items()}}

    def selections(self, every: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return ``kept`` [selections][questions]: the positions of document tokens that `samkv` keeps with
        each of these options, which must select the same in all layers."""
        found = [self._kept(dict(options), ()) for options in every]
        if any(part.dim() != 1 for kept in found for part in kept):
            raise PlanError("a probe shows selections that are the same in all layers")
        return {"kept": [[part.tolist() for part in kept] for kept in found]}

    def attention(self) -> dict[str, Any]:
        """Return ``attention`` [questions][sentences]: the signal, with the engine's retrieval heads."""
        partial = self._partial({"selection": "sentences", "min_tokens": 1})
        options, blocks = partial.samkv, partial.blocks
        if options is None or blocks is None:
            raise PlanError("a probe for signals needs more than a token of documents")
        found = []
        for ids, query in zip(self._whole, self._queries(partial), strict=True):
            asked = query[options.experimental.question_query]
            seen = attention(
                self._engine.selector.evidence(options, blocks, partial.plan, self._analyses, asked, ids)
            )
            found.append([] if seen is None else seen.tolist())
        return {"attention": found}

    def _by_proportion(self, stable: Sequence[int]) -> dict[str, Any]:
        kept = self._kept({"selection": "shared"}, stable)
        return {"recall": [self._recall(part, n) for n, part in enumerate(kept)], "kept": self._share(kept)}

    def _share(self, kept: Sequence[torch.Tensor]) -> float:
        """Mean share of the document tokens."""
        return sum(part.shape[-1] for part in kept) / len(kept) / (len(self._ids) - self._spans[0].end)

    def _recall(self, kept: torch.Tensor, number: int) -> float:
        """Share of the needed tokens that is kept, mean over a question's spans, and over layers where they
        keep different tokens.
        """
        spans = self._questions[number].needed
        shares = [
            ((kept >= s.start) & (kept < s.end)).sum(-1).float().mean() / (s.end - s.start) for s in spans
        ]
        return float(torch.stack(shares).mean())

    def _kept(self, options: dict[str, Any], stable: Sequence[int]) -> list[torch.Tensor]:
        """The kept document tokens for each question, int64 [S] or [layers, S]."""
        partial = self._partial(options)
        fixed = partial.kept[..., self._spans[0].end :]
        queries = self._queries(partial) if partial.needs_query else [{} for _ in self._questions]
        found = []
        for ids, query in zip(self._whole, queries, strict=True):
            wanted = query.get(partial.samkv.experimental.question_query) if partial.samkv else None
            chosen = self._engine.selector.select(partial, self._analyses, wanted, ids, stable)
            found.append(fixed if chosen is None else chosen.kept)
        return found

    def _partial(self, options: dict[str, Any]) -> PartialSelection:
        plan = ContextPlan("compose", "probes", "samkv", self._spans, options, self._scores)
        return partial_selection(plan, self._shape)

    def _prefill(self) -> None:
        """Fill ``_kv``."""
        shifts = torch.cat(
            [torch.full((span.end - span.start,), span.start, device=self._device) for span in self._spans]
        )

        def observe(layer: int, states: Sequence[LayerState]) -> None:
            k, v = torch.cat([state.k for state in states]), torch.cat([state.v for state in states])
            self._kv.append((self._engine.rotation.rotate(k, shifts), v))

        analyser = self._engine.analyser
        behind = analyser.prefix_kv.__getitem__ if analyser.prefix else None
        texts = [(self._ids[: self._spans[0].end], None), *((part, behind) for part in self._documents())]
        run(
            self._engine.model_runner,
            [
                Text(self._tensor(part), torch.arange(len(part), device=self._device), before)
                for part, before in texts
            ],
            observe,
        )

    def _documents(self) -> list[list[int]]:
        return [self._ids[span.start : span.end] for span in self._spans[1:]]

    def _queries(self, partial: PartialSelection) -> list[dict[str, torch.Tensor]]:
        """Each question's mean query and that of its last token, f32 [layers, heads, head_dim], behind what
        the partial selection reads.
        """
        by_sentence = len(partial.kept) == self._spans[0].end
        if by_sentence not in self._queries_of:
            where, start = partial.kept.to(self._device), len(self._ids)
            texts = [
                Text(
                    self._tensor(question.ids),
                    start + torch.arange(len(question.ids), device=self._device),
                    lambda layer: (self._kv[layer][0][where], self._kv[layer][1][where]),
                )
                for question in self._questions
            ]
            seen: list[list[tuple[torch.Tensor, torch.Tensor]]] = []

            def observe(layer: int, states: Sequence[LayerState]) -> None:
                seen.append([(state.q[-1].float(), state.q.float().mean(0)) for state in states])

            run(self._engine.model_runner, texts, observe)
            self._queries_of[by_sentence] = [
                {
                    name: torch.stack([layer[number][i] for layer in seen])
                    for i, name in enumerate(("last", "mean"))
                }
                for number in range(len(texts))
            ]
        return self._queries_of[by_sentence]

    def _by_head(self, number: int) -> torch.Tensor:
        """f32 [layers, kv_heads of all ranks]: recall by each head's keys alone."""
        first = self._spans[0].end
        whole = Sentences.of(self._analyses)
        tokens = whole.tokens
        parked = torch.zeros(tokens, dtype=torch.bool)
        for offset in range(SINKS):
            parked[(whole.first + offset).clip(max=tokens - 1)] = True
        query = self._queries(self._partial({"selection": "sentences", "min_tokens": 0}))[number]["last"]
        budget = max(1, round(_HEADS_KEEP * tokens))
        found = []
        for layer, (keys, _) in enumerate(self._kv):
            own = keys[first:].float()
            by_group = query[layer].unflatten(0, (own.shape[1], -1))  # [kv_heads, group, head_dim]
            logits = torch.einsum("hgd,nhd->hgn", by_group, own) / own.shape[-1] ** 0.5
            share = logits.masked_fill(parked.to(self._device), -1e9).softmax(-1).amax(1).cpu()
            kept = [first + take_best(whole.best(head), whole, budget) for head in share]
            found.append(torch.tensor([self._recall(part, number) for part in kept]))
        return self._engine.analyser.gather_heads(torch.stack(found).to(self._device)).cpu()

    def _tensor(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(ids, dtype=torch.int64).to(self._device)


def answer(engine: ProbeEngine, body: Mapping[str, Any]) -> dict[str, Any]:
    """Answer control operation `probe`: ``attention`` for a body that says so, ``selections`` for one that
    has some, ``proportion`` for one with ``stable`` layers, else ``survey``.

    ``ids`` and ``spans`` as in :class:`RecallProbe`; ``questions`` have ``ids`` and ``needed`` each;
    ``scores`` of the documents as in a plan, if it has any.
    """
    questions = [
        RecallQuestion(tuple(map(int, raw["ids"])), tuple(Span(int(a), int(b)) for a, b in raw["needed"]))
        for raw in body["questions"]
    ]
    spans = [Span(int(a), int(b)) for a, b in body["spans"]]
    given = body.get("scores")
    scores = None if given is None else RetrievalScores.from_lists(given, spans[1:])
    probe = RecallProbe(engine, [int(token) for token in body["ids"]], spans, questions, scores)
    if body.get("attention"):
        return probe.attention()
    if "selections" in body:
        return probe.selections(body["selections"])
    if "stable" not in body:
        return probe.survey()
    return probe.proportion([int(layer) for layer in body["stable"]])
