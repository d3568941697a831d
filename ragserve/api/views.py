"""Bodies of answers and events, for the routes and for clients; a query's answer is in
`ragserve.answering.results`. Needs pydantic only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ragserve.answering.results import (
    EVIDENCE,
    INDEX_VERSIONS,
    NAMESPACE,
    RERANKING,
    SEARCHED_FOR,
    Answer,
    AnswerEvidence,
    Citation,
    Reranking,
    RetrievalTimings,
    RetrievedPassage,
    SearchedFor,
    SearchResults,
)
from ragserve.setting_groups.answering import Retrieval

if TYPE_CHECKING:
    from ragserve_index.chunk_changes import ChunkState


class RetrieveTimings(RetrievalTimings):
    total_ms: float


class RetrieveAnswer(BaseModel):
    """Passages, best first; with `neighbours`, in groups, of which the best is first."""

    results: list[RetrievedPassage]
    namespace: str = Field(description=NAMESPACE)
    retrieval: Retrieval = Field(description="Search that found the passages.")
    searched_for: SearchedFor | None = Field(description=SEARCHED_FOR)
    reranking: Reranking | None = Field(description=RERANKING)
    evidence: AnswerEvidence | None = Field(default=None, description=EVIDENCE)
    index_version: int | None = Field(
        description="Version of the namespace that was searched; null where several were."
    )
    index_versions: dict[str, int] | None = Field(default=None, description=INDEX_VERSIONS)
    notes: list[str] = Field(
        default_factory=list, description="Remarks for the caller, e.g. that a remote model was missing."
    )
    timings: RetrieveTimings
    request_id: str


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
    labels: list[str] = Field(
        default_factory=list,
        description="Who sees it: keys that hold one of them; without any, all do. Listed are those that the "
        "API key holds.",
    )


class DocumentList(BaseModel):
    documents: list[DocumentView] = Field(description="Ordered by doc_id.")
    next: str | None = Field(description="Give as `after` for the next page; null on the last.")


class ChunkView(BaseModel):
    chunk_id: int | None = Field(
        description="As in citations. It changes when the document does; null for a disabled chunk."
    )
    doc_id: str
    ordinal: int = Field(description="Place in the document, from 0; disabled chunks count.")
    text: str
    start: int
    end: int
    header_chars: int = Field(
        description="Characters at the beginning of `text` that copy the header of the table, or the "
        "beginning of the sentence, that the chunk continues; the rest is the document's text from `start` "
        "to `end`."
    )
    page: int | None
    first_page: int | None = Field(
        description="The page before, if `text` begins with a sentence that goes on from there; else `page`."
    )
    page_kind: str | None = Field(
        description="Kind of place that `page` counts: `page`, `slide`, `sheet`, `chapter`, `message` "
        "or `section`."
    )
    page_name: str | None = Field(description="Name of the sheet, chapter or section.")
    n_tokens: int
    edited: bool = Field(description="Somebody gave it another text, which stands for `start` to `end`.")
    disabled: bool = Field(description="It is in no search. Listed for keys with the right `ingest`.")
    original: str | None = Field(
        description="The text of the file, if it is edited; for keys with the right `ingest`."
    )
    version: str | None = Field(
        description="What a change of the chunk must name; for keys with the right `ingest`."
    )

    @classmethod
    def of(cls, state: ChunkState, *, edits: bool) -> ChunkView:
        """The chunk for those who may change it (``edits``), or for those who only read."""
        fields = {name: getattr(state.chunk, name) for name in cls.model_fields if hasattr(state.chunk, name)}
        return cls(
            **{**fields, "chunk_id": state.chunk.chunk_id or None},
            disabled=state.disabled,
            original=state.original if edits else None,
            version=state.version if edits else None,
        )


class ChunkList(BaseModel):
    chunks: list[ChunkView] = Field(description="In the document's order.")
    next: int | None = Field(description="Give as `after` for the next page; null on the last.")


class LostCorrectionView(BaseModel):
    model_config = ConfigDict(from_attributes=True)

    ordinal: int = Field(description="The last place of its chunk.")
    page: int | None
    original: str = Field(description="The text that the file has no more.")
    text: str = Field(description="The text that stood for it.")
    disabled: bool
    lost_at: float = Field(description="Unix seconds.")


class LostCorrections(BaseModel):
    lost: list[LostCorrectionView] = Field(
        description="Corrections whose text left the file. One returns when its text does."
    )


class PreviewedChunk(BaseModel):
    model_config = ConfigDict(from_attributes=True)

    ordinal: int
    text: str
    start: int
    end: int
    header_chars: int
    page: int | None
    first_page: int | None
    page_kind: str | None
    page_name: str | None
    n_tokens: int


class Preview(BaseModel):
    """How a file would be ingested."""

    filename: str
    title: str
    mime: str
    size_bytes: int
    chunk_tokens: int = Field(description="Largest chunk, in tokens.")
    n_chunks: int
    n_tokens: int
    note: str | None = Field(description="What was left out or guessed, as a job's report says it.")
    metadata: dict[str, Any] = Field(description="What the file says of itself.")
    chunks: list[PreviewedChunk] = Field(description="The first of them, `limit` at most.")


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


class RatedAnswer(BaseModel):
    """A row of `ragserve eval`, with what was rated."""

    id: str = Field(description="The answer's request id.")
    question: str
    answers: list[str] = Field(description="The answer, if it was found good.")
    documents: list[str] = Field(description="Its documents, if it was found good.")
    namespace: str
    rating: Literal["up", "down"]
    answer: str
    time: str = Field(description="When it was rated, ISO 8601.")


class RatedAnswers(BaseModel):
    rows: list[RatedAnswer] = Field(description="Oldest first, the latest rating of each answer.")


class UnansweredQuestion(BaseModel):
    question: str
    asked: int = Field(description="Times that it was asked.")
    time: str = Field(description="When it was asked last, ISO 8601.")
    why: str = Field(description="What spoke against an answer.")


class UnansweredQuestions(BaseModel):
    questions: list[UnansweredQuestion] = Field(description="Newest first.")


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
        description="Strategies `measured` on namespaces' own questions (scores and shares in percent, "
        "margins in points, medians to the first token beside full prefill's), what answers in use showed of "
        "them (`in_use`: percent that differ from full prefill's, and that stand in no passage though those "
        "do, and what these are held against, null where it was not measured), answers `waiting` to be "
        "compared and, since the start, `dropped` as they could not be, and `idle_tuning`."
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


class SglangError(BaseModel):
    """Body of an error of SGLang, for requests that go to it unchanged."""

    object: Literal["error"]
    message: str


EVENTS: dict[str, type[BaseModel]] = {
    "search_results": SearchResults,
    "message": MessageEvent,
    "citation": Citation,
    "final_answer": Answer,
    "done": DoneEvent,
    "error": ErrorBody,
}
"""The events of a streamed query, by name."""
