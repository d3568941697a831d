"""A turn whose prompt is laid out: its request to the engine, and whether there was room."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ragserve.answering.prompt import Prompt
from ragserve.answering.query import Query
from ragserve.answering.results import RetrievedPassage
from ragserve.engine.base import GenerateRequest
from ragserve.errors import DocumentsTooLong
from ragserve.strategy_spec import FORCE


@dataclass(frozen=True, slots=True)
class LaidOutTurn:
    """A prompt, the passages found with their numbers, of which the first ``shown`` are in it, and all the
    passages in it, by number."""

    prompt: Prompt
    found: list[RetrievedPassage]
    shown: int
    passages: list[RetrievedPassage]


def laid_out_request(query: Query, request: GenerateRequest, prompt: Prompt) -> GenerateRequest:
    """The request with its prompt."""
    return replace(
        request,
        input_ids=prompt.input_ids,
        sampling=replace(request.sampling, stop=(*request.sampling.stop, *prompt.stop)),
        spans=prompt.spans,
        options=own_options(request),
        owners=prompt.owners(request.namespace),
        unregistered=_unregistered(query, len(prompt.spans)),
    )


def _unregistered(query: Query, spans: int) -> range:
    """Numbers of the spans, the system text first, whose text came with the query."""
    if query.documents is not None:
        return range(spans)
    return range(0 if query.system is None else 1)


def check_room(query: Query, prompt: Prompt, found: int, *, alone: bool) -> None:
    """Raise DocumentsTooLong where an answer would ignore what the client gave, or rest on nothing.
    ``alone``: there are no other documents than those found."""
    if prompt.documents_kept == found or prompt.cut_to is not None:
        return
    given = query.documents is not None
    if (prompt.documents_kept or not alone) and (not given or query.overflow == "drop"):
        return
    sizes = (
        f"take {prompt.tokens_retrieved:,} tokens, and the context has room for {prompt.room:,}, apart from "
        "the question and the answer"
    )
    if given:
        raise DocumentsTooLong(
            f"The documents {sizes}.",
            hint='Send less, lower max_new_tokens, or let them be shortened: "documents_overflow": "cut".',
            param="documents",
        )
    raise DocumentsTooLong(
        f"None of the {found} retrieved passages fits: they {sizes}.",
        hint="Shorten question and history, lower max_new_tokens, or ingest with a smaller chunk_tokens.",
        param="query",
    )


def own_options(request: GenerateRequest) -> dict[str, Any]:
    """The strategy's options, without the gate's `force`."""
    return {name: value for name, value in request.options.items() if name != FORCE}
