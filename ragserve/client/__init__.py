"""Clients of the REST API: `Client` and, for asyncio, `AsyncClient`.

Types of answers are the server's own. Errors are those of `ragserve.errors`, with the server's reason, hint
and code; `Unavailable` if no server answers."""

from ragserve.answering.results import Answer, Citation, RetrievedPassage, SearchResults
from ragserve.api.views import (
    ChunkView,
    DocumentView,
    DoneEvent,
    Info,
    JobDetail,
    JobItemView,
    JobView,
    MessageEvent,
    NamespaceView,
    RetrieveAnswer,
    SessionView,
)
from ragserve.client.arguments import (
    ContextDocument,
    IngestArguments,
    QueryArguments,
    SearchArguments,
    TextDocument,
    Turn,
)
from ragserve.client.connections import AsyncClient, Client
from ragserve.client.sse_reader import QueryEvent

__all__ = [
    "Answer",
    "AsyncClient",
    "ChunkView",
    "Citation",
    "Client",
    "ContextDocument",
    "DocumentView",
    "DoneEvent",
    "Info",
    "IngestArguments",
    "JobDetail",
    "JobItemView",
    "JobView",
    "MessageEvent",
    "NamespaceView",
    "QueryArguments",
    "QueryEvent",
    "RetrieveAnswer",
    "RetrievedPassage",
    "SearchArguments",
    "SearchResults",
    "SessionView",
    "TextDocument",
    "Turn",
]
