"""Whether the documents have an answer at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ragserve.answering.follow_ups import Found
    from ragserve.retrieval.search_options import SearchOptions


def doubts(search: Found, options: SearchOptions) -> str | None:
    """What speaks against an answer in what was found; None if nothing does."""
    if not search.passages and options.min_score is not None:
        return f"no passage has a score of {options.min_score:g} or more"
    if not search.passages and options.not_found != "off":
        return "no passage was found"
    if search.evidence is not None and not search.evidence.likely:
        return search.evidence.reason
    return None


def refuses(search: Found, options: SearchOptions) -> bool:
    """Whether a doubt is the answer, and the model is not asked."""
    below = not search.passages and options.min_score is not None
    return below or options.not_found == "refuse"
