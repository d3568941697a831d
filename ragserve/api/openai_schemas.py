"""Bodies of the OpenAI routes: the fields that a namespace can answer."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

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
from ragserve.api.chat_schemas import (
    MAX_TOOLS,
    ChatMessage,
    FunctionTool,
    Ignored,
    ResponseFormat,
    Seed,
    Stops,
    StreamOptions,
    ToolChoice,
    Unserved,
)
from ragserve.api.schemas import (
    MAX_DOCUMENTS,
    MAX_MESSAGES,
    DocumentsOverflow,
    GivenDocument,
    NamedStrategy,
    Prefill,
    SessionBudget,
    SessionName,
    StrategyOptions,
)
from ragserve.api.search_fields import SearchFields
from ragserve.setting_groups.answering import Retrieval


class ChatRequest(SearchFields):
    """A dialogue whose last message is the question, or the results of tools that the model has called for
    it. OpenAI's client sends our own fields, those of a search (`k`, `filter`, `retrieval` and so on),
    `strategy`, `strategy_options`, `prefill`, `documents`, `documents_overflow`, `session` and
    `session_budget`, as `extra_body`. Of the messages of a session's later turns only the last one counts."""

    model: str = Field(
        description="`ragserve/NAMESPACE`, or several as `ragserve/a+b` and `ragserve/docs-*`; other names "
        "go to SGLang.",
        examples=["ragserve/default"],
    )
    messages: list[ChatMessage] = Field(
        min_length=1,
        max_length=MAX_MESSAGES,
        description="System and developer messages replace the server's system text. Passages are searched "
        "for with the last message of the user.",
    )
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(
        None, ge=1, le=32_768, description="Limit of the answer, tokens. Default: the server's."
    )
    max_completion_tokens: int | None = Field(None, ge=1, le=32_768, description="Newer name of max_tokens.")
    temperature: float | None = Field(None, ge=0, le=2, description="Default 0, greedy.")
    top_p: float | None = Field(None, gt=0, le=1)
    seed: Seed = None
    stop: Stops = None
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    n: Literal[1] | None = None
    logprobs: Literal[False] | None = None
    response_format: ResponseFormat | None = Field(
        None,
        description="With `json_schema` or `json_object` the answer is JSON of that form, and nothing else.",
    )
    tools: list[FunctionTool] | None = Field(
        None,
        max_length=MAX_TOOLS,
        description="Functions that the model may have called, beside the documents.",
    )
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    user: Ignored
    metadata: Ignored
    store: Ignored
    service_tier: Ignored
    safety_identifier: Ignored
    prompt_cache_key: Ignored
    prompt_cache_retention: Ignored
    reasoning_effort: Ignored
    verbosity: Ignored
    logit_bias: Unserved
    top_logprobs: Unserved
    functions: Unserved
    function_call: Unserved
    modalities: Unserved
    audio: Unserved
    prediction: Unserved
    web_search_options: Unserved
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


class CalledFunction(BaseModel):
    name: str
    arguments: str = Field(description="JSON, as the model wrote it: check it.")


class MessageToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AnswerMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None = Field(description="Null beside tool calls or a refusal.")
    refusal: str | None = Field(
        default=None, description="Said in place of JSON where nothing was found: the model was not asked."
    )
    annotations: list[Annotation]
    tool_calls: list[MessageToolCall] | None = None


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


class FunctionDelta(BaseModel):
    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(BaseModel):
    """A piece of a call; `id`, `type` and `name` come with the first of each `index`."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChunkDelta(BaseModel):
    """The new parts only."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCallDelta] | None = None
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
