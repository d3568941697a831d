"""Control operation `attend`: what a question attends to in the turns of a session, by the KV of them that
the session's key holds.

The signal is `attention` of the sentence selection, over the keys of the retrieval heads as they lie in the
pool: each turn's part is to it what a document is elsewhere. The question is one forward pass behind the last
prompt, over its KV. All ranks take part in every call.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from sglang_ext.analysis.analyser import Analyser
from sglang_ext.analysis.document_analysis import Analysis, quantize
from sglang_ext.analysis.forward import PAIRS_PER_ROW, Kv, LayerState, Text, run
from sglang_ext.context.selection.blocks import Blocks
from sglang_ext.context.selection.choose import Selector
from sglang_ext.context.selection.signals.attention import attention
from sglang_ext.ranks.ranks import Ranks
from sglang_ext.tensors.rope import Rotation
from sglang_ext.wire.protocol import ContextPlan, PlanError, Span, composed_session_key
from sglang_ext.wire.request_options import SamKvOptions

if TYPE_CHECKING:
    from sglang_ext.documents.radix import DocumentRadixCache

_LARGEST_BLOCK = 64
# Tokens that the model runs for one question, while all other requests wait. SGLang drops the end of a
# dialogue first, so all of its last turn may be among them.
_MOST_TOKENS = 4096
# On a CPU also the work, in tokens that go through all layers: about a second of a small model. A row costs
# as much as 33 behind 32,768 tokens.
_CPU_MOST_WORK = 4096


@dataclass(frozen=True, slots=True)
class TurnPart:
    """A passage, or a question with its answer: tokens ``span`` of the prompt with number ``prompt``.
    ``begins``: where its sentences begin, counted in the part, ascending from 0."""

    prompt: int
    span: Span
    begins: tuple[int, ...]

    @classmethod
    def of(cls, raw: Sequence[Any], prompts: Sequence[Sequence[int]]) -> TurnPart:
        """Parse ``[prompt, start, end, begins]``. Raises PlanError."""
        try:
            prompt, start, end = map(int, raw[:3])
            begins = tuple(map(int, raw[3]))
            inside = 0 <= prompt < len(prompts) and 0 <= start < end <= len(prompts[prompt])
        except (TypeError, ValueError, IndexError) as error:
            raise PlanError(f"not a part of a turn: {error!r}") from None
        ascend = all(a < b for a, b in pairwise((*begins, end - start)))
        if not inside or begins[:1] != (0,) or not ascend:
            raise PlanError(
                "a part of a turn is [prompt, start, end, begins]: tokens of one of the prompts, and the "
                "ascending places in it where sentences begin, the first of them 0"
            )
        return cls(prompt, Span(start, end), begins)


class SessionAttention:
    """Answers the operation on one rank. Scheduler thread only."""

    def __init__(
        self,
        model_runner: Any,
        tree: DocumentRadixCache,
        *,
        rotation: Rotation,
        analyser: Analyser,
        selector: Selector,
        ranks: Ranks,
    ) -> None:
        """``tree``: the radix cache, for `DocumentRadixCache.leading`."""
        self._runner = model_runner
        self._pool = model_runner.token_to_kv_pool
        self._tree = tree
        self._rotation = rotation
        self._analyser = analyser
        self._selector = selector
        self._ranks = ranks
        self._device = torch.device(model_runner.device)

    def answer(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``attention``: for each of the ``parts`` one number a sentence, from 0 to 1, the highest of
        all parts 1; None for a part whose KV is not all there, and for all parts where more than
        `_MOST_TOKENS` tokens would have to be computed, or on a CPU more than `_CPU_MOST_WORK`.

        ``key``: the session's. ``prompts``: token ids that were computed under it. ``question``: token ids,
        as they would follow the last prompt. ``parts``: see `TurnPart.of`. Raises PlanError."""
        prompts = [array("q", ids) for ids in body["prompts"]]
        question = array("q", body["question"])
        parts = [TurnPart.of(raw, prompts) for raw in body["parts"]]
        if not question or not prompts:
            raise PlanError("attend needs a question with tokens and at least one prompt of the session")
        slots = [self._held(ids, str(body["key"])) for ids in prompts]
        there = self._ranks.min_votes([len(own) for own in slots])
        slots = [own[:count] for own, count in zip(slots, there, strict=True)]
        found: list[list[float] | None] = [None] * len(parts)
        held = [n for n, part in enumerate(parts) if part.span.end <= there[part.prompt]]
        behind = [*prompts[-1][there[-1] :], *question]
        if held and self._in_time(len(behind), there[-1]):
            rows = [slots[parts[n].prompt][parts[n].span.start : parts[n].span.end] for n in held]
            query = self._query(slots[-1], behind)
            shares = self._signal([parts[n] for n in held], rows, query, there[-1] + len(behind), question)
            for n, own in zip(held, shares.split([len(parts[n].begins) for n in held]), strict=True):
                found[n] = [round(share, 4) for share in own.tolist()]
        return {"attention": found}

    def _in_time(self, rows: int, before: int) -> bool:
        """Whether all others can wait while ``rows`` tokens run behind ``before`` others."""
        work = rows * (1 + (before + rows / 2) / PAIRS_PER_ROW)
        return rows <= _MOST_TOKENS and (self._device.type != "cpu" or work <= _CPU_MOST_WORK)

    def _held(self, ids: array[int], key: str) -> torch.Tensor:
        """Slots, int64 on the device, of the leading tokens that are held, exact or composed: the longer."""
        ways = [self._tree.leading(ids, each) for each in (key, composed_session_key(key))]
        parts = max(ways, key=lambda way: sum(map(len, way)))
        if not parts:
            return torch.empty(0, dtype=torch.int64, device=self._device)
        return torch.cat(parts).to(device=self._device, dtype=torch.int64)

    def _query(self, slots: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
        """f32 [layers, heads, head_dim]: the query of the last of ``ids``, which follow the tokens in
        ``slots``, rotated to its position."""

        def context(layer: int) -> Kv:
            return self._pool.get_key_buffer(layer)[slots], self._pool.get_value_buffer(layer)[slots]

        tokens = torch.tensor(list(ids), dtype=torch.int64).to(self._device)
        places = len(slots) + torch.arange(len(ids), device=self._device)
        found: list[torch.Tensor] = []

        def observe(layer: int, states: Sequence[LayerState]) -> None:
            found.append(states[0].q[-1].float())

        run(self._runner, [Text(tokens, places, context if len(slots) else None)], observe)
        return torch.stack(found)

    def _signal(
        self,
        parts: Sequence[TurnPart],
        rows: Sequence[torch.Tensor],
        query: torch.Tensor,
        end: int,
        question: array[int],
    ) -> torch.Tensor:
        """f32 [sentences]: the signal over the parts, in one row that ends at the question; ``end``: the
        position behind it."""
        lengths = [len(own) for own in rows]
        start = end - len(question)
        spans, at = [], start - sum(lengths)
        for length in lengths:
            spans.append(Span(at, at + length))
            at += length
        options = SamKvOptions()
        evidence = self._selector.evidence(
            options,
            Blocks.build(spans, [_LARGEST_BLOCK] * len(spans), initial=0, local=0),
            ContextPlan("compose", "", spans=(Span(0, 0), *spans)),
            [self._analysis(part, own) for part, own in zip(parts, rows, strict=True)],
            query,
            torch.empty(0, dtype=torch.int64),
        )
        shares = attention(evidence)
        return torch.zeros(len(evidence.sentences)) if shares is None else shares

    def _analysis(self, part: TurnPart, slots: torch.Tensor) -> Analysis:
        """What the signal reads of a part: its sentences, and its keys rotated to a position of their own."""
        begins = torch.zeros(len(slots), dtype=torch.uint8)
        begins[list(part.begins)] = 1
        back = torch.full((len(slots),), -part.span.start, dtype=torch.int64, device=self._device)
        angles = self._rotation.angles(back)
        first, heads = self._pool.get_key_buffer(0), self._analyser.heads
        keys = []
        for layer, head in heads:
            own = self._pool.get_key_buffer(layer)[slots, head][:, None].float()
            keys.append(quantize(self._rotation.turn(own, *angles)[:, 0]))
        token_k = torch.empty(len(slots), 0, first.shape[2], dtype=torch.int8, device=self._device)
        scale = torch.empty(len(slots), 0, dtype=torch.float16, device=self._device)
        if keys:
            token_k, scale = (torch.stack(each, dim=1) for each in zip(*keys, strict=True))
        return Analysis.of_sentences(
            begins,
            _LARGEST_BLOCK,
            mean_k=torch.empty(0, 0, *first.shape[1:], dtype=torch.int8),
            heads=torch.tensor(heads, dtype=torch.uint8).view(-1, 2),
            token_k=token_k,
            token_k_scale=scale,
        )
