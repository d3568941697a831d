"""How questions are answered."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field, SecretStr

MAX_CANDIDATES = 200
MAX_NEIGHBOURS = 4
Retrieval = Literal["dense", "lexical", "hybrid"]
FollowUps = Literal["rewrite", "context", "alone"]
Spelling = Literal["on", "search", "off"]
NotFound = Literal["note", "refuse", "off"]


class AnsweringSettings(BaseModel):
    """Defaults of queries; each field states its purpose and its unit."""

    strategy: str = Field(
        "auto",
        description="Default strategy. auto: the fastest verified one, prefix where nothing is verified and "
        "measured. full, prefix: exact. passages: exact, over the best ones alone. concat, epic, cacheblend, "
        "random, samkv: composed from documents, with options as in concat:recompute=sentences,share=0.1.",
    )
    force_strategies: bool = Field(
        False,
        description="Let composed strategies answer even if neither `ragserve tune` nor `ragserve eval "
        "--write-gate` has verified them for the model.",
    )
    verify_margin: float = Field(
        5.0,
        gt=0,
        le=100,
        description="Most points of its answers' score that a strategy may lose against full prefill, at "
        "95 % confidence, to be verified on a namespace's own questions.",
    )
    verify_share: float = Field(
        0.01,
        ge=0,
        le=1,
        description="Share of the answers of verified strategies that are compared with those of full "
        "prefill, when no request is being answered. A strategy whose answers in a namespace differ more "
        "often than when it was verified is taken out of auto there until `ragserve tune` has run. 0: none.",
    )
    idle_tuning: bool = Field(
        True,
        description="Verify strategies and measure their costs, as `ragserve tune` does, when no request is "
        "being answered: in namespaces where nothing is verified, half an hour of computing each.",
    )
    background_chunk_tokens: int = Field(
        256,
        ge=0,
        description="Tokens of a chunk in which the full prefills of verify_share and idle_tuning are "
        "computed, so that a request that comes meanwhile waits for one chunk; composed ones then end "
        "between layers. 0: as users' requests are. "
        "An engine of its own (engine_url, fleets) takes no notice.",
    )
    query_log_bytes: int = Field(
        0,
        ge=0,
        description="Size of the log of users' questions, bytes: `ragserve tune` and idle_tuning ask them "
        "first, and those that the documents did not answer are listed. The oldest eighth goes first, and a "
        "namespace's questions go with it. 0 keeps none.",
    )
    feedback_bytes: int = Field(
        0,
        ge=0,
        description="Size of the log of users' ratings, with question and answer, bytes: rows for `ragserve "
        "eval`. The oldest eighth goes first, and a namespace's ratings go with it. 0 keeps none.",
    )
    top_k: int = Field(5, ge=1, le=64, description="Default number of chunks to retrieve.")
    retrieval: Retrieval = Field(
        "dense",
        description="Default search. dense: by the embedder. lexical: by words (BM25). hybrid: both, fused "
        "by their scores.",
    )
    rerank: str = Field(
        "off",
        description="What orders the candidates of a search again. off; keys: the model's attention over the "
        "stored keys of analysed documents; a sentence-transformers CrossEncoder, a folder or an id, that "
        "is loaded at the start; or a remote one: URL#MODEL (Cohere's /rerank), URL (that of TEI).",
    )
    rerank_models: str = Field(
        "",
        description="Further rerankers, separated by commas, that requests may name. Each CrossEncoder is "
        "loaded when it is first used.",
    )
    rerank_api_key: SecretStr | None = Field(None, description="API key of remote rerankers.")
    rerank_candidates: int = Field(
        50, ge=1, le=MAX_CANDIDATES, description="Passages that are searched for to be reranked or compared."
    )
    neighbours: int = Field(
        0,
        ge=0,
        le=MAX_NEIGHBOURS,
        description="Chunks before and after each passage that join it, as passages of their own.",
    )
    context_tokens: int = Field(
        0,
        ge=0,
        description="Most tokens of all passages together, the first one excepted; 0: no limit but k. A "
        "request that gives it without k gets as many passages as fit.",
    )
    min_score: float | None = Field(
        None,
        allow_inf_nan=False,
        description="Lowest score of a passage: its cosine, BM25 in a lexical search, or the score of a "
        "CrossEncoder. Where nothing reaches it, the answer is nothing_found and the model is not asked.",
    )
    nothing_found: str = Field(
        "The documents do not answer this question.",
        min_length=1,
        max_length=8192,
        description="Answer where no passage reaches min_score, and where not_found refuses.",
    )
    not_found: NotFound = Field(
        "note",
        description="What becomes of a question that the passages do not seem to answer, by a threshold that "
        "was measured for the bundled embedder. note: the model answers, and the answer says so. refuse: the "
        "answer is nothing_found and the model is not asked. off: nothing.",
    )
    dedupe: float = Field(
        0,
        ge=0,
        le=1,
        description="Share of common word triples (Jaccard) from which a passage is a copy of a better one "
        "and left out; 0.8 finds near copies. 0 keeps all.",
    )
    follow_ups: FollowUps = Field(
        "rewrite",
        description="What is searched for when a question follows others. rewrite: the question, rewritten "
        "by the model to stand alone; context, if it cannot. context: the question together with the turn "
        "before. alone: the question as it is.",
    )
    spelling: Spelling = Field(
        "on",
        description="Where typing errors are corrected: words that neither the namespace nor the embedder "
        "knows become the word of the namespace that is one error away. on: in what is searched for, and in "
        "what the model reads where a passage has the word. search: the model reads the question as it was "
        "typed. off: nowhere.",
    )
    max_new_tokens: int = Field(128, ge=1, le=32768, description="Default limit of an answer, tokens.")
    system_prompt: str | None = Field(
        None, max_length=8192, description="Replaces the system text of the model's template, or ours."
    )
