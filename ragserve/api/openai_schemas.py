"""Bodies of the OpenAI routes: the fields that a namespace can answer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag, model_validator

from ragserve.answering.citations import Basis
from ragserve.answering.results import (
    EVIDENCE,
    INDEX_VERSIONS,
    NAMESPACE,
    AnswerEvidence,
    AnswerSentence,
    Citation,
    ContextUse,
    PrefillUse,
    Reranking,
    SearchedFor,
    SessionUse,
    Timings,
)
from ragserve.api.body import RequestModel, Text
from ragserve.api.schemas import (
    MAX_DOCUMENTS,
    MAX_MESSAGES,
    DocumentsOverflow,
    GivenDocument,
    NamedStrategy,
    Prefill,
    SessionBudget,
    SessionName,
    Stop,
    StrategyOptions,
)
from ragserve.api.search_fields import SearchFields
from ragserve.setting_groups.answering import Retrieval

Content = Annotated[Text, Field(max_length=65_536)]
Ignored = Annotated[Any, Field(default=None, description="Accepted and ignored.")]


_NO_CONTENT = "Input should be text, or a list of text parts"


def _kind_of_content(content: Any) -> str | None:
    if isinstance(content, str):
        return "str"
    return "list[TextPart]" if isinstance(content, (list, tuple)) else None


class TextPart(RequestModel):
    type: Literal["text"]
    text: Content

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, part: Any) -> Any:
        """Say one sentence about an image, not one for each field of its that a text part lacks."""
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else None
            name = f"a part of type {kind!r:.40}" if isinstance(kind, str) else "a part without a type"
            raise ValueError(f"{name} cannot be answered: models of namespaces read text only")
        return part


class ChatMessage(RequestModel):
    """A message. An assistant's message may be sent back as received."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[Content, Tag("str")]
        | Annotated[list[TextPart], Field(max_length=256), Tag("list[TextPart]")],
        Discriminator(_kind_of_content, custom_error_type="content", custom_error_message=_NO_CONTENT),
    ]
    name: Ignored
    refusal: Ignored
    annotations: Ignored
    audio: None = None
    function_call: None = None
    tool_calls: None = None

    @property
    def text(self) -> str:
        return (
            self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        )


class StreamOptions(RequestModel):
    include_usage: bool = False


class TextFormat(RequestModel):
    type: Literal["text"]


class ChatRequest(SearchFields):
    """A dialogue whose last message is the question. OpenAI's client sends our own fields, those of a search
    (`k`, `filter`, `retrieval` and so on), `strategy`, `strategy_options`, `prefill`, `documents`,
    `documents_overflow`, `session` and `session_budget`, as `extra_body`. Of the messages of a session's
    later turns only the last one counts."""

    model: str = Field(
        description="`ragserve/NAMESPACE`, or several as `ragserve/a+b` and `ragserve/docs-*`; other names "
        "go to SGLang.",
        examples=["ragserve/default"],
    )
    messages: list[ChatMessage] = Field(
        min_length=1,
        max_length=MAX_MESSAGES,
        description="System messages replace the server's system text.",
    )
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(
        None, ge=1, le=32_768, description="Limit of the answer, tokens. Default: the server's."
    )
    max_completion_tokens: int | None = Field(None, ge=1, le=32_768, description="Newer name of max_tokens.")
    temperature: float | None = Field(None, ge=0, le=2, description="Default 0, greedy.")
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=0, le=2**31 - 1)
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    n: Literal[1] | None = None
    logprobs: Literal[False] | None = None
    response_format: TextFormat | None = None
    user: Ignored
    metadata: Ignored
    store: Ignored
    service_tier: Ignored
    safety_identifier: Ignored
    prompt_cache_key: Ignored
    strategy: NamedStrategy | None = None
    strategy_options: StrategyOptions
    prefill: Prefill
    documents: list[GivenDocument] | None = Field(None, max_length=MAX_DOCUMENTS)
    documents_overflow: DocumentsOverflow = "refuse"
    session: SessionName | None = None
    session_budget: SessionBudget | None = None


class UrlCitation(BaseModel):
    start_index: int = Field(
        description="Position in the content: of the marker, or of the sentence that the passage supports."
    )
    end_index: int
    title: str
    url: str = Field(description="URL of the source, its path as a file URL, or its name.")
    basis: Basis = Field(description="Not OpenAI's: why the passage is cited, as in `citations`.")


class Annotation(BaseModel):
    type: Literal["url_citation"] = "url_citation"
    url_citation: UrlCitation


class AnswerMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None
    annotations: list[Annotation]


class ChatChoice(BaseModel):
    index: Literal[0] = 0
    message: AnswerMessage
    logprobs: None = None
    finish_reason: str


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class ChatUsage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Extras(BaseModel):
    """Fields of /rag/query without an OpenAI counterpart."""

    context: ContextUse
    sentences: list[AnswerSentence]
    evidence: AnswerEvidence | None = Field(default=None, description=EVIDENCE)
    session: SessionUse | None
    prefill: PrefillUse | None = None
    timings: Timings
    retrieval: Retrieval | None
    searched_for: SearchedFor | None
    reranking: Reranking | None
    index_version: int | None
    index_versions: dict[str, int] | None = Field(default=None, description=INDEX_VERSIONS)
    namespace: str = Field(description=NAMESPACE)
    request_id: str


class ChatAnswer(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: ChatUsage
    citations: list[Citation]
    ragserve: Extras


class SglangChatAnswer(BaseModel):
    """The answer of one of SGLang's models, to requests that go to it unchanged: without documents."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[dict[str, Any]]
    usage: dict[str, Any]


class ChunkDelta(BaseModel):
    """The new parts only."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    annotations: list[Annotation] | None = None


class ChunkChoice(BaseModel):
    index: Literal[0] = 0
    delta: ChunkDelta
    logprobs: None = None
    finish_reason: str | None = None


class ChatChunk(BaseModel):
    """A `data` of a stream; `[DONE]` follows the last one."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice] = Field(description="Empty in the chunk with the usage.")
    usage: ChatUsage | None = Field(
        default=None, description="In the last chunk, with `stream_options.include_usage`."
    )
    citations: list[Citation] | None = Field(default=None, description="In the last chunk with a choice.")
    ragserve: Extras | None = Field(default=None, description="In the last chunk with a choice.")


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "ragserve"


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model] = Field(description="One per namespace, then SGLang's own, which have more fields.")
