"""The settings, in one class.

Precedence: CLI flags, ``RAGSERVE_*`` environment, ``ragserve.toml`` in the working directory, defaults."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, SecretStr, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from ragserve.files import bundled
from ragserve.logs import LogFormat
from ragserve.setting_groups.answering import AnsweringSettings
from ragserve.setting_groups.conflicts import conflict
from ragserve.setting_groups.ingestion import IngestionSettings
from ragserve.setting_groups.prefilling import PrefillSettings
from ragserve.setting_groups.sign_on import SignOnSettings, sign_on_conflict
from ragserve.strategy_spec import StrategySpec, one_label, parse
from ragserve.tenants.key_file import KEYS_FILE
from sglang_ext.wire import decode_fields, renamed
from sglang_ext.wire.attention_config import AttentionConfig
from sglang_ext.wire.protocol import NAMESPACE
from sglang_ext.wire.request_options import DecodeOptions

DECODE, ATTENTION = DecodeOptions(), AttentionConfig()  # defaults of the settings below
SECRETS = frozenset(
    {"api_key", "engine_api_key", "embedder_api_key", "registry_url", "rerank_api_key", "oidc_client_secret"}
)
"""Settings that are written to no file."""
SHARED_STORES = ("mooncake", "shared")  # of kv_storage
DEFAULT_MODEL = str(bundled("examples/models/ragserve-tiny"))
StrategyName = Literal[
    "full", "prefix", "passages", "concat", "epic", "cacheblend", "random", "samkv", "auto"
]

Namespace = Annotated[str, Field(pattern=f"^{NAMESPACE.pattern}$", examples=["default"])]
"""Letters, digits, ``_``, ``.`` and ``-``, at most 64, starting with a letter or digit."""


class _Environment(EnvSettingsSource):
    """Takes variables by the old names of settings, too."""

    def __call__(self) -> dict[str, Any]:
        old = {name: os.environ.get(f"RAGSERVE_{name.upper()}") for name in renamed.SETTINGS}
        given = super().__call__() | {name: value for name, value in old.items() if value is not None}
        return renamed.with_new_names(given, renamed.SETTINGS)


class _File(TomlConfigSettingsSource):
    """Takes lines by the old names of settings, too."""

    def __call__(self) -> dict[str, Any]:
        return renamed.with_new_names(super().__call__(), renamed.SETTINGS)


class Settings(AnsweringSettings, IngestionSettings, PrefillSettings, SignOnSettings, BaseSettings):
    """The settings; each field states its purpose and its unit."""

    model_config = SettingsConfigDict(
        env_prefix="RAGSERVE_",
        toml_file="ragserve.toml",
        extra="forbid",
        protected_namespaces=(),
        hide_input_in_errors=True,  # it may be a key
    )

    # where things are
    data_dir: Path = Field(Path("ragserve-data"), description="Folder of registry, indexes, KV and uploads.")
    registry_url: SecretStr | None = Field(
        None, description="Postgres registry (extra `postgres`): postgresql://USER:PASSWORD@HOST/DATABASE."
    )
    model: str = Field(
        DEFAULT_MODEL,
        description="Generation model: a Hugging Face path or id, a GGUF file, or smollm2, which is fetched. "
        "Its tokenizer also sizes the chunks.",
    )
    tokenizer: str | None = Field(None, description="Tokenizer path or id, if it differs from the model's.")
    embedder: str = Field(
        "all-MiniLM-L6-v2",
        description="sentence-transformers model; the default comes with a package and needs no download. "
        "multilingual: one for about 100 languages (extra `multilingual`). openai:URL#MODEL: a remote one, "
        "by OpenAI's /embeddings.",
    )
    embedder_api_key: SecretStr | None = Field(None, description="API key of a remote embedder.")
    remote_timeout_s: float = Field(
        10,
        gt=0,
        le=600,
        description="Seconds that a question waits for a remote embedder or reranker, retries included.",
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
    engine_api_key: SecretStr | None = Field(None, description="API key of engine_url, or of the workers.")
    workers: str | None = Field(None, description="Comma-separated addresses of `ragserve serve --worker`.")
    router_url: str | None = Field(
        None, description="Address of SGLang's router `smg` in front of the workers, which carries requests."
    )
    replicas: int = Field(0, ge=0, le=64, description="Workers to start here, each with tp_size GPUs.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Data type of weights and KV. auto: the model's on CUDA; on a CPU bfloat16 if it has "
        "instructions for it (AMX, AVX-512 BF16), which halve times and bytes, else float32.",
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
    prefill_kernels: Literal["auto", "fa2"] = Field(
        "auto",
        description="Kernels of FlashInfer's attention to cached tokens in a prefill. auto: FA3 on Hopper "
        "GPUs where the new tokens fill the GPU, else FA2; fa2: always FA2, as SGLang. Other attention "
        "backends choose by themselves.",
    )
    kernel_cache_dir: Path | None = Field(
        None,
        description="Folder of compiled kernels, which the next start reads; for a container, one that "
        "outlives it. Default: the folders of Triton, FlashInfer and torch under the home folder.",
    )
    engine_timeout_s: float = Field(600, gt=0, description="Seconds after which a generation is aborted.")

    # sparse decoding
    sparse_attention: Literal["off", "on", "auto"] = Field(
        "off",
        description="on: wrap SGLang's attention backend, so that decode steps may attend to selected KV "
        "pages only, and prefill to selected blocks. auto: with the budget that calibrate --part sparse "
        "recorded for the model; off without one.",
    )
    decode_mode: decode_fields.Mode = DECODE.mode
    decode_budget: decode_fields.Budget = DECODE.budget
    decode_reuse: decode_fields.Reuse = DECODE.reuse
    decode_observe: decode_fields.Observe = DECODE.observe
    decode_window: decode_fields.Window = DECODE.window
    decode_scores: decode_fields.Scores = DECODE.scores
    decode_threshold: decode_fields.Threshold = DECODE.threshold
    decode_dense_below: int | None = Field(
        None,
        ge=0,
        description="Context length, in tokens, up to which decoding is dense. Default: the result of "
        "calibrate --part decode, else 8,192.",
    )
    decode_page_size: int = Field(
        64, ge=16, le=128, multiple_of=16, description="Tokens of a KV page, the unit of page selection."
    )
    decode_logical_page: decode_fields.LogicalPage = ATTENTION.logical_page
    decode_max_budget: decode_fields.MaxBudget = ATTENTION.max_budget
    decode_ranking: decode_fields.Ranking = ATTENTION.ranking
    decode_bound: decode_fields.Bound = ATTENTION.bound
    decode_heads: Path | None = Field(
        None,
        description="Pattern file of streaming heads, which attend to the first and latest tokens only. "
        "Applies to every sparse request.",
    )
    decode_heads_pool: decode_fields.HeadsPool = ATTENTION.heads_pool
    decode_offload: Literal["off", "on", "auto"] = Field(
        "off",
        description="Keep prompts' KV on the host, in sparse modes; auto: where others wait for room.",
    )
    kv_offload_bytes: decode_fields.OffloadBytes = ATTENTION.offload_bytes
    kv_offload_tokens: decode_fields.OffloadTokens = ATTENTION.offloaded_tokens
    max_inject_tokens: decode_fields.InjectTokens = ATTENTION.inject_tokens

    kv_bits: Annotated[Literal[16, 8, 4], BeforeValidator(int)] = Field(
        16,
        description="Bits per value of the KV pool. 8 and 4 (experimental) need sparse_attention=on and "
        "serve exact strategies only.",
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
    kv_page_bits: Annotated[Literal[16, 8], BeforeValidator(int)] = Field(
        16,
        description="Bits per value of documents' KV below the device. 16: as the KV pool has it. 8: about "
        "half the bytes on host, disk, shared store and link, at an error of 1/510 of each head's range. "
        "What is stored with other bits is computed again.",
    )
    kv_storage: str = Field(
        "file",
        description="Where documents' KV is kept below the host. file: our own files. shared, mooncake: "
        "these, and behind them a folder or a Mooncake Store that engines share. Or the name of one of "
        "SGLang's storage backends, in place of files.",
    )
    kv_storage_args: dict[str, Any] = Field(
        default_factory=dict, description="Options of the shared store or the storage backend, as JSON."
    )
    kv_shared_value: float = Field(
        1.0,
        ge=0,
        description="Value from which a document goes into the shared store: its retrievals times the "
        "milliseconds of its prefill, per MiB of KV. 0 stores everything, as it is computed.",
    )
    kv_prefix: str = Field(
        "fixed",
        description="Text that documents are prefilled behind; it is dropped afterwards. Documents that "
        "never stood first lose less when they are composed. fixed: 512 tokens shipped with ragserve. none: "
        "prefill them alone. Or the path of a text file, of which 1,024 tokens are used. With another prefix "
        "documents' KV is computed anew, and strategies have to be verified again.",
    )
    kv_analysis: Literal["idle", "ingest", "lazy"] = Field(
        "idle",
        description="When to compute documents' context sensitivity, which costs about another prefill; the "
        "rest of their analysis comes with their prefill. idle: of documents of up to 4,096 tokens "
        "in use, while no query is being answered; until then, and with longer ones, rule sentences goes by "
        "the question's attention alone, and notes say so. ingest: of documents of up to 4,096 tokens with a "
        "warm-up, and of others at the first query whose rule reads it, which waits (on a CPU, of longer "
        "ones, only rules that read nothing else). lazy: always at that query.",
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
        description="Compute the KV of what is ingested while a server runs on the data folder, and of what "
        "was before, the newest first: in the background, when no query is being answered, as long as the "
        "cache has room.",
    )

    # the server
    host: str = Field("127.0.0.1", description="Address to bind; any but loopback needs an API key.")
    port: int = Field(
        30000, ge=0, le=65535, description="TCP port. The default is SGLang's, so its clients find ragserve."
    )
    api_key: SecretStr | None = Field(
        None,
        description="Bearer token, required by every route but /, /health, /docs and /playground. It has all "
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
    grammars: Literal["schemas", "all"] = Field(
        "schemas",
        description="Grammars that clients may send, to SGLang's routes and as `response_format` or strict "
        "tools to namespaces. schemas: JSON schemas without `pattern`, within limits. all: regular "
        "expressions, EBNF and structural tags, too; some of 500 characters stop the engine for everybody.",
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

    # limits, so that a request cannot take the server down
    max_query_chars: int = Field(16_384, ge=1, description="Longest question, characters.")
    max_history_messages: int = Field(64, ge=0, le=4096, description="Most earlier messages in a request.")
    session_ttl_s: float = Field(
        3600, gt=0, description="Seconds after a session's last turn at which the server forgets it."
    )
    max_sessions: int = Field(
        64,
        ge=0,
        description="Most sessions of an API key in a namespace; 8 times as many in all, and 64 times on the "
        "server; 0: none.",
    )
    sessions_on_disk: bool = Field(
        True,
        description="Keep sessions in the data folder as well, so that they go on after a restart. Off: in "
        "memory only, and the next start removes those on disk.",
    )
    session_budget: int = Field(
        0,
        ge=0,
        description="Most tokens of a session's turns before the last one, with their passages: where they "
        "exceed it, the sentences stay that suit the question. 0: all stay. Requests may give another.",
    )
    session_refresh_turns: int = Field(
        0,
        ge=0,
        description="Turns after which a session of a composed strategy computes its dialogue's KV anew, "
        "exactly, so that what composing approximates does not add up. 0: never.",
    )
    session_on_host: bool = Field(
        False,
        description="Keep the KV of a composed session on the host (`kv_host_bytes`) when the device evicts "
        "it, so that its next turn need not compose and compute it again. Eviction waits for the copy. "
        "Needs `kv_page_bits` 16.",
    )
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

    @property
    def has_key(self) -> bool:
        """True if requests need an API key, the server's or one of the data folder's, or a sign-in."""
        signs_on = self.oidc_issuer is not None
        return signs_on or self.api_key is not None or os.path.lexists(self.data_dir / KEYS_FILE)

    def secrets(self, *names: str) -> dict[str, str]:
        """Environment variables of those that are set, for a process whose other settings are in a file."""
        given = {name: getattr(self, name) for name in names}
        return {f"RAGSERVE_{name.upper()}": key.get_secret_value() for name, key in given.items() if key}

    @property
    def shared_store(self) -> bool:
        """True if engines share a store of documents' KV."""
        return self.kv_storage in SHARED_STORES

    @property
    def own_files(self) -> bool:
        """True if documents' KV is kept in files of ours."""
        return bool(self.kv_disk_bytes) and (self.kv_storage == "file" or self.shared_store)

    @property
    def engine_elsewhere(self) -> bool:
        """True if the engine, or each of several, is another process's."""
        return self.engine_url is not None or self.workers is not None or self.replicas > 0

    @cached_property
    def default_strategy(self) -> StrategySpec:
        """``strategy``, parsed."""
        return parse(self.strategy)[0]

    @field_validator(
        *("registry_url", "tokenizer", "engine_url", "workers", "router_url"),
        *("kernel_cache_dir", "decode_heads", "otlp_endpoint"),
        mode="before",
    )
    @classmethod
    def _none_if_empty(cls, value: Any) -> Any:
        return value or None  # compose gives variables that are not set as empty

    @field_validator("strategy")
    @classmethod
    def _one_strategy(cls, text: str) -> str:
        return one_label(text, get_args(StrategyName))

    @model_validator(mode="after")
    def _fit_together(self) -> Settings:
        if (problem := sign_on_conflict(self) or conflict(self)) is not None:
            raise ValueError(problem)
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
        return init_settings, _Environment(settings_cls), _File(settings_cls)


def load(**flags: Any) -> Settings:
    """Settings with the given CLI flags on top; None means that a flag was not given."""
    given = {name: value for name, value in flags.items() if value is not None}
    return Settings(**renamed.with_new_names(given, renamed.SETTINGS))
