"""The settings, in one class.

Precedence: CLI flags, ``RAGSERVE_*`` environment, ``ragserve.toml`` in the working directory, defaults."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, SecretStr, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from ragserve.errors import InvalidRequest
from ragserve.files import bundled
from ragserve.logs import LogFormat
from ragserve.strategy_spec import StrategySpec, parse
from sglang_ext.protocol import NAMESPACE
from sglang_ext.request_options import DecodeMode

MAX_CANDIDATES = 200
MAX_NEIGHBOURS = 4
KEYS_FILE = "keys.json"  # in data_dir: API keys
DEFAULT_MODEL = str(bundled("examples/models/ragserve-tiny"))
IndexType = Literal["flat", "sq8", "ivf", "hnsw"]
Retrieval = Literal["dense", "lexical", "hybrid"]
FollowUps = Literal["rewrite", "context", "alone"]
StrategyName = Literal["full", "prefix", "concat", "epic", "cacheblend", "random", "samkv", "auto"]

Namespace = Annotated[str, Field(pattern=f"^{NAMESPACE.pattern}$", examples=["default"])]
"""Letters, digits, ``_``, ``.`` and ``-``, at most 64, starting with a letter or digit."""


class Settings(BaseSettings):
    """The settings; each field states its purpose and its unit."""

    model_config = SettingsConfigDict(
        env_prefix="RAGSERVE_", toml_file="ragserve.toml", extra="forbid", protected_namespaces=()
    )

    # where things are
    data_dir: Path = Field(
        Path("ragserve-data"),
        description="Folder of the registry (SQLite), vector indexes, document KV and pending uploads.",
    )
    model: str = Field(
        DEFAULT_MODEL,
        description="Generation model: a Hugging Face path or id. Its tokenizer also sizes the chunks.",
    )
    tokenizer: str | None = Field(None, description="Tokenizer path or id, if it differs from the model's.")
    embedder: str = Field(
        "all-MiniLM-L6-v2",
        description="sentence-transformers model; the default comes with a package and needs no download.",
    )
    query_prompt: str | None = Field(
        None,
        max_length=1024,
        description="Text that the embedder reads before a question, as 'query: ' of E5. Default: the prompt "
        "in the model's own configuration, if it has one.",
    )
    passage_prompt: str | None = Field(
        None,
        max_length=1024,
        description="The same for passages. It is part of the embedder: a namespace keeps the one it was "
        "made with.",
    )

    # the engine
    engine_url: str | None = Field(None, description="Use a running SGLang server instead of starting one.")
    engine_api_key: SecretStr | None = Field(None, description="API key of the server at engine_url.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Data type of weights and KV. auto: the model's on CUDA, float32 on CPU, where half "
        "precision is slower.",
    )
    context_length: int | None = Field(
        None, ge=64, description="Tokens of prompt and answer together. Default: the model's own limit."
    )
    max_total_tokens: int | None = Field(
        None,
        ge=256,
        description="Slots (tokens) of the KV pool. Default: on CUDA what memory allows, on CPU 8 contexts, "
        "at most 65,536.",
    )
    mem_fraction_static: float | None = Field(
        None, gt=0, lt=1, description="Share of GPU memory that SGLang takes for weights and KV."
    )
    tp_size: int = Field(1, ge=1, le=64, description="Tensor parallel size: GPUs that share the model.")
    engine_args: dict[str, Any] = Field(
        default_factory=dict, description="Further SGLang ServerArgs by name, passed through unchanged."
    )
    engine_timeout_s: float = Field(600, gt=0, description="Seconds after which a generation is aborted.")

    # sparse decoding
    sparse_attention: Literal["off", "on"] = Field(
        "off",
        description="on: wrap SGLang's attention backend, so that decode steps may attend to selected KV "
        "pages only.",
    )
    decode_mode: DecodeMode = Field(
        "hierarchical",
        description="Default decode mode: dense, hierarchical (token budget) or progressive (weight "
        "threshold).",
    )
    decode_budget: int = Field(
        2048, ge=32, description="hierarchical: tokens that a KV head attends to per step."
    )
    decode_reuse: int = Field(
        16, ge=1, description="hierarchical: decode steps that share one choice of pages."
    )
    decode_threshold: float = Field(
        0.95, gt=0, le=1, description="progressive: estimated share of the attention weight to reach."
    )
    decode_dense_below: int | None = Field(
        None,
        ge=0,
        description="Context length, in tokens, up to which decoding is dense. Default: the result of "
        "calibrate-decode, else 8,192.",
    )
    decode_page_size: int = Field(
        64, ge=16, le=128, multiple_of=16, description="Tokens of a KV page, the unit of page selection."
    )
    decode_logical_page: int = Field(
        16,
        ge=1,
        description="Tokens that share one min and max key; a page takes the best score of its logical "
        "pages.",
    )
    decode_max_budget: int = Field(4096, ge=32, description="Largest budget of a request, tokens.")
    decode_ranking: Literal["minmax", "center"] = Field(
        "minmax",
        description="progressive: rank pages by the best bound of their logical pages (minmax), or by the "
        "centre of their keys' bounding box.",
    )
    decode_bound: Literal["round", "lowest"] = Field(
        "round",
        description="progressive: assumed weight of an unread page: the latest round's mean, or the lowest "
        "page so far.",
    )
    decode_heads: Path | None = Field(
        None,
        description="Pattern file of streaming heads, which attend to the first and latest tokens only. "
        "Applies to every sparse request.",
    )

    kv_bits: Annotated[Literal[16, 8, 4], BeforeValidator(int)] = Field(
        16,
        description="Bits per value of the KV pool. 8 and 4 need sparse_attention=on and serve exact "
        "strategies only.",
    )

    # the document cache
    kv_host_bytes: int = Field(
        512 * 2**20,
        ge=0,
        description="Host memory for document KV, bytes; tensor-parallel ranks share it equally.",
    )
    kv_disk_bytes: int = Field(
        16 * 2**30,
        ge=0,
        description="Disk space for document KV, bytes; tensor-parallel ranks share it equally. 0 turns the "
        "disk tier off.",
    )
    kv_storage: str = Field(
        "file",
        description="Disk tier: file (our own format), or the name of one of SGLang's storage backends.",
    )
    kv_storage_args: dict[str, Any] = Field(
        default_factory=dict, description="Options of the storage backend."
    )
    kv_analysis: Literal["ingest", "lazy"] = Field(
        "ingest",
        description="When to analyse documents, at the cost of about 1.1 prefills. ingest: with a warm-up, "
        "and documents that came with a query at the first query whose strategy or rule needs it. lazy: "
        "always at that query.",
    )
    kv_analysis_bytes: int = Field(
        2**30,
        ge=2**20,
        description="Memory for document analyses on the model's devices, bytes; tensor-parallel ranks share "
        "it equally. Further ones are read from the tiers.",
    )
    kv_block_tokens: Annotated[Literal[0, 8, 16, 32, 64], BeforeValidator(int)] = Field(
        0,
        description="samkv: tokens of a block; 0: about 1/32 of a document, 8 to 64. A request with another "
        "size has its documents analysed again.",
    )

    warm_ingested: bool = Field(
        True,
        description="Compute the KV of what is ingested while a server runs on the data folder: in the "
        "background, when no query is being answered, as long as the cache has room.",
    )

    # the server
    host: str = Field("127.0.0.1", description="Address to bind; any but loopback needs an API key.")
    port: int = Field(
        30000, ge=0, le=65535, description="TCP port. The default is SGLang's, so its clients find ragserve."
    )
    api_key: SecretStr | None = Field(
        None,
        description="Bearer token, required by every route but /health, /docs and /playground. It has all "
        "rights; `ragserve keys` makes keys that have some.",
    )
    allowed_hosts: str = Field(
        "",
        description="Host names, separated by commas, under which clients may address a server without an "
        "API key, besides localhost, 127.0.0.1 and ::1.",
    )
    cors_origins: str = Field(
        "",
        description="Web origins (https://app.example.com), separated by commas, whose pages may call this "
        "server from a browser.",
    )
    control_routes: bool = Field(
        False,
        description="Serve SGLang's routes that control the engine, too (/flush_cache, /pause_generation, "
        "/update_weights_from_disk and others). Whoever may call the server may then stop it.",
    )
    audit_log_bytes: int = Field(
        64 * 2**20,
        ge=0,
        description="Size of the audit log of ingestions, deletions, key changes and administrative calls, "
        "bytes; the oldest eighth goes first. 0 keeps none.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Log level of the server and the engine."
    )
    log_format: LogFormat = Field(
        "text",
        description="json: a JSON object per line, of the server and the engine, with the request's id; and "
        "a line per request.",
    )
    otlp_endpoint: str | None = Field(
        None,
        description="OpenTelemetry collector to send traces to: http://HOST:4318, or HOST:4317 for gRPC. "
        "Needs the extra `otel`. Default: no tracing.",
    )

    # answering
    strategy: str = Field(
        "auto",
        description="Default strategy. auto: the fastest verified one, prefix where nothing is verified and "
        "measured. full, prefix: exact. concat, epic, cacheblend, random, samkv: composed from documents, "
        "with options as in concat:recompute=sentences,share=0.1.",
    )
    force_strategies: bool = Field(
        False,
        description="Let composed strategies answer even if neither `ragserve tune` nor `ragserve eval "
        "--write-gate` has verified them for the model.",
    )
    verify_share: float = Field(
        0.01,
        ge=0,
        le=1,
        description="Share of the composed answers that are computed again by full prefill, when no request "
        "is being answered. A strategy whose answers in a namespace differ too much is taken out of auto "
        "there until `ragserve tune` has run. 0: none.",
    )
    idle_tuning: bool = Field(
        True,
        description="Verify strategies and measure their costs, as `ragserve tune` does, when no request is "
        "being answered: in namespaces where nothing is verified, half an hour of computing each.",
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
        "stored keys of analysed documents; or a sentence-transformers CrossEncoder, a folder or an id.",
    )
    rerank_models: str = Field(
        "",
        description="Further CrossEncoders, separated by commas, that requests may name. Each is loaded when "
        "it is first used.",
    )
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
        description="Answer where no passage reaches min_score.",
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
    max_new_tokens: int = Field(128, ge=1, le=32768, description="Default limit of an answer, tokens.")
    system_prompt: str | None = Field(
        None, max_length=8192, description="Replaces the system text of the model's template, or ours."
    )

    # limits, so that a request cannot take the server down
    max_query_chars: int = Field(16_384, ge=1, description="Longest question, characters.")
    max_history_messages: int = Field(64, ge=0, description="Most earlier messages in a request.")
    session_ttl_s: float = Field(
        3600, gt=0, description="Seconds after a session's last turn at which the server forgets it."
    )
    max_sessions: int = Field(64, ge=0, description="Most sessions of an API key in a namespace; 0: none.")
    max_body_bytes: int = Field(4 * 2**20, ge=1024, description="Largest JSON request body, bytes.")
    max_upload_bytes: int = Field(
        64 * 2**20, ge=1024, description="Largest uploaded or ingested file, bytes."
    )
    max_upload_files: int = Field(100, ge=1, description="Most files in one /rag/ingest request.")
    max_concurrent_queries: int = Field(
        256, ge=1, description="Most queries in flight; further ones get 429 at once."
    )
    body_timeout_s: float = Field(
        60, gt=0, description="Seconds without a byte of a request's body after which it is given up (408)."
    )

    # ingestion and index
    sentence_bytes: int = Field(
        16,
        ge=0,
        le=1024,
        description="Bytes a token to store for embeddings of a chunk's sentences, by which `samkv` finds "
        "what to keep. A sentence takes 390 with the default embedder. 0 embeds none, which halves the time "
        "for embedding.",
    )
    chunk_tokens: int = Field(
        256, ge=16, le=8192, description="Largest chunk, in tokens of the serving model."
    )
    index_type: IndexType = Field("flat", description="FAISS index type of new namespaces.")
    index_device: Literal["cpu", "gpu"] = Field(
        "cpu", description="Device of the index; gpu needs faiss-gpu."
    )
    embed_batch: int = Field(32, ge=1, le=4096, description="Chunks per forward pass of the embedder.")
    embed_device: str = Field("auto", description="torch device of the embedder; auto: cuda if available.")
    parse_timeout_s: float = Field(120, gt=0, description="Seconds after which parsing a file is given up.")
    ocr: Literal["off", "docling"] = Field(
        "off", description="What reads images and scanned PDFs; docling needs the extra `docling`."
    )
    url_ingestion: Literal["public", "any", "off"] = Field(
        "public",
        description="URLs that clients may have ingested by POST /rag/ingest. public: those of public "
        "addresses; any: those of this machine and its networks, too.",
    )
    robots: Literal["honour", "ignore"] = Field(
        "honour", description="What to do with a site's robots.txt; ignore it on a site of your own."
    )
    sitemap_urls: int = Field(1000, ge=1, le=1_000_000, description="Most URLs that a sitemap may add.")

    @property
    def has_key(self) -> bool:
        """True if requests need an API key: the server's, or one of the data folder's."""
        return self.api_key is not None or (self.data_dir / KEYS_FILE).exists()

    @cached_property
    def default_strategy(self) -> StrategySpec:
        """``strategy``, parsed."""
        return parse(self.strategy)[0]

    @field_validator("strategy")
    @classmethod
    def _one_strategy(cls, text: str) -> str:
        try:
            specs = parse(text, get_args(StrategyName))
            if len(specs) > 1:
                raise ValueError(f"one strategy, not {len(specs)}")
            return specs[0].label
        except InvalidRequest as error:
            raise ValueError(str(error)) from error

    @model_validator(mode="after")
    def _fit_together(self) -> Settings:
        if self.host not in {"127.0.0.1", "localhost", "::1"} and not self.has_key:
            raise ValueError(
                f"host {self.host!r} would serve everyone who can reach it: set --api-key "
                "(RAGSERVE_API_KEY), make keys with `ragserve keys create`, or bind to 127.0.0.1"
            )
        if self.kv_bits != 16 and self.sparse_attention == "off":
            raise ValueError(
                f"kv_bits={self.kv_bits}: only sparse decoding's backend reads such a pool: set "
                "--sparse-attention on"
            )
        if self.rerank == "keys" and (self.engine_url is not None or self.kv_bits != 16):
            raise ValueError(
                "rerank='keys': only an engine of this server, with KV of 16 bits, has documents' keys: name "
                "a CrossEncoder, or leave rerank out"
            )
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)


def load(**flags: Any) -> Settings:
    """Settings with the given CLI flags on top; None means that a flag was not given."""
    return Settings(**{name: value for name, value in flags.items() if value is not None})
