"""Prefills documents in passes of our own: behind the prefix, and with their analyses, whose pass computes
their K and V anyway.

Where a batch has nothing but documents, the pass takes the place of SGLang's forward pass. In other batches
it follows that pass and writes over what SGLang has computed of documents without the prefix. Admission
keeps documents and other requests apart, so such batches are rare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from sglang_ext.analysis.analyser import DocumentPart, Keep
from sglang_ext.analysis.document_analysis import Analysis
from sglang_ext.analysis.forward import Kv
from sglang_ext.context.scheduler.sglang_req import DocumentRequest
from sglang_ext.diagnostics.distribution import is_traced
from sglang_ext.versions import extend_span, row_of

TOGETHER = 4096  # tokens of documents in one pass: bounds its memory
_PATIENCE = 4  # steps that others may take first


class AnalyseAll(Protocol):
    """Analyses documents together and hands over their K and V by layer (`Analyser.analyse_all`)."""

    def __call__(
        self, documents: Sequence[DocumentRequest], keep: Keep, *, whole: bool
    ) -> list[Analysis]: ...


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
            and (self._prefill is not None or all(map(_is_complete, batch.reqs)))
        )

    def replaced(self, batch: Any) -> None:
        """`run` has taken the place of SGLang's forward pass of a batch that the pass `takes`."""
        self._done, self._replaced = len(batch.reqs), True

    def follow(self, batch: Any) -> list[Any]:
        """The requests of a batch, whose forward pass is over, that `run` has to compute."""
        if self._prefill is None or self._replaced:
            return []
        return [req for req in batch.reqs if _document_of(req) is not None]

    @torch.no_grad()
    def run(self, reqs: Sequence[Any]) -> None:
        """Write the K and V of what the batch extends of documents to their slots, and attach the analyses of
        complete documents: whole ones of those to analyse.
        """
        complete = [req for req in reqs if _is_complete(req)]
        for whole in (False, True):
            for group in _groups([req for req in complete if req.ragserve.analyse == whole]):
                self._run_complete(group, whole=whole)
        for group in _groups([req for req in reqs if not _is_complete(req)]):
            self._run_parts(group)

    def _run_complete(self, reqs: Sequence[Any], *, whole: bool) -> None:
        documents = [req.ragserve for req in reqs]
        analyses = self._analyse(documents, self._keep(reqs), whole=whole)
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
        return self._table[row_of(req), start:end].to(torch.int64)

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


def waits_for_own_step(adder: Any, req: Any) -> bool:
    """True for a request that waits for the next step, so that nothing is prefilled twice: a document beside
    what is none, or the other way round, and a document of which only a part fits the step's token budget
    beside what the step has. A request waits for `_PATIENCE` steps at most.
    """
    if not adder.can_run_list or getattr(req, "ragserve_waited", 0) >= _PATIENCE:
        return False
    document, left = _document_of(req), adder.rem_chunk_tokens
    is_alike = (document is None) == (_document_of(adder.can_run_list[0]) is None)
    if is_alike and (document is None or left is None or len(document.ids) <= left):
        return False
    req.ragserve_waited = getattr(req, "ragserve_waited", 0) + 1
    return True


def _document_of(req: Any) -> DocumentRequest | None:
    """The document that a request computes; None for others, and for one that was removed meanwhile."""
    document = getattr(req, "ragserve", None)
    removed = getattr(req, "ragserve_private", False)
    return document if isinstance(document, DocumentRequest) and not removed else None


def _is_only_for_the_cache(req: Any) -> bool:
    """True for a document of whose answer nobody reads anything."""
    plain = req.grammar is None and req.sampling_params.max_new_tokens == 1 and not is_traced(req)
    return plain and _document_of(req) is not None


def _is_complete(req: Any) -> bool:
    """True for a document that is computed from its first token to its last, and is no longer than what one
    pass may have. Texts that prompts begin with have no analysis."""
    document = _document_of(req)
    if document is None or document.first or len(document.ids) > TOGETHER:
        return False
    return _range(req) == (0, len(document.ids))


def _range(req: Any) -> tuple[int, int]:
    """First token that the batch extends of a document, and the one behind the last; padding excluded."""
    longest = len(req.ragserve.ids)
    start, end = extend_span(req)
    return min(start, longest), min(end, longest)


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
