"""Bodies of the OpenAI routes, as far as a namespace can answer them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from ragserve.answering.results import Citation, ContextUse, Timings
from ragserve.api.body import RequestModel, Text
from ragserve.api.schemas import MAX_DOCUMENTS, MAX_K, GivenDocument, Stop
from ragserve.config import StrategyName
from ragserve_index.filters import Filter

Content = Annotated[Text, Field(max_length=65_536)]
Ignored = Annotated[Any, Field(default=None, description="Taken and not used.")]


class TextPart(RequestModel):
    type: Literal["text"]
    text: Content


class ChatMessage(RequestModel):
    """One message. An assistant's may be sent back as it was received."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content | Annotated[list[TextPart], Field(max_length=256)]
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


class ChatRequest(RequestModel):
    """A dialogue whose last message is the question. `k`, `filter`, `strategy`, `strategy_options` and
    `documents` are ours (`extra_body` in its client)."""

    model: str = Field(
        description="`ragserve/NAMESPACE`; other names go to SGLang.", examples=["ragserve/default"]
    )
    messages: list[ChatMessage] = Field(
        min_length=1, description="System messages replace the server's system text."
    )
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(
        None, ge=1, le=32_768, description="Length of the answer in tokens. Default: the server's."
    )
    max_completion_tokens: int | None = Field(
        None, ge=1, le=32_768, description="The newer name of max_tokens."
    )
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
    k: int | None = Field(None, ge=1, le=MAX_K)
    filter: Filter | None = None
    strategy: StrategyName | None = None
    strategy_options: dict[str, bool | int | float | str] = Field(default_factory=dict, max_length=16)
    documents: list[GivenDocument] | None = Field(None, max_length=MAX_DOCUMENTS)


class UrlCitation(BaseModel):
    start_index: int = Field(
        description="Where in the content the marker stands; the whole content where there is none."
    )
    end_index: int
    title: str
    url: str = Field(description="The source: its URL, or its path as a file URL, or the name it was given.")


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
    """What /rag/query says and OpenAI has no field for."""

    context: ContextUse
    timings: Timings
    index_version: int | None
    namespace: str
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


class ChunkDelta(BaseModel):
    """Only what is new is there."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    annotations: list[Annotation] | None = None


class ChunkChoice(BaseModel):
    index: Literal[0] = 0
    delta: ChunkDelta
    logprobs: None = None
    finish_reason: str | None = None


class ChatChunk(BaseModel):
    """One `data` of a stream; after the last comes `[DONE]`."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice] = Field(description="Empty on the chunk with the usage.")
    usage: ChatUsage | None = Field(
        default=None, description="With `stream_options.include_usage`, on the last chunk."
    )
    citations: list[Citation] | None = Field(default=None, description="On the last chunk that has a choice.")
    ragserve: Extras | None = Field(default=None, description="On the last chunk that has a choice.")


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "ragserve"


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model] = Field(description="One per namespace, then SGLang's, which have more fields.")
