"""A question as the routes hand it to the answerer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ragserve.answering.messages import Message
from ragserve.answering.results import Overflow, RetrievedPassage
from ragserve.engine.base import GenerateRequest
from ragserve.engine.tool_calls import Tools

if TYPE_CHECKING:
    from ragserve.profiles.retriever_name import UsualSearch
    from ragserve.retrieval.search_options import SearchOptions


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools that the model may have called. ``choice``: ``auto``, ``required``, or the name of the one to
    call; ``parallel``: several calls may come at once."""

    tools: Tools
    choice: str = "auto"
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class Query:
    """A question, and its ``request`` to the engine, still without a prompt.

    With ``documents``, nothing is retrieved: they are the context, in their order. ``session``: the id of
    the one to go on with, or `NEW`; ``session_budget``: most tokens of its turns before the last, 0 for all,
    None for what it had; ``owner``: the API key that asks. ``names_strategy``: the request itself names one.
    ``by_pattern``: its namespaces were found by a pattern. ``private``: not for the query log. ``spend`` is
    called with numbers of tokens, those of the prompt and of the answer as it comes. ``turns``: what followed
    the question, calls of ``tools`` and their results. ``schema``: the JSON schema that the answer keeps to.
    ``usual``: the search of a query that gives none of its options; None where that is not known.
    """

    question: str
    search: SearchOptions
    request: GenerateRequest
    system: str | None = None
    history: tuple[Message, ...] = ()
    documents: list[RetrievedPassage] | None = None
    overflow: Overflow = "refuse"
    session: str | None = None
    session_budget: int | None = None
    owner: str = ""
    names_strategy: bool = False
    by_pattern: bool = False
    private: bool = False
    spend: Callable[[int], None] = lambda tokens: None
    turns: tuple[Message, ...] = ()
    tools: ToolUse | None = None
    schema: Mapping[str, Any] | None = None
    usual: UsualSearch | None = None

    @property
    def is_usual(self) -> bool:
        """It is searched for as its namespace's queries that give no options, so far as that is known, or not
        at all."""
        return self.usual is None or self.documents is not None or self.usual.is_same(self.search)
