"""The engine protocol: SGLang in this process group (`local`) or elsewhere (`remote`)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from ragserve.strategy_spec import FORCE
from sglang_ext.wire.protocol import (
    DOCUMENT_PAGE,
    ContextReport,
    DecodeReport,
    PrefillReport,
    RetrievalScores,
    SessionPart,
    Span,
)
from sglang_ext.wire.request_options import STRATEGY_OPTIONS, PlanError, copies_documents, strategy_options

# SGLang keeps a few positions of the context to itself; they must not cut an answer short.
_RESERVED_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters with SGLang's names and meaning; temperature 0 is greedy.

    ``constraint``: the grammar that the answer keeps to, by SGLang's name for its kind. ``special_tokens``:
    they are part of the text."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    ignore_eos: bool = False  # for measurements: every request generates all its tokens
    constraint: Mapping[str, str] = field(default_factory=dict)
    special_tokens: bool = False


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A generation.

    Args:
        rid: Name of the request; the engine makes it unique.
        input_ids: Token ids of the whole prompt.
        namespace: Tenant; cached KV is never shared between namespaces. Of a request over several, their
            joint name.
        strategy: Exact (`full`, `prefix`) or the name of a composed strategy.
        sampling: Sampling parameters.
        spans: For composed strategies: the system text and each document, from position 0 without gaps.
        owners: The namespace of each span, where ``namespace`` is a joint name: a document has one KV,
            whatever other namespaces are asked with it.
        system: A span that begins at 0 is the system text; false where spans are documents alone.
        options: Options of the strategy.
        distributions: Number of first tokens whose distributions are returned. Costs time; for measurements.
        forced: Token ids that the answer begins with, whatever the model would say; for measurements.
        decode: Fields of `sglang_ext.wire` `DecodeOptions` that differ from the server's default, for an
            engine with sparse decoding.
        prefill: Fields of `sglang_ext.wire` `PrefillOptions` that differ from the server's default,
            for the same engines. For exact strategies.
        unregistered: Numbers of the spans whose texts no index has, such as documents sent with a query.
            Their KV stays in memory: no removal would ever name it, to erase it from disk.
        scores: What the retriever knows of the documents, for strategies that choose among their tokens.
        session: The dialogue that the request goes on with, whose KV is kept apart from all other.
        earlier: Makes the request of the session's previous turn, by which a composed turn's KV is computed
            again when it has been evicted; None in the first turn.
        computed: Numbers of the spans that have just been computed for this request, for its report.
        background: The server's own, for nobody who waits: an exact prefill runs in short chunks, so that
            user requests can be batched with the next chunk, and a composed one ends between layers when it
            is cancelled."""

    rid: str
    input_ids: list[int]
    namespace: str
    strategy: str = "prefix"
    sampling: Sampling = field(default_factory=Sampling)
    spans: tuple[Span, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    distributions: int = 0
    forced: Sequence[int] = ()
    decode: Mapping[str, Any] = field(default_factory=dict)
    prefill: Mapping[str, Any] = field(default_factory=dict)
    unregistered: Sequence[int] = ()
    scores: RetrievalScores | None = None
    session: SessionPart | None = None
    earlier: Callable[[], GenerateRequest] | None = None
    computed: tuple[int, ...] = ()
    background: bool = False
    system: bool = True
    owners: tuple[str, ...] = ()

    def owner(self, span: Span) -> str:
        """The namespace of a span's document."""
        return self.owners[self.spans.index(span)] if self.owners else self.namespace

    @property
    def asks_sparse(self) -> bool:
        """It asks for sparse prefill itself, whatever the server's default."""
        return self.prefill.get("mode", "dense") != "dense"


@dataclass(frozen=True, slots=True)
class EngineUsage:
    """Tokens of the prompt, prompt tokens found in the exact prefix cache, and tokens generated."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0


@dataclass(frozen=True, slots=True)
class EngineTimings:
    """Milliseconds, measured by the engine; None if it reports none. ``documents_ms``: until the documents of
    a composed request that were in no tier, ``documents_tokens``, were computed; None if there were none."""

    queue_ms: float | None = None
    prefill_ms: float | None = None
    documents_ms: float | None = None
    documents_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class GenerateChunk:
    """A piece of the answer. The last has a ``finish_reason``: ``stop``, ``length`` or ``abort``."""

    text: str
    usage: EngineUsage
    timings: EngineTimings
    finish_reason: str | None = None
    context: ContextReport | None = None  # None for exact strategies
    decode: DecodeReport | None = None  # pages read by sparse decode steps; last chunk only, None if dense
    fallback: str | None = None  # why an exact strategy answered instead of the requested one
    # Log-probabilities of the first tokens so far, base64 of float32 [vocabulary] each; only if requested
    distributions: Sequence[str] = ()
    output_ids: Sequence[int] = ()  # the answer's tokens; last chunk only
    prefill: PrefillReport | None = None  # of a sparse prefill; last chunk only, None if dense


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Model, device and limits of a running engine."""

    kind: str  # "local" | "remote" | "fleet"
    model: str
    tokenizer: str
    version: str
    device: str
    attention_backend: str
    context_length: int
    max_total_tokens: int
    strategies: tuple[str, ...]
    fingerprint: str = ""  # of the model's configuration and weights at any precision; empty if unknown
    only_exact: str | None = None  # why only exact strategies are available
    sparse_decode: bool = False  # requests may carry decode options
    sparse_prefill: bool = False  # and prefill options: the same engines, with KV of 16 bits
    offloaded: bool = False  # requests are offloaded unless their decode options say otherwise
    decode_mode: str = "dense"  # of requests whose decode options name none
    offloaded_tokens: int = 0  # of prompts, which host memory holds; 0: no request can be offloaded
    by_layers: bool = False  # offloaded prompts that the KV pool cannot take are prefilled layer by layer
    context_tokens: int = 0  # of a composed context that is read in documents' host pages; 0: none
    context_pages: int = 0  # that their documents may take of the host tier
    dtype: str = ""  # "bfloat16", or "bfloat16, KV fp8_e5m2" if weights and KV differ; empty if unknown
    page_bits: int = 16  # of documents' KV below the device; 16: as the KV pool has it
    samkv: str = ""  # digest of the samkv profile (`ragserve.profiles.samkv`); empty without one
    samkv_defaults: Mapping[str, Any] = field(default_factory=dict)  # options of samkv that the profile gives
    prefix: str = ""  # digest of what documents are prefilled behind (`kv_prefix`); empty without one
    sparse: str = ""  # modes and budgets of decoding and prefill by default; empty if both are dense
    sparse_choice: str = ""  # what sparse_attention=auto has chosen, and why; empty if it is not auto
    start_s: float | None = None  # seconds from the start to readiness; None for an engine elsewhere
    warm_up_s: float | None = None  # of these, the requests that compile and load kernels

    @property
    def gate_identity(self) -> dict[str, str]:
        """What the gate's records are compared with (`ragserve.profiles.gate.Gate.of`)."""
        names = ("model", "fingerprint", "dtype", "samkv", "prefix", "sparse")
        return {name: getattr(self, name) for name in names}

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens for prompt and answer: the smaller of context and KV pool, less SGLang's reserve."""
        return min(self.context_length, self.max_total_tokens) - _RESERVED_TOKENS

    def prompt_room(self, request: GenerateRequest, documents: int = 0) -> int:
        """Tokens for prompt and answer of a request whose prompt is to be laid out, with so many documents: a
        offloaded one may be larger than the KV pool, and a composed one than the host memory of prompts,
        too."""
        decode, most = request.decode, self.max_total_tokens
        if not decode.get("offloaded", self.offloaded):
            return self.max_prompt_tokens
        copies = _copies(request)
        if self.by_layers or copies:
            most = max(most, self.offloaded_tokens)
        if copies and decode.get("mode", self.decode_mode) != "dense":
            # the last page of each document, and of the system text, may be filled by one token
            pages = self.context_pages - documents - 1
            most = max(most, min(self.context_tokens, pages * DOCUMENT_PAGE))
        return min(self.context_length, most) - _RESERVED_TOKENS


def _copies(request: GenerateRequest) -> bool:
    options = {name: value for name, value in request.options.items() if name != FORCE}
    try:
        known = request.strategy in STRATEGY_OPTIONS
        return known and copies_documents(strategy_options(request.strategy, options))
    except PlanError:  # the engine says so
        return False


class AnswerSource(Protocol):
    """Generates answers, whatever else it does."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """Stream an answer. Closing the iterator, or cancelling its reader, aborts the request.

        Raises ``EngineError``, ``InvalidRequest``, ``TooManyRequests`` or ``Unavailable``.
        """
        ...


class Engine(AnswerSource, Protocol):
    """Generates answers. All coroutines run on the server's event loop."""

    async def start(self) -> EngineInfo:
        """Connect, and wait until requests are served. Raises ``Unavailable`` on failure."""
        ...

    @property
    def info(self) -> EngineInfo:
        """Valid after ``start``."""
        ...

    async def ready(self) -> bool:
        """Return True if a request sent now would be served."""
        ...

    async def forget(self, namespace: str, documents: Sequence[Sequence[int]] | None) -> None:
        """Evict documents (token ids of their segments; None: the whole namespace) from every tier."""
        ...

    async def close(self) -> None:
        """Abort running requests and release connections."""
        ...


class WarmEngine(Engine, Protocol):
    """An engine that can cache documents before they are used."""

    async def warm(self, request: GenerateRequest) -> None:
        """Compute each span of the request alone, into all tiers."""
        ...


@runtime_checkable
class TokenizingEngine(Protocol):
    """An `Engine` that another process runs, perhaps with another tokenizer."""

    async def check_tokenizer(self, encode: Callable[[str], Sequence[int]]) -> None:
        """Raise InvalidRequest if the engine makes other tokens of a text than ``encode``, the server's
        tokenizer: ids that its model does not have would end it. An engine that does not say passes."""
        ...
