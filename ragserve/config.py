"""All settings in one class. Precedence: CLI flags, ``RAGSERVE_*`` environment, ``ragserve.toml`` in the
working directory, defaults.
"""

from __future__ import annotations

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
from ragserve.strategy_spec import StrategySpec, parse

DEFAULT_MODEL = str(bundled("examples/models/ragserve-tiny"))
IndexType = Literal["flat", "sq8", "ivf", "hnsw"]
StrategyName = Literal["full", "prefix", "concat", "epic", "cacheblend", "random", "samkv", "auto"]
_WITHOUT_OPTIONS = ("full", "prefix", "auto")
DecodeMode = Literal["dense", "hierarchical", "progressive"]

Namespace = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$", examples=["default"])]
"""Letters, digits, ``_``, ``.`` and ``-``, at most 64, starting with a letter or digit."""


class Settings(BaseSettings):
    """Every field says why it exists and in which unit."""

    model_config = SettingsConfigDict(
        env_prefix="RAGSERVE_", toml_file="ragserve.toml", extra="forbid", protected_namespaces=()
    )

    # where things are
    data_dir: Path = Field(
        Path("ragserve-data"),
        description="Folder of the registry (SQLite), the vector indexes and pending uploads.",
    )
    model: str = Field(
        DEFAULT_MODEL,
        description="Generation model: a Hugging Face path or id. Its tokenizer also cuts documents into chunks.",
    )
    tokenizer: str | None = Field(None, description="Tokenizer path or id where it differs from the model's.")
    embedder: str = Field(
        "all-MiniLM-L6-v2", description="sentence-transformers model; the default is offline, from a package."
    )

    # the engine
    engine_url: str | None = Field(
        None, description="Use an SGLang server that runs elsewhere instead of starting one."
    )
    engine_api_key: SecretStr | None = Field(None, description="API key of that server.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Weights and KV; auto: the model's on CUDA, float32 on CPU, where half precision is slower.",
    )
    context_length: int | None = Field(
        None, ge=64, description="Tokens a request may span; default: the model's own."
    )
    max_total_tokens: int | None = Field(
        None,
        ge=256,
        description="Slots of the KV pool. Default: on CUDA what memory allows, on CPU 8 contexts, at most 65,536.",
    )
    mem_fraction_static: float | None = Field(
        None, gt=0, lt=1, description="SGLang's share of GPU memory for weights and KV."
    )
    tp_size: int = Field(1, ge=1, le=64, description="Tensor parallelism: GPUs that share the model.")
    engine_args: dict[str, Any] = Field(
        default_factory=dict, description="Further SGLang ServerArgs by name, passed as they are."
    )
    engine_timeout_s: float = Field(
        600, gt=0, description="Seconds a generation may take before it is aborted."
    )

    # sparse decoding
    sparse_attention: Literal["off", "on"] = Field(
        "off",
        description="on: decode steps may attend to chosen pages of KV only, around SGLang's attention backend.",
    )
    decode_mode: DecodeMode = Field(
        "hierarchical",
        description="Of requests that do not say: dense, hierarchical (a token budget) or progressive (a threshold).",
    )
    decode_budget: int = Field(
        2048, ge=32, description="hierarchical: tokens that a KV head attends to in a step."
    )
    decode_reuse: int = Field(
        16, ge=1, description="hierarchical: steps for which pages, once chosen, are kept."
    )
    decode_threshold: float = Field(
        0.95, gt=0, le=1, description="progressive: share of the attention weight to reach, estimated."
    )
    decode_dense_below: int | None = Field(
        None,
        ge=0,
        description="Tokens of context up to which every request is dense. Default: what calibrate-decode found, else 8,192.",
    )
    decode_page_size: int = Field(
        64, ge=16, le=128, multiple_of=16, description="Tokens of a KV page, which is attended to or not."
    )
    decode_logical_page: int = Field(
        16, ge=1, description="Tokens that share one min and max key; a page scores what its best ones do."
    )
    decode_max_budget: int = Field(
        4096, ge=32, description="Tokens: the largest budget that a request may ask for."
    )
    decode_ranking: Literal["minmax", "center"] = Field(
        "minmax",
        description="progressive: pages by the best bound of their logical pages, or by the centre of their keys' box.",
    )
    decode_bound: Literal["round", "lowest"] = Field(
        "round",
        description="progressive: what a page not read is taken to weigh: the latest round's mean, or the lowest page so far.",
    )
    decode_heads: Path | None = Field(
        None, description="Pattern file of streaming heads; its heads stream in every sparse request."
    )

    kv_bits: Annotated[Literal[16, 8, 4], BeforeValidator(int)] = Field(
        16,
        description="Bits of the KV pool's numbers; 8 and 4 need sparse_attention=on and serve exact strategies only.",
    )

    # the document cache
    kv_host_bytes: int = Field(512 * 2**20, ge=0, description="Host memory for documents' KV, bytes.")
    kv_disk_bytes: int = Field(
        16 * 2**30, ge=0, description="Disk for documents' KV, bytes; 0: none is kept on disk."
    )
    kv_storage: str = Field(
        "file",
        description="Where the disk tier keeps pages: file (our own format), or one of SGLang's storage backends by its name.",
    )
    kv_storage_args: dict[str, Any] = Field(
        default_factory=dict, description="Options of that storage backend."
    )
    kv_analysis: Literal["ingest", "lazy"] = Field(
        "ingest",
        description="When documents are analysed, which takes about 3 prefills more. ingest: with a warm-up; those that only queries "
        "brought, at the first query whose strategy or rule needs it. lazy: all at that query.",
    )
    kv_analysis_bytes: int = Field(
        2**30,
        ge=2**20,
        description="Most memory for documents' analyses, on the model's device; others are read from the tiers.",
    )
    kv_block_tokens: Annotated[Literal[0, 8, 16, 32, 64], BeforeValidator(int)] = Field(
        0,
        description="samkv: tokens of a block; 0: about 1/32 of a document, 8 to 64. A request with another size analyses anew.",
    )

    # the server
    host: str = Field("127.0.0.1", description="Address to bind. Other than loopback only with an API key.")
    port: int = Field(
        30000, ge=0, le=65535, description="TCP port; SGLang's own default, so its clients find us."
    )
    api_key: SecretStr | None = Field(
        None, description="Bearer token that every route but /health then wants."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Of the server and the engine."
    )

    # answering
    strategy: str = Field(
        "prefix",
        description="full, prefix: exact. auto: the fastest verified. concat, epic, cacheblend, random, samkv: composed from documents, "
        "with options as in concat:recompute=sentences,share=0.1.",
    )
    force_strategies: bool = Field(
        False,
        description="Let composed strategies answer that `ragserve eval --write-gate` has not verified for the model.",
    )
    top_k: int = Field(5, ge=1, le=64, description="Chunks retrieved for a query that does not say.")
    max_new_tokens: int = Field(
        128, ge=1, le=32768, description="Answer length in tokens for a query that does not say."
    )
    system_prompt: str | None = Field(
        None, max_length=8192, description="Replaces the model template's own or our default system text."
    )

    # limits, so that a request cannot take the server down
    max_query_chars: int = Field(16_384, ge=1, description="Characters of a question.")
    max_history_messages: int = Field(64, ge=0, description="Messages of dialogue a chat request may carry.")
    max_body_bytes: int = Field(4 * 2**20, ge=1024, description="Bytes of a JSON request body.")
    max_upload_bytes: int = Field(64 * 2**20, ge=1024, description="Bytes of one uploaded or ingested file.")
    max_upload_files: int = Field(100, ge=1, description="Files in one /rag/ingest request.")
    max_concurrent_queries: int = Field(
        256, ge=1, description="Queries in flight; further ones get 429 at once."
    )

    # ingestion and index
    chunk_tokens: int = Field(
        256, ge=16, le=8192, description="Largest chunk, in the serving model's tokens."
    )
    index_type: IndexType = Field("flat", description="FAISS index of new namespaces.")
    index_device: Literal["cpu", "gpu"] = Field("cpu", description="gpu needs faiss-gpu.")
    embed_batch: int = Field(32, ge=1, le=4096, description="Chunks a forward pass of the embedder takes.")
    embed_device: str = Field("auto", description="torch device of the embedder; auto: cuda if there is one.")
    parse_timeout_s: float = Field(
        120, gt=0, description="Seconds one file may take to parse before it is given up."
    )

    @property
    def default_strategy(self) -> StrategySpec:
        """``strategy``, read."""
        return parse(self.strategy)[0]

    @field_validator("strategy")
    @classmethod
    def _one_strategy(cls, text: str) -> str:
        try:
            specs = parse(text, get_args(StrategyName))
        except InvalidRequest as error:
            raise ValueError(str(error)) from error
        if len(specs) > 1:
            raise ValueError(f"one strategy, not {len(specs)}")
        if specs[0].options and specs[0].name in _WITHOUT_OPTIONS:
            raise ValueError(f"strategy {specs[0].name} takes no options")
        return specs[0].label

    @model_validator(mode="after")
    def _open_address_needs_key(self) -> Settings:
        if self.host not in {"127.0.0.1", "localhost", "::1"} and self.api_key is None:
            raise ValueError(
                f"host {self.host!r} would serve everyone who can reach it: set --api-key (RAGSERVE_API_KEY), or bind to 127.0.0.1"
            )
        return self

    @model_validator(mode="after")
    def _few_bits_need_our_attention(self) -> Settings:
        if self.kv_bits != 16 and self.sparse_attention == "off":
            raise ValueError(
                f"kv_bits={self.kv_bits}: only the backend of sparse decoding reads such a pool: set --sparse-attention on"
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
    """Settings with the given CLI flags on top; a flag that is None was not given."""
    return Settings(**{name: value for name, value in flags.items() if value is not None})
