"""State that ragserve attaches to SGLang's `Req` as ``req.ragserve``, and the fields of it that ragserve
edits.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sglang_ext.analysis.document_analysis import Analysis
from sglang_ext.context.compose.request import ComposedContext
from sglang_ext.documents.pages.types import whole_pages

if TYPE_CHECKING:
    from sglang_ext.documents.radix import DocumentRadixCache


@dataclass(slots=True)
class DocumentRequest:
    """A request whose KV becomes a document's. ``analyse``: compute the document's analysis as well.
    ``lasting``: write it to disk. ``first``: prompts begin with it, so that it has no prefix.
    """

    key: str
    namespace: str
    ids: array[int]
    analyse: bool
    lasting: bool = True
    analysis: Analysis | None = None
    first: bool = False


def outside_vocabulary(req: Any) -> str | None:
    """Say which token id of a new request's prompt the model does not have; None if it has them all.

    SGLang's ``/generate`` takes any ids. An unknown one would end the scheduler in the embedding's look-up.
    """
    if req.vocab_size is None or req.input_embeds is not None or req.multimodal_inputs is not None:
        return None
    try:
        ids = np.asarray(req.origin_input_ids, dtype=np.int64)
    except OverflowError:
        return f"token ids must lie between 0 and {req.vocab_size - 1}"
    bad = ids[(ids < 0) | (ids >= req.vocab_size)]
    return f"token id {bad[0]} is not between 0 and {req.vocab_size - 1}" if len(bad) else None


def compact(req: Any, context: ComposedContext, slots: int | None = None) -> None:
    """Show SGLang a prompt of S placeholders and the question: all its bookkeeping runs in that space.

    ``slots``: show another number of them until the request is admitted, see `shrink`."""
    count = context.slots if slots is None else slots
    ids = array("q", [0]) * count + context.ids[context.plan.question_start :]
    req.origin_input_ids = req.origin_input_ids_unpadded = ids


def prefill_whole_pages(req: Any, page_size: int, longest: int) -> None:
    """Let a document's request fill its last page, so that SGLang's tree keeps all of the document. One that
    would then exceed ``longest`` tokens stays as it is, and is found below the device.
    """
    ids = whole_pages(req.origin_input_ids, page_size)
    if len(ids) <= longest:
        req.origin_input_ids = req.origin_input_ids_unpadded = ids


def shrink(req: Any, context: ComposedContext, tree: DocumentRadixCache) -> None:
    """Compact the prompt again once the selection is known: until then S was an upper bound, or not shown."""
    surplus = len(req.origin_input_ids) - context.slots - context.question_tokens
    if surplus:
        compact(req, context)
        if req.logprob_start_len > 0:
            req.logprob_start_len -= surplus
        req.full_untruncated_fill_ids = array("q")
        req.init_next_round_input(tree)


def is_aborted(req: Any) -> bool:
    """True for a request that has ended without an answer."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    return isinstance(req.finished_reason, FINISH_ABORT)
