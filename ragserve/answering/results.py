"""What a query gives back: the one shape behind the JSON answer, the SSE events and the OpenAI route."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from ragserve.answering.citations import Basis


class Result(BaseModel):
    model_config = ConfigDict(frozen=True, protected_namespaces=())


class Passage(Result):
    """A piece of context. What only indexed passages have is null for documents given in the request."""

    index: int = Field(description="Number in the prompt, from 1; markers `[n]` in the answer refer to it.")
    doc_id: str | None = Field(default=None, description="Document in the registry.")
    chunk_id: int | None = Field(default=None, description="Chunk in the registry.")
    source: str | None = Field(
        default=None, description="Path, URL or name under which the document was ingested."
    )
    title: str = Field(description="Title of the document.")
    page: int | None = Field(default=None, description="Page, from 1, where the format has pages.")
    start: int | None = Field(default=None, description="First character in the document's text.")
    end: int | None = Field(default=None, description="Character after the last one.")
    score: float | None = Field(
        default=None, description="Cosine similarity of question and passage, higher is nearer."
    )
    text: str = Field(description="The passage itself.")


class RetrievedPassage(Passage):
    """A search result, with its document's metadata."""

    metadata: dict[str, Any] = Field(default_factory=dict, description="The document's metadata.")


class Citation(Passage):
    """A passage that the answer rests on."""

    basis: Basis = Field(
        description="Why it is cited: `marker`, the answer names it; `quote`, it contains the answer verbatim; "
        "`context`, the answer says nothing of its source, so all the context is given."
    )


class Usage(Result):
    """Tokens, as the engine counted them."""

    prompt: int = Field(description="Tokens of the prompt.")
    cached: int = Field(description="Prompt tokens found in the exact prefix cache.")
    completion: int = Field(description="Tokens generated.")


class ContextUse(Result):
    """What became of the documents between retrieval and decoding."""

    strategy: str = Field(
        description="What answered: `full` (all prefilled anew) and `prefix` (SGLang's cache) are exact, others are composed."
    )
    choice: str | None = Field(
        default=None, description="Strategy `auto`: what it chose, with its options, and why."
    )
    documents_retrieved: int = Field(description="Passages found or given.")
    documents_kept: int = Field(description="Passages in the prompt; the others did not fit, see `notes`.")
    tokens_retrieved: int = Field(description="Document tokens found or given.")
    tokens_kept: int = Field(description="Document tokens that the answer could attend to.")
    tokens_recomputed: int = Field(description="Document tokens whose KV was computed for this query.")
    tokens_by_tier: dict[str, int] = Field(
        description="Document tokens whose KV came from a tier of the cache."
    )
    notes: list[str] = Field(
        default_factory=list, description="What the caller should know, in words: e.g. documents dropped."
    )


class DecodeUse(Result):
    """What the answer's decode steps attended to, with sparse decoding."""

    mode: str = Field(description="`hierarchical` (a token budget) or `progressive` (a threshold).")
    steps: int = Field(description="Decode steps: one per token after the first.")
    sparse_steps: int = Field(description="Of these, steps that did not read all of the context.")
    pages: float = Field(description="Pages of KV read per step, mean over layers and heads.")
    share: float = Field(description="Pages read, of those the context has.")
    weight: float | None = Field(
        description="Estimated share of the attention weight in what was read; null where nobody estimated it."
    )


class RetrievalTimings(Result):
    """Milliseconds. Null where a stage did not run."""

    embed_ms: float | None = Field(
        default=None, description="Embedding the question, waiting for a batch included."
    )
    search_ms: float | None = Field(default=None, description="Searching the index and reading the passages.")


class Timings(RetrievalTimings):
    """Milliseconds. Null where a stage did not run or the engine does not say."""

    prompt_ms: float | None = Field(default=None, description="Laying out the prompt.")
    load_ms: float | None = Field(default=None, description="Composed: waiting for documents from disk.")
    compose_ms: float | None = Field(
        default=None, description="Composed: filling the context from cached documents."
    )
    recompute_ms: float | None = Field(
        default=None, description="Composed: computing chosen tokens again, mostly with the question."
    )
    queue_ms: float | None = Field(default=None, description="Waiting in the engine's queue.")
    prefill_ms: float | None = Field(default=None, description="Prefill in the engine, as it says.")
    ttft_ms: float | None = Field(
        default=None, description="From the request's arrival to the first generated token."
    )
    engine_ms: float | None = Field(
        default=None, description="From handing the prompt to the engine to its last token."
    )
    total_ms: float = Field(description="From the request's arrival to the complete answer.")


class SearchResults(Result):
    """SSE `search_results`: what was found, before the first token."""

    namespace: str
    index_version: int | None = Field(
        description="Version of the namespace that was searched; null for documents given in the request."
    )
    results: list[RetrievedPassage] = Field(
        description="Best first; of these, the first `documents_kept` are in the prompt."
    )
    documents_kept: int
    timings: RetrievalTimings
    request_id: str


class Answer(Result):
    """The answer with its sources and an account of how it came about."""

    answer: str = Field(description="The model's answer; markers `[n]` refer to passages by `index`.")
    citations: list[Citation]
    usage: Usage
    context: ContextUse
    timings: Timings
    decode: DecodeUse | None = Field(
        default=None, description="What was attended to; null without sparse decoding."
    )
    index_version: int | None = Field(
        description="Version of the namespace that was searched; null for documents given in the request."
    )
    namespace: str
    finish_reason: str = Field(description="`stop`: the model ended; `length`: max_new_tokens reached.")
    request_id: str
