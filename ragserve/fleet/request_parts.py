"""Parts of a request: by which its worker is chosen, and for each of several workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ragserve.engine.base import GenerateRequest

PREFIX_TOKENS = 64  # of a prompt without documents, by which its worker is chosen


def documents_of(request: GenerateRequest) -> list[list[int]]:
    """Token ids by which a request's worker is chosen: the system text and the documents, or what its prompt
    begins with."""
    spans = [request.input_ids[span.start : span.end] for span in request.spans]
    return spans or [request.input_ids[:PREFIX_TOKENS]]


def part(request: GenerateRequest, places: Sequence[int]) -> GenerateRequest:
    """The request for some of a request's spans."""
    return replace(
        request,
        spans=tuple(request.spans[place] for place in places),
        owners=tuple(request.owners[place] for place in places) if request.owners else (),
        unregistered=[number for number, place in enumerate(places) if place in request.unregistered],
    )
