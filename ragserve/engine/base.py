"""How the product talks to the runtime: one small protocol, with SGLang in this process group (`local`) or
elsewhere (`remote`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sglang_ext.protocol import ContextReport, DecodeReport, Span


@dataclass(frozen=True, slots=True)
class Sampling:
    """Decoding parameters, with SGLang's names and meaning. temperature 0 is greedy."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    ignore_eos: bool = False  # for measurements: every request generates all its tokens


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One generation. ``input_ids`` is the whole prompt; ``namespace`` isolates what is cached between
    tenants.

    A strategy that composes needs ``spans``: the system text and each document, from position 0 without gaps;
    ``options`` are its own. ``distribution`` asks for that of the first token, which costs time and is for
    measurements. ``decode``: fields of `sglang_ext.protocol.DecodeOptions` that differ from the server's, for
    an engine with sparse decoding."""

    rid: str
    input_ids: list[int]
    namespace: str
    strategy: str = "prefix"
    sampling: Sampling = field(default_factory=Sampling)
    spans: tuple[Span, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    distribution: bool = False
    decode: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineUsage:
    """Tokens: of the prompt, of it found in the exact prefix cache, generated."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0


@dataclass(frozen=True, slots=True)
class EngineTimings:
    """Milliseconds as the engine measured them; None where it does not say."""

    queue_ms: float | None = None
    prefill_ms: float | None = None


@dataclass(frozen=True, slots=True)
class GenerateChunk:
    """A piece of the answer. The last one of a stream has ``finish_reason`` (``stop``, ``length`` or
    ``abort``).
    """

    text: str
    usage: EngineUsage
    timings: EngineTimings
    finish_reason: str | None = None
    context: ContextReport | None = None  # what was composed; None for exact strategies
    decode: DecodeReport | None = (
        None  # what sparse decode steps read; on the last chunk only, None for dense requests
    )
    fallback: str | None = None  # why an exact strategy answered instead of the one asked for
    distribution: str | None = (
        None  # base64 of float32 log-probabilities [vocabulary] of the first token, where it was asked for
    )


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What is serving. ``max_prompt_tokens`` bounds prompt + answer: the smaller of the context and the KV
    pool.
    """

    kind: str  # "local" | "remote"
    model: str
    tokenizer: str
    version: str
    device: str
    attention_backend: str
    context_length: int
    max_total_tokens: int
    strategies: tuple[str, ...]
    fingerprint: str = (
        ""  # of the model's configuration and weights, whatever their precision; empty where it is not known
    )
    only_exact: str | None = None  # why there are none but the exact strategies
    sparse_decode: bool = False  # whether requests may say how their decode steps attend
    dtype: str = ""  # of weights and KV, as "bfloat16", or "bfloat16, KV fp8_e5m2" where they differ; empty where it is not known
    # digest of the profile that completes samkv's options (`ragserve.profiles.samkv`); empty without one
    samkv: str = ""

    @property
    def max_prompt_tokens(self) -> int:
        return min(self.context_length, self.max_total_tokens)


class Engine(Protocol):
    """Thread-compatible with one event loop: all coroutines run on the loop that the server runs on."""

    async def start(self) -> EngineInfo:
        """Connect or wait until requests are served. Raises ``Unavailable`` where that cannot be."""
        ...

    @property
    def info(self) -> EngineInfo:
        """Valid after ``start``."""
        ...

    async def ready(self) -> bool:
        """Whether a request sent now would be served."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """Stream an answer. Closing the iterator early, or cancelling the task that reads it, aborts the
        request in the engine.

        Raises ``EngineError``, ``InvalidRequest``, ``TooManyRequests`` or ``Unavailable``.
        """
        ...

    async def forget(self, namespace: str, documents: Sequence[Sequence[int]] | None) -> None:
        """Evict what is cached of these documents (token ids of their segments; None: of the whole namespace)
        from every tier.
        """
        ...

    async def close(self) -> None: ...
