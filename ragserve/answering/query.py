"""A question as the routes hand it to the answerer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ragserve.answering.prompt import Message
from ragserve.answering.results import Overflow, RetrievedPassage
from ragserve.engine.base import GenerateRequest

if TYPE_CHECKING:
    from ragserve.retrieval.search_options import SearchOptions


@dataclass(frozen=True, slots=True)
class Query:
    """A question, and its ``request`` to the engine, still without a prompt.

    With ``documents``, nothing is retrieved: they are the context, in their order. ``session``: the id of
    the one to go on with, or `NEW`; ``owner``: the API key that asks. ``names_strategy``: the request itself
    names one."""

    question: str
    search: SearchOptions
    request: GenerateRequest
    system: str | None = None
    history: tuple[Message, ...] = ()
    documents: list[RetrievedPassage] | None = None
    overflow: Overflow = "refuse"
    session: str | None = None
    owner: str = ""
    names_strategy: bool = False
