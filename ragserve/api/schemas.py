"""Bodies of requests and answers; a query's answer is in `ragserve.answering.results`. The routes check the
limits that are settings."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Union

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model

from ragserve.answering.results import (
    RERANKING,
    SEARCHED_FOR,
    Overflow,
    Reranking,
    RetrievalTimings,
    RetrievedPassage,
    SearchedFor,
)
from ragserve.api.body import NonBlank, RequestModel, Text
from ragserve.api.search_fields import SearchFields
from ragserve.config import Namespace, Retrieval, StrategyName
from sglang_ext.request_options import STRATEGY_OPTIONS, DecodeOptions, RequestOptions

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
    Field(max_length=64, description="Fields of your own, for filters."),
]
OptionValue = bool | int | float | str


class GateOption(RequestOptions):
    """Option that every composed strategy takes over REST."""

    force: bool = Field(False, description="Answer though `ragserve tune` has not verified the strategy.")


_OPTION_MODELS = tuple(
    create_model(model.__name__, __base__=(model, GateOption), __doc__=model.__doc__)
    for model in STRATEGY_OPTIONS.values()
)
StrategyOptions = Annotated[
    dict[str, OptionValue | dict[str, OptionValue]],
    # The models document the options; `StrategySpec.resolve` checks them once the strategy is known.
    BeforeValidator(lambda value: value, json_schema_input_type=Union[_OPTION_MODELS]),  # noqa: UP007
    Field(
        default_factory=dict,
        description="Options of a composed strategy. They are added to the server's own where the strategy "
        "is the server's.",
    ),
]


class HistoryMessage(RequestModel):
    role: Literal["user", "assistant"]
    content: Annotated[Text, Field(max_length=65_536)]


class GivenDocument(RequestModel):
    """Context sent with the query instead of retrieved."""

    text: Annotated[NonBlank, Field(max_length=MAX_TEXT_CHARS)]
    title: Annotated[Text, Field(max_length=1024)] = ""
    source: Annotated[Text, Field(max_length=4096)] | None = Field(None, description="Returned in citations.")


DocumentsOverflow = Annotated[
    Overflow,
    Field(
        description="What becomes of `documents` that do not fit into the context. `refuse`: the request is "
        "refused with the sizes (`documents_too_long`). `drop`: the first that does not fit and all after "
        "it are left out. `cut`: the same, but the beginning of the first stays."
    ),
]


SessionName = Annotated[
    str,
    Field(
        pattern=r"^(new|[0-9a-f]{32})$",
        description="`new` begins a session, its id goes on with it: a dialogue that the server keeps, so "
        "that a turn sends its question only. Passages join those of earlier turns.",
    ),
]


class RetrieveRequest(SearchFields):
    """A question, and where to search."""

    query: NonBlank = Field(description="The question. /info has its largest length, limits.max_query_chars.")
    namespace: Namespace = Field("default", description="Where to search.")
    history: list[HistoryMessage] = Field(
        default_factory=list, description="Earlier turns, oldest first. The question is a follow-up then."
    )


class QueryRequest(RetrieveRequest):
    """A question and how to answer it."""

    strategy: StrategyName | None = Field(
        None,
        description="Exact: `full`, `prefix`. Composed from cached documents, approximate: `concat`, "
        "`epic`, `cacheblend`, `random`, `samkv`. `auto`: the verified strategy that should be fastest. "
        "Default: the server's, with its options.",
    )
    strategy_options: StrategyOptions
    decode: DecodeOptions = Field(
        default_factory=DecodeOptions,
        description="Decode options that differ from the server's; needs `--sparse-attention on`.",
    )
    stream: bool = Field(False, description="Answer with server-sent events.")
    max_new_tokens: int | None = Field(
        None, ge=1, le=32_768, description="Limit of the answer, tokens. Default: the server's."
    )
    temperature: float = Field(0.0, ge=0, le=2, description="0: greedy.")
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = Field(None, ge=0, le=2**31 - 1, description="Makes sampling repeatable.")
    stop: list[Stop] = Field(
        default_factory=list, max_length=16, description="Texts before which the answer ends."
    )
    system: Annotated[Text, Field(max_length=8192)] | None = Field(
        None, description="Replaces the system text."
    )
    documents: list[GivenDocument] | None = Field(
        None,
        max_length=MAX_DOCUMENTS,
        description="Context to use instead of retrieval, in order. Nothing is searched, and the namespace "
        "need not exist. Their KV is cached in memory under the namespace's name, never on disk.",
    )
    documents_overflow: DocumentsOverflow = "refuse"
    session: SessionName | None = None


class RetrieveTimings(RetrievalTimings):
    total_ms: float


class RetrieveAnswer(BaseModel):
    """Passages, best first; with `neighbours`, in groups, of which the best is first."""

    results: list[RetrievedPassage]
    namespace: str
    retrieval: Retrieval = Field(description="Search that found the passages.")
    searched_for: SearchedFor | None = Field(description=SEARCHED_FOR)
    reranking: Reranking | None = Field(description=RERANKING)
    index_version: int = Field(description="Version of the namespace that was searched.")
    timings: RetrieveTimings
    request_id: str


class InlineText(RequestModel):
    name: Annotated[NonBlank, Field(max_length=1024)] = Field(
        description="Identity of the document: a text of the same name replaces it."
    )
    text: Annotated[Text, Field(max_length=MAX_TEXT_CHARS)]
    title: Annotated[Text, Field(max_length=1024)] | None = None
    metadata: Metadata = Field(default_factory=dict)


class IngestTexts(RequestModel):
    """Documents given as text."""

    namespace: Namespace = Field("default", description="Namespace, created if it does not exist.")
    texts: list[InlineText] = Field(min_length=1, max_length=1000)
    warm: bool = Field(False, description="Then compute their KV into the document cache, as a second job.")


class IngestUrls(RequestModel):
    """Documents to fetch. Addresses of this machine and its networks are refused (`url_ingestion`), behind
    redirects too; robots.txt is honoured (`robots`)."""

    namespace: Namespace = Field("default", description="Namespace, created if it does not exist.")
    urls: list[Annotated[Text, Field(max_length=2048)]] = Field(
        min_length=1,
        max_length=100,
        description="http and https URLs. That of a `sitemap.xml` stands for the pages that it names.",
    )
    sitemap: bool = Field(
        False,
        description="Take the pages that the sitemaps of each URL's site name: robots.txt, /sitemap.xml.",
    )
    other_hosts: bool = Field(False, description="Also take pages of a sitemap that are on other hosts.")
    metadata: Metadata = Field(default_factory=dict)
    warm: bool = Field(False, description="Then compute their KV into the document cache, as a second job.")


class JobItemView(BaseModel):
    source: str
    state: str = Field(
        description="`pending`, `indexed`, `warmed`, `unchanged`, `removed`, `failed` or `skipped`."
    )
    reason: str | None = Field(description="Reason of a failure or skip, or a note on an indexed file.")
    chunks: int
    tokens: int
    size_bytes: int
    doc_id: str | None = Field(description="Resulting document.")


class JobView(BaseModel):
    """An ingestion or warm-up job."""

    job_id: str
    kind: str = Field(
        description="Ingestion (`upload`, `urls`, `paths`, `stdin`), or warm-up of the cache (`warm`)."
    )
    namespace: str
    state: str = Field(
        description="`queued`, `running`, `done`, `failed` or `cancelled`. A job with failed sources is "
        "`done`."
    )
    counts: dict[str, int] = Field(description="Sources (files, texts) by state.")
    n_items: int
    chunks: int = Field(description="Chunks indexed (or computed) so far; tokens and size_bytes likewise.")
    tokens: int
    size_bytes: int
    cancel_requested: bool = Field(description="The job ends after the current source.")
    error: str | None = Field(description="Reason for the failure of the whole job.")
    created_at: float = Field(description="Unix seconds.")
    updated_at: float = Field(description="Unix seconds.")


class JobDetail(JobView):
    items: list[JobItemView] = Field(description="A page of the job's sources, in the order of addition.")
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
    header_chars: int = Field(
        description="Characters at the beginning of `text` that copy the header of the table that the chunk "
        "continues; the rest is the document's text from `start` to `end`."
    )
    page: int | None
    page_kind: str | None = Field(
        description="Kind of place that `page` counts: `page`, `slide`, `sheet`, `chapter` or `message`."
    )
    page_name: str | None = Field(description="Name of the sheet or chapter.")
    n_tokens: int


class ChunkList(BaseModel):
    chunks: list[ChunkView] = Field(description="In the document's order.")
    next: int | None = Field(description="Give as `after` for the next page; null on the last.")


class NamespaceView(BaseModel):
    name: str
    embedder: str
    dim: int
    index_type: str
    version: int = Field(description="Incremented by every change to the documents.")
    n_documents: int
    n_chunks: int
    n_tokens: int


class NamespaceList(BaseModel):
    namespaces: list[NamespaceView]


class SessionView(BaseModel):
    """A session of the API key."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    namespace: str
    strategy: str = Field(description="Strategy of all its turns.")
    turns: int
    documents: int = Field(description="Passages in its context.")
    tokens: int = Field(description="Tokens of the dialogue with its passages.")
    created_at: float = Field(description="Unix seconds.")
    used_at: float = Field(description="Unix seconds.")
    expires_at: float = Field(description="Unix seconds; a further turn moves it.")
    outdated: str | None = Field(description="Why it cannot go on: a document was removed or replaced.")


class SessionList(BaseModel):
    sessions: list[SessionView] = Field(description="Oldest first.")


class Ready(BaseModel):
    ready: bool
    missing: list[str] = Field(description="Parts that are not ready yet.")


class Info(BaseModel):
    """The serving model, engine, embedder, settings and limits."""

    model_config = ConfigDict(protected_namespaces=())

    versions: dict[str, str]
    model: str
    tokenizer: str = Field(description="Path or id of the tokenizer that renders prompts.")
    system_prompt: str | None = Field(
        description="The server's own system text, in place of the model template's."
    )
    engine: dict[str, Any]
    embedder: dict[str, Any]
    strategies: list[str]
    defaults: dict[str, Any] = Field(description="Defaults of a query.")
    limits: dict[str, int]
    index: dict[str, Any]
    warming: dict[str, int] = Field(description="Warm-ups that are queued or running, and their documents.")
    verification: dict[str, Any] = Field(
        description="What answers in use showed of composed strategies (`in_use`: KL in nats, agreement "
        "in percent a token, `at_least` and `at_most` at 95 %), answers `waiting` to be compared, and "
        "`idle_tuning`."
    )


class ErrorDetail(BaseModel):
    message: str = Field(description="What happened and what to do.")
    type: Literal["invalid_request_error", "server_error"]
    code: str = Field(description="Stable and machine-readable.")
    param: str | None = Field(description="Field at fault.")
    hint: str | None = Field(description="What to do.")
    request_id: str | None


class MessageEvent(BaseModel):
    """SSE `message`: a piece of the answer. All pieces joined are the whole answer."""

    text: str


class DoneEvent(BaseModel):
    """SSE `done`: the end of a stream. A stream that ends without it was interrupted."""

    request_id: str


class ErrorBody(BaseModel):
    """Body of every error, and data of an SSE `error` event: OpenAI's shape plus a hint and the request
    id."""

    error: ErrorDetail
