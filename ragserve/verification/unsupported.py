"""Whether an answer stands in the passages of its prompt, checked alike on probes and in use."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ragserve.answering.support import attribute
from ragserve.engine.base import GenerateRequest
from sglang_ext.wire.protocol import pieces_of

Words = Callable[[Sequence[int]], str]
"""The text of token ids (`PromptBuilder.words`)."""


def unsupported(words: Words, full: GenerateRequest, said: str, own: str) -> bool:
    """Tell whether an answer stands in no passage although that of full prefill does.

    ``full``: the request that full prefill answered, with all passages; ``said``: its answer; ``own``: the
    strategy's. Where neither stands, as on a question that the documents do not answer, the strategy is not
    at fault."""
    if said == own:
        return False
    passages = [("", words(piece)) for piece in pieces_of(full.input_ids, full.spans)[1:]]
    question = words(full.input_ids[full.spans[-1].end :]) if full.spans else ""
    return _stands(said, question, passages) and not _stands(own, question, passages)


def _stands(answer: str, question: str, passages: Sequence[tuple[str, str]]) -> bool:
    found = attribute(answer, (), question, passages)
    return bool(found) and all(each.supported for each in found)
