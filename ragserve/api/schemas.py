"""Bodies of requests, and of answers other than a query's, which `ragserve.answering.results` has. Limits
that are settings are checked later."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ragserve.answering.results import RetrievalTimings, RetrievedPassage
from ragserve.api.body import NonBlank, RequestModel, Text
from ragserve.config import Namespace, StrategyName
from ragserve_index.filters import Filter

MAX_K = 64
MAX_DOCUMENTS = 256
MAX_TEXT_CHARS = 4 * 2**20
Stop = Annotated[str, Field(min_length=1, max_length=256)]
MetadataKey = Annotated[Text, Field(min_length=1, max_length=128)]
MetadataText = Annotated[Text, Field(max_length=4096)]
Metadata = Annotated[
    dict[
        MetadataKey,
        MetadataText | bool | int | float | Annotated[list[MetadataText], Field(max_length=256)] | None,
    ],
    Field(max_length=64, description="Own fields of the documents, for filters."),
]


class HistoryMessage(RequestModel):
    role: Literal["user", "assistant"]
    content: Annotated[Text, Field(max_length=65_536)]


class GivenDocument(RequestModel):
    """Context given with the query instead of retrieved."""

    text: Annotated[NonBlank, Field(max_length=MAX_TEXT_CHARS)]
    title: Annotated[Text, Field(max_length=1024)] = ""
    source: Annotated[Text, Field(max_length=4096)] | None = Field(
        None, description="Handed back in citations."
    )


class RetrieveRequest(RequestModel):
    """What to search for, and where."""

    query: NonBlank = Field(
        description="The question. Its largest length is in /info, limits.max_query_chars."
    )
    namespace: Namespace = Field("default", description="Where to search.")
    k: int | None = Field(
        None,
        ge=1,
        le=MAX_K,
        description="Passages; fewer where the namespace has fewer. Default: the server's top_k.",
    )
    filter: Filter | None = Field(
        None,
        description="Only passages of documents whose fields match: metadata keys, doc_id, source, title, mime.",
    )


class QueryRequest(RetrieveRequest):
    """A question, and how to answer it."""

    strategy: StrategyName | None = Field(
        None,
        description="Exact: `full`, `prefix`. `auto`: the verified one expected to be fastest. "
        "Composed from cached documents, approximate: `concat`, `epic`, `cacheblend`, `random`, `samkv`. "
        "Default: the server's, with its options.",
    )
    strategy_options: dict[str, bool | int | float | str] = Field(
        default_factory=dict,
        max_length=16,
        description="Of a composed strategy: `keep` (share), `recompute` (rule), `share`, `first`, `seed`, `update`, `rotate`, and samkv's "
        "own; and `force`: answer though not verified.",
    )
    decode: dict[str, bool | int | float | str] = Field(
        default_factory=dict,
        max_length=16,
        description="With `--sparse-attention on`, how decode steps attend, where it differs from the server's: `mode` (`dense`, "
        "`hierarchical`, `progressive`), `budget` (tokens), `reuse` (steps), `threshold`, `dense_below` (tokens), `streaming`.",
    )
    stream: bool = Field(False, description="Answer as server-sent events.")
    max_new_tokens: int | None = Field(
        None, ge=1, le=32_768, description="Length of the answer in tokens. Default: the server's."
    )
    temperature: float = Field(0.0, ge=0, le=2, description="0: greedy.")
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = Field(None, ge=0, le=2**31 - 1, description="Makes sampling repeatable.")
    stop: list[Stop] = Field(
        default_factory=list, max_length=16, description="The answer ends before any of these."
    )
    system: Annotated[Text, Field(max_length=8192)] | None = Field(
        None, description="Replaces the system text."
    )
    history: list[HistoryMessage] = Field(
        default_factory=list,
        description="Earlier turns, oldest first. A question of fewer than 6 words is searched for together with the user's previous turn.",
    )
    documents: list[GivenDocument] | None = Field(
        None,
        max_length=MAX_DOCUMENTS,
        description="Context, in order, instead of retrieval: nothing is embedded or searched, and namespace need not exist.",
    )


class RetrieveTimings(RetrievalTimings):
    total_ms: float


class RetrieveAnswer(BaseModel):
    """Passages, best first."""

    results: list[RetrievedPassage]
    namespace: str
    index_version: int = Field(description="Version of the namespace that was searched.")
    timings: RetrieveTimings
    request_id: str


class InlineText(RequestModel):
    name: Annotated[NonBlank, Field(max_length=1024)] = Field(
        description="Identifies the document: the same name replaces it."
    )
    text: Annotated[Text, Field(max_length=MAX_TEXT_CHARS)]
    title: Annotated[Text, Field(max_length=1024)] | None = None
    metadata: Metadata = Field(default_factory=dict)


class IngestTexts(RequestModel):
    """Documents as text."""

    namespace: Namespace = Field("default", description="Created if it does not exist.")
    texts: list[InlineText] = Field(min_length=1, max_length=1000)
    warm: bool = Field(
        False, description="When they are indexed, compute their KV into the document cache, as a second job."
    )


class JobItemView(BaseModel):
    source: str
    state: str = Field(
        description="`pending`, `indexed`, `warmed`, `unchanged`, `removed`, `failed` or `skipped`."
    )
    reason: str | None = Field(description="Why it failed or was skipped.")
    chunks: int
    tokens: int
    size_bytes: int
    doc_id: str | None = Field(description="The document it became.")


class JobView(BaseModel):
    """An ingestion or warm-up job."""

    job_id: str
    kind: str = Field(
        description="`upload`, `paths` or `stdin`: an ingestion; `warm`: a warm-up of the document cache."
    )
    namespace: str
    state: str = Field(
        description="`queued`, `running`, `done`, `failed` or `cancelled`. A job with failed files is still `done`."
    )
    counts: dict[str, int] = Field(description="Sources (files, texts) by state.")
    n_items: int
    chunks: int = Field(description="Indexed (or computed) so far, as are tokens and size_bytes.")
    tokens: int
    size_bytes: int
    cancel_requested: bool = Field(description="It ends after the source at hand.")
    error: str | None = Field(description="Why the job as a whole failed.")
    created_at: float = Field(description="Unix seconds.")
    updated_at: float = Field(description="Unix seconds.")


class JobDetail(JobView):
    items: list[JobItemView] = Field(description="One page of its sources, in the order they were added.")
    next: int | None = Field(description="Give as `after` for the next page; null on the last.")


class JobList(BaseModel):
    jobs: list[JobView] = Field(description="Newest first.")


class DocumentView(BaseModel):
    doc_id: str
    namespace: str
    source: str
    title: str
    mime: str
    size_bytes: int
    n_chunks: int
    n_tokens: int
    created_at: float = Field(description="Unix seconds.")
    updated_at: float = Field(description="Unix seconds.")
    metadata: dict[str, Any]


class DocumentList(BaseModel):
    documents: list[DocumentView] = Field(description="Ordered by doc_id.")
    next: str | None = Field(description="Give as `after` for the next page; null on the last.")


class ChunkView(BaseModel):
    chunk_id: int
    doc_id: str
    ordinal: int = Field(description="Place in the document, from 0.")
    text: str
    start: int
    end: int
    page: int | None
    n_tokens: int


class ChunkList(BaseModel):
    chunks: list[ChunkView] = Field(description="In the document's order.")
    next: int | None = Field(description="Give as `after` for the next page; null on the last.")


class NamespaceView(BaseModel):
    name: str
    embedder: str
    dim: int
    index_type: str
    version: int = Field(description="Grows by one with each change to its documents.")
    n_documents: int
    n_chunks: int
    n_tokens: int


class NamespaceList(BaseModel):
    namespaces: list[NamespaceView]


class Ready(BaseModel):
    ready: bool
    missing: list[str] = Field(description="What is not ready yet, in words.")


class Info(BaseModel):
    """What is serving."""

    model_config = ConfigDict(protected_namespaces=())

    versions: dict[str, str]
    model: str
    tokenizer: str = Field(description="Path or id of the tokenizer that prompts are laid out with.")
    system_prompt: str | None = Field(
        description="Replaces the system text of the model's template, where the server was given one."
    )
    engine: dict[str, Any]
    embedder: dict[str, Any]
    strategies: list[str]
    defaults: dict[str, Any] = Field(description="What a query gets that does not say.")
    limits: dict[str, int]
    index: dict[str, Any]


class ErrorDetail(BaseModel):
    message: str = Field(description="What happened, and what to do.")
    type: Literal["invalid_request_error", "server_error"]
    code: str = Field(description="Stable and machine-readable.")
    param: str | None = Field(description="The field at fault.")
    hint: str | None = Field(description="What to do, alone.")
    request_id: str | None


class MessageEvent(BaseModel):
    """SSE `message`: a piece of the answer; joined they are the whole of it."""

    text: str


class DoneEvent(BaseModel):
    """SSE `done`: nothing follows. A stream that ends without it was broken off."""

    request_id: str


class ErrorBody(BaseModel):
    """Every error has this body; it is also the data of an SSE `error` event. OpenAI's shape, with a hint and
    the request id.
    """

    error: ErrorDetail
