"""Arguments of the clients' methods: the fields of request bodies. What is left out, or None, is the server's
to choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, NotRequired, TypedDict

from ragserve.answering.results import Overflow
from ragserve.config import StrategyName
from ragserve.setting_groups.answering import FollowUps, NotFound, Retrieval, Spelling

FileToIngest = str | Path | tuple[str, Path | bytes | BinaryIO]
"""A path, or a name and a path or content. The name, of a path its last part, identifies the document."""


class SearchArguments(TypedDict, total=False):
    """How to search (docs/retrieval.md)."""

    filter: Mapping[str, Any] | None
    retrieval: Retrieval | None
    follow_ups: FollowUps | None
    spelling: Spelling | None
    rerank: str | None
    rerank_candidates: int | None
    neighbours: int | None
    context_tokens: int | None
    min_score: float | None
    dedupe: float | None
    not_found: NotFound | None


class WhereArguments(TypedDict, total=False):
    """Where to search. ``namespaces``: several, by names and by patterns such as ``docs-*``, in place of
    ``namespace``."""

    namespace: str | None
    namespaces: Sequence[str] | None


class RetrieveArguments(SearchArguments, WhereArguments, total=False):
    """Where to search, and for how many passages; ``history``: earlier turns, oldest first."""

    k: int | None
    history: Sequence[Turn] | None


class QueryArguments(RetrieveArguments, total=False):
    """How to answer; ``documents``: context to use instead of retrieval; ``session``: ``new``, or the id of
    one that goes on; ``session_budget``: most tokens of its turns before the last one."""

    strategy: StrategyName | None
    strategy_options: Mapping[str, Any] | None
    decode: Mapping[str, Any] | None
    prefill: Mapping[str, Any] | None
    max_new_tokens: int | None
    temperature: float | None
    top_p: float | None
    seed: int | None
    stop: Sequence[str] | None
    system: str | None
    documents: Sequence[ContextDocument] | None
    documents_overflow: Overflow | None
    session: str | None
    session_budget: int | None


class NamespaceArguments(TypedDict, total=False):
    """Defaults of a namespace's queries. ``strategy`` with its options, as the server's setting has it."""

    system: str | None
    k: int | None
    min_score: float | None
    retrieval: Retrieval | None
    not_found: NotFound | None
    strategy: str | None


class Turn(TypedDict):
    role: Literal["user", "assistant"]
    content: str


class ContextDocument(TypedDict):
    text: str
    title: NotRequired[str]
    source: NotRequired[str | None]


class TextDocument(TypedDict):
    """A text to ingest; a text of the same name is replaced."""

    name: str
    text: str
    title: NotRequired[str]
    metadata: NotRequired[Mapping[str, Any]]
    labels: NotRequired[Sequence[str]]


class IngestArguments(TypedDict, total=False):
    """Where files go; ``metadata``: of all of them, for filters; ``labels``: who may see them; ``warm``: then
    compute their KV, too."""

    namespace: str | None
    metadata: Mapping[str, Any] | None
    labels: Sequence[str] | None
    warm: bool | None
