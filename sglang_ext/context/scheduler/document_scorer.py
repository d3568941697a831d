"""Control operation `score`: rank documents for a question by their stored analyses.

One forward pass of the system text and the question, in memory; no document's KV is read. All ranks take part
in every call.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sglang_ext.analysis.forward import LayerState, Text, run
from sglang_ext.context.scheduler.document_analyses import DocumentAnalyses
from sglang_ext.context.selection.document_scores import document_scores
from sglang_ext.ranks.ranks import Ranks
from sglang_ext.tensors.rope import Rotation
from sglang_ext.wire.protocol import PlanError, document_key
from sglang_ext.wire.score_limits import DOCUMENT_TOKENS, SYSTEM_TOKENS

_READ_S = 5.0  # of waiting for analyses on disk; those that take longer have no score
_QUESTION_TOKENS = 256  # the last ones of a longer question


class DocumentScorer:
    """Answers the operation on one rank. Scheduler thread only."""

    def __init__(
        self, model_runner: Any, rotation: Rotation, analyses: DocumentAnalyses, ranks: Ranks
    ) -> None:
        self._runner = model_runner
        self._rotation = rotation
        self._analyses = analyses
        self._ranks = ranks
        self._device = torch.device(model_runner.device)

    def answer(self, body: Mapping[str, Any], fingerprint: str) -> dict[str, Any]:
        """Return ``scores``, a number for each of ``documents`` (token ids), None for one without an
        analysis; or what to ask again with while analyses are read.

        ``system`` and ``question`` are token ids; ``now``: seconds, the same on every rank. Raises PlanError
        for a question without tokens, and for more documents or system text than `score_limits`."""
        system, question = list(body["system"]), list(body["question"])[-_QUESTION_TOKENS:]
        if not question:
            raise PlanError("a question without tokens ranks nothing")
        tokens = sum(map(len, body["documents"]))
        if tokens > DOCUMENT_TOKENS or len(system) > SYSTEM_TOKENS:
            raise PlanError(
                f"score takes at most {DOCUMENT_TOKENS:,} tokens of documents and {SYSTEM_TOKENS:,} of "
                f"system text, not {tokens:,} and {len(system):,}: send fewer or shorten it"
            )
        until = body.get("pending") or body["now"] + _READ_S
        namespace = str(body["namespace"])
        keys = [document_key(namespace, fingerprint, array("q", ids)) for ids in body["documents"]]
        lengths = {key: len(ids) for key, ids in zip(keys, body["documents"], strict=True)}
        found = self._analyses.stored(lengths)
        if found is None and body["now"] < until:
            return {"pending": until}
        if found is None:
            found = self._analyses.stored(lengths, wait=False) or {}
        by_key: dict[str, float | None] = dict.fromkeys(keys)
        if found:
            queries = self._queries(system, question)
            scores = document_scores(queries, len(system), list(found.values()), self._rotation)
            by_key |= dict(zip(found, self._ranks.sum(scores).tolist(), strict=True))
        return {"scores": [by_key[key] for key in keys]}

    def _queries(self, system: list[int], question: list[int]) -> torch.Tensor:
        """f32 [layers, T, heads, head_dim]: queries of the question's tokens behind the system text."""
        ids = torch.tensor([*system, *question], dtype=torch.int64).to(self._device)
        layers: list[torch.Tensor] = []

        def observe(layer: int, states: Sequence[LayerState]) -> None:
            layers.append(states[0].q[-len(question) :].float())

        run(self._runner, [Text(ids, torch.arange(len(ids), device=self._device))], observe)
        return torch.stack(layers)
