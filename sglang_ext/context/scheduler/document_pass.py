"""Prefills documents in the pass that analyses them, which computes their K and V anyway.

SGLang's own forward pass would compute them once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from sglang_ext.analysis.document_analysis import Analysis
from sglang_ext.context.scheduler.sglang_req import DocumentRequest
from sglang_ext.diagnostics.distribution import is_traced

TOGETHER = 4096  # tokens of documents in one pass: bounds its memory

AnalyseAll = Callable[
    [Sequence[DocumentRequest], Callable[[int, torch.Tensor, torch.Tensor], None]], list[Analysis]
]
"""Analyses documents together and hands over their K and V by layer (`Analyser.analyse_all`)."""


class DocumentPass:
    """Takes the place of SGLang's forward pass for batches of documents to analyse. Per rank."""

    def __init__(
        self, model_runner: Any, table: torch.Tensor, analyse: AnalyseAll, *, possible: bool
    ) -> None:
        """``table``: slots of each request's tokens. ``possible``: the model attends plainly, in KV of its
        own dtype.
        """
        self._runner = model_runner
        self._table = table
        self._analyse = analyse
        self._possible = possible
        self._done = 0  # requests of the batch at hand that are prefilled

    def takes(self, batch: Any) -> bool:
        """True for a batch of whole documents alone, of which nothing is cached. The same on every rank."""
        return (
            self._possible
            and batch.forward_mode.name == "EXTEND"
            and not (batch.return_logprob or batch.return_hidden_states)
            and all(map(_is_whole, batch.reqs))
        )

    @torch.no_grad()
    def run(self, batch: Any) -> None:
        """Write the K and V of the batch's documents to their slots, and attach their analyses."""
        for reqs in _groups(batch.reqs):
            self._run_together(reqs)
        self._done = len(batch.reqs)

    def _run_together(self, reqs: Sequence[Any]) -> None:
        pool = self._runner.token_to_kv_pool
        slots = torch.cat([self._table[r.req_pool_idx, : len(r.ragserve.ids)] for r in reqs]).to(torch.int64)

        def keep(layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
            for buffer, part in ((pool.get_key_buffer(layer), k), (pool.get_value_buffer(layer), v)):
                buffer[slots] = part.to(buffer.dtype)

        documents = [req.ragserve for req in reqs]
        for document, analysis in zip(documents, self._analyse(documents, keep), strict=True):
            document.analysis = analysis

    def output(self) -> Any:
        """SGLang's `ModelRunnerOutput`, once, with any token, which nobody reads; None for other batches."""
        done, self._done = self._done, 0
        if not done:
            return None
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput
        from sglang.srt.model_executor.model_runner import ModelRunnerOutput

        logits = torch.zeros(done, self._runner.model_config.vocab_size, device=self._runner.device)
        return ModelRunnerOutput(
            logits_output=LogitsProcessorOutput(next_token_logits=logits), can_run_graph=False
        )

    def drop(self) -> None:
        """The forward pass is over."""
        self._done = 0


def would_be_cut(adder: Any, req: Any) -> bool:
    """True for a document to analyse of which only a part fits the step's token budget beside what the step
    has. It waits for the next step: cut in two, it and all documents beside it would be prefilled twice.
    """
    document, left = getattr(req, "ragserve", None), adder.rem_chunk_tokens
    if not isinstance(document, DocumentRequest) or not document.analyse or left is None:
        return False
    return bool(adder.can_run_list) and len(document.ids) > left


def _is_whole(req: Any) -> bool:
    document = getattr(req, "ragserve", None)
    if not isinstance(document, DocumentRequest) or not document.analyse or is_traced(req):
        return False
    if getattr(req, "ragserve_private", False):  # removed meanwhile
        return False
    whole = (0, len(document.ids)) == (req.extend_range.start, req.extend_range.end)
    return whole and req.grammar is None and req.sampling_params.max_new_tokens == 1


def _groups(reqs: Sequence[Any]) -> Iterator[list[Any]]:
    """Consecutive documents of at most `TOGETHER` tokens, or a single one."""
    group: list[Any] = []
    tokens = 0
    for req in reqs:
        n = len(req.ragserve.ids)
        if group and tokens + n > TOGETHER:
            yield group
            group, tokens = [], 0
        group.append(req)
        tokens += n
    if group:
        yield group
