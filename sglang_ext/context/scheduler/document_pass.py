"""Prefills documents in passes of our own: behind the prefix, and with their analyses, whose pass computes
their K and V anyway.

Where a batch has nothing but documents, the pass takes the place of SGLang's forward pass. In other batches
it follows that pass and writes over what SGLang has computed of documents without the prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from sglang_ext.analysis.analyser import DocumentPart, Keep
from sglang_ext.analysis.document_analysis import Analysis
from sglang_ext.analysis.forward import Kv
from sglang_ext.context.scheduler.sglang_req import DocumentRequest
from sglang_ext.diagnostics.distribution import is_traced

TOGETHER = 4096  # tokens of documents in one pass: bounds its memory

AnalyseAll = Callable[[Sequence[DocumentRequest], Keep], list[Analysis]]
"""Analyses documents together and hands over their K and V by layer (`Analyser.analyse_all`)."""

Prefill = Callable[[Sequence[DocumentPart], Keep], None]
"""Prefills parts of documents together behind the prefix (`Analyser.prefill`)."""


class DocumentPass:
    """Computes the documents of a batch. Per rank."""

    def __init__(
        self,
        model_runner: Any,
        table: torch.Tensor,
        analyse: AnalyseAll,
        prefill: Prefill | None = None,
        *,
        possible: bool,
    ) -> None:
        """``table``: slots of each request's tokens. ``prefill``: None where documents have no prefix: then
        SGLang prefills those without an analysis. ``possible``: the pass may take the place of SGLang's.
        """
        self._runner = model_runner
        self._table = table
        self._analyse = analyse
        self._prefill = prefill
        self._possible = possible
        self._done = 0  # requests of the batch at hand that are prefilled
        self._replaced = False  # the pass has computed the batch at hand

    def takes(self, batch: Any) -> bool:
        """True for a batch of documents alone that the pass computes. The same on every rank."""
        self._replaced = False
        return (
            self._possible
            and batch.forward_mode.name == "EXTEND"
            and not (batch.return_logprob or batch.return_hidden_states)
            and all(map(_is_only_for_the_cache, batch.reqs))
            and (self._prefill is not None or all(map(_is_whole, batch.reqs)))
        )

    def replace(self, batch: Any) -> None:
        """Compute a batch that the pass `takes`, in place of SGLang's forward pass."""
        self.run(batch.reqs)
        self._done, self._replaced = len(batch.reqs), True

    def follow(self, batch: Any) -> list[Any]:
        """The requests of a batch, whose forward pass is over, that `run` has to compute."""
        if self._prefill is None or self._replaced:
            return []
        return [req for req in batch.reqs if _document_of(req) is not None]

    @torch.no_grad()
    def run(self, reqs: Sequence[Any]) -> None:
        """Write the K and V of what the batch extends of documents to their slots, and attach the analyses of
        whole documents.
        """
        for group in _groups([req for req in reqs if _is_whole(req)]):
            self._run_whole(group)
        for group in _groups([req for req in reqs if not _is_whole(req)]):
            self._run_parts(group)

    def _run_whole(self, reqs: Sequence[Any]) -> None:
        documents = [req.ragserve for req in reqs]
        analyses = self._analyse(documents, self._keep(reqs))
        for document, analysis in zip(documents, analyses, strict=True):
            document.analysis = analysis

    def _run_parts(self, reqs: Sequence[Any]) -> None:
        if self._prefill is None:
            return
        parts = []
        for req in reqs:
            start, end = _range(req)
            document = req.ragserve
            before = self._before(req, start)
            parts.append(DocumentPart(document.ids[start:end], start, before, first=document.first))
        self._prefill(parts, self._keep(reqs))

    def _before(self, req: Any, start: int) -> Callable[[int], Kv]:
        pool, slots = self._runner.token_to_kv_pool, self._slots(req, 0, start)
        return lambda layer: (pool.get_key_buffer(layer)[slots], pool.get_value_buffer(layer)[slots])

    def _keep(self, reqs: Sequence[Any]) -> Keep:
        """What writes K and V of the tokens that the requests extend."""
        pool = self._runner.token_to_kv_pool
        slots = torch.cat([self._slots(req, *_range(req)) for req in reqs])

        def keep(layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
            for buffer, part in ((pool.get_key_buffer(layer), k), (pool.get_value_buffer(layer), v)):
                buffer[slots] = part.to(buffer.dtype)

        return keep

    def _slots(self, req: Any, start: int, end: int) -> torch.Tensor:
        return self._table[req.req_pool_idx, start:end].to(torch.int64)

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


def _document_of(req: Any) -> DocumentRequest | None:
    """The document that a request computes; None for others, and for one that was removed meanwhile."""
    document = getattr(req, "ragserve", None)
    removed = getattr(req, "ragserve_private", False)
    return document if isinstance(document, DocumentRequest) and not removed else None


def _is_only_for_the_cache(req: Any) -> bool:
    """True for a document of whose answer nobody reads anything."""
    plain = req.grammar is None and req.sampling_params.max_new_tokens == 1 and not is_traced(req)
    return plain and _document_of(req) is not None


def _is_whole(req: Any) -> bool:
    """True for a document to analyse that is computed from its first token to its last."""
    document = _document_of(req)
    return document is not None and document.analyse and _range(req) == (0, len(document.ids))


def _range(req: Any) -> tuple[int, int]:
    """First token that the batch extends of a document, and the one behind the last; padding excluded."""
    end = len(req.ragserve.ids)
    return min(req.extend_range.start, end), min(req.extend_range.end, end)


def _groups(reqs: Sequence[Any]) -> Iterator[list[Any]]:
    """Consecutive documents of at most `TOGETHER` tokens, or a single one."""
    group: list[Any] = []
    tokens = 0
    for req in reqs:
        start, end = _range(req)
        if start == end:
            continue
        if group and tokens + end - start > TOGETHER:
            yield group
            group, tokens = [], 0
        group.append(req)
        tokens += end - start
    if group:
        yield group
