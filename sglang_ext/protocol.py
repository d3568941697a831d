"""What the product and the processes of SGLang say to each other: plain data that both sides import. No
torch, no SGLang.

A query travels as one ordinary SGLang generate call: the ids of the whole prompt, and in
``sampling_params.custom_params`` the entry ``{"ragserve": <plan as JSON text>}`` (SGLang takes flat values
only). What happened comes back in ``meta_info["ragserve"]``."""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

SGLANG_VERSION = "0.5.16"  # the version that `sglang_ext` is written for
PLAN_FIELD = "ragserve"
PLAN_VERSION = 1
# in custom_params: true asks for it; in meta_info: what came (see `sglang_ext.distribution`)
DISTRIBUTION_FIELD = "ragserve_distribution"
MISSING_PREFIX = "ragserve:missing:"
CONTROL_METHOD = "ragserve"
CACHE_BACKEND = "ragserve"  # SGLang's name for our document cache
KV_CONFIG_VARIABLE = "RAGSERVE_KV"  # environment of the scheduler processes: settings of the tiers, JSON
NAMESPACE = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
)  # as the product's settings have it; safe as a folder's name
EXACT_STRATEGIES = ("full", "prefix")

Operation = Literal["compose", "document"]


class PlanError(ValueError):
    """A plan that cannot be carried out; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Span:
    """``ids[start:end]``: the system text or one document, prefilled alone and cached under its key."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ContextPlan:
    """How to serve one request.

    ``compose``: spans cover ``ids[0:question_start]`` without gaps, the system text first; the rest of the
    ids is extended over the composed slots. ``document``: the ids are one document alone, to be cached; its
    option ``analyse`` false leaves the analysis to the first request that needs it. Raises PlanError on
    construction from bad data."""

    operation: Operation
    namespace: str
    strategy: str = ""
    spans: tuple[Span, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def question_start(self) -> int:
        return self.spans[-1].end if self.spans else 0

    @property
    def analyse(self) -> bool:
        """Of a document: whether it is analysed as soon as it is prefilled, where the engine does that at
        all.
        """
        analyse: bool = self.options.get("analyse", True)
        return analyse

    def to_json(self) -> str:
        return json.dumps(
            {
                "v": PLAN_VERSION,
                "op": self.operation,
                "namespace": self.namespace,
                "strategy": self.strategy,
                "spans": [[s.start, s.end] for s in self.spans],
                "options": dict(self.options),
            },
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str, n_ids: int) -> ContextPlan:
        """Parse and check against a prompt of ``n_ids`` tokens."""
        try:
            raw = json.loads(text)
            version, operation, namespace = raw["v"], raw["op"], raw["namespace"]
            spans = tuple(Span(int(a), int(b)) for a, b in raw["spans"])
            strategy, options = str(raw["strategy"]), dict(raw["options"])
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise PlanError(f"not a context plan: {error!r}") from None
        if version != PLAN_VERSION:
            raise PlanError(
                f"the plan has version {version}, this engine understands {PLAN_VERSION}: run one version of ragserve"
            )
        if (
            operation not in ("compose", "document")
            or not isinstance(namespace, str)
            or not NAMESPACE.fullmatch(namespace)
        ):
            raise PlanError(
                "op must be compose or document, and namespace a name of letters, digits, '_', '.' and '-'"
            )
        plan = cls(operation, namespace, strategy, spans, options)
        plan._check(n_ids)
        return plan

    def _check(self, n_ids: int) -> None:
        if self.operation == "document":
            if set(self.options) - {"analyse"} or not isinstance(self.analyse, bool):
                raise PlanError("a document's plan has one option, analyse: true or false")
            return
        if not self.spans:
            raise PlanError("nothing to compose: the plan has no spans")
        position = 0
        for span in self.spans:
            if span.start != position or span.end <= span.start:
                raise PlanError(f"span {span.start}:{span.end} does not continue at {position}")
            position = span.end
        if position >= n_ids:
            raise PlanError(
                f"the spans end at {position} and the prompt at {n_ids}: the question must have at least one token"
            )


def prefix_key(namespace: str) -> str:
    """SGLang's extra key of a namespace's exact prefix cache. The colon keeps it apart from documents' keys."""
    return f"namespace:{namespace}"


def document_key(namespace: str, fingerprint: str, ids: Sequence[int]) -> str:
    """Under what a document's KV is cached: 32 hex digits over namespace, model (fingerprint) and token ids.

    The namespace is part of it, so the same text in two namespaces is two documents.
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in (namespace.encode(), fingerprint.encode()):
        digest.update(len(part).to_bytes(4, "little") + part)
    digest.update(array("q", ids).tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class ContextReport:
    """What was done for a composed request. Tokens are the documents'; the system text is exact and not
    counted. Milliseconds per stage.
    """

    strategy: str
    document_tokens: int
    kept: int
    recomputed: int
    by_tier: Mapping[str, int]
    compose_ms: float
    load_ms: float
    recompute_ms: float
    # the forward pass of the question, or of its first chunk, and of the requests beside it; logits, if
    # one_pass
    extend_ms: float = 0.0
    analysis_ms: float = 0.0  # of documents that had none yet
    query_ms: float = 0.0  # SamKV's query pass, of all requests in it
    select_ms: float = 0.0
    ask_ms: float = (
        0.0  # part of recompute_ms: the question over its composed context, where the rule asks for that
    )
    recompute_graph: bool = False  # whether the pass was one CUDA graph
    one_pass: bool = False  # whether the question was computed in it: recompute_ms holds that

    def to_json(self) -> str:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return json.dumps(fields | {"by_tier": dict(self.by_tier)}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> ContextReport:
        return cls(**json.loads(text))


DECODE_FIELD = (
    "ragserve_decode"  # of custom_params (a request's wish, JSON text) and of meta_info (what was attended)
)
ATTENTION_CONFIG_VARIABLE = (
    "RAGSERVE_ATTENTION_CONFIG"  # environment of the scheduler processes: sparse decoding, JSON; absent: off
)
DECODE_MODES = ("dense", "hierarchical", "progressive")
DecodeMode = Literal["dense", "hierarchical", "progressive"]


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """How one request's decode steps attend to its KV. Raises PlanError on construction from bad values.

    ``dense``: to all of it. ``hierarchical``: to the pages that score best within ``budget`` tokens, chosen
    every ``reuse`` steps. ``progressive``: to pages in the order of their scores until the estimated share of
    the attention weight passes ``threshold``. Up to ``dense_below`` tokens of context a request is dense in
    any mode; ``streaming``: the heads of the server's pattern file attend to the first and the latest tokens
    only."""

    mode: DecodeMode = "dense"
    budget: int = 2048
    reuse: int = 16
    threshold: float = 0.95
    dense_below: int = 8192
    streaming: bool = False

    def __post_init__(self) -> None:
        if self.mode not in DECODE_MODES:
            raise PlanError(f"decode mode {self.mode!r}: expected one of {', '.join(DECODE_MODES)}")
        for name, least in (("budget", 1), ("reuse", 1), ("dense_below", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise PlanError(
                    f"decode option {name} is {value!r}: expected a whole number of at least {least}"
                )
        if not isinstance(self.threshold, (int, float)) or not 0 < self.threshold <= 1:
            raise PlanError(f"decode option threshold is {self.threshold!r}: expected a share in (0, 1]")
        if not isinstance(self.streaming, bool):
            raise PlanError(f"decode option streaming is {self.streaming!r}: expected true or false")

    def updated(self, changes: Mapping[str, Any]) -> DecodeOptions:
        """These options with some replaced. Raises PlanError for names that do not exist and for bad values."""
        unknown = sorted(set(changes) - set(self.__dataclass_fields__))
        if unknown:
            raise PlanError(
                f"no decode option {', '.join(unknown)}: one of {', '.join(self.__dataclass_fields__)}"
            )
        return replace(self, **changes)

    def from_request(self, text: str) -> DecodeOptions:
        """These options, a server's, with what a request's JSON text asks for."""
        try:
            changes = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(f"decode options are not JSON: {error}") from None
        if not isinstance(changes, dict):
            raise PlanError("decode options must be a JSON object")
        return self.updated(changes)


@dataclass(frozen=True, slots=True)
class DecodeReport:
    """What a request's decode steps attended to. Pages are means over layers and KV heads.

    ``sparse_steps`` of its ``steps`` were not dense. ``pages``: read per step, of ``pages_held``; ``share``:
    their quotient. ``weight``: the estimated share of the attention weight in what was read, mean over
    progressive steps; None where nobody estimated."""

    mode: str
    steps: int
    sparse_steps: int
    pages: float
    pages_held: float
    share: float
    weight: float | None

    def to_json(self) -> str:
        return json.dumps(
            {name: getattr(self, name) for name in self.__dataclass_fields__}, separators=(",", ":")
        )

    @classmethod
    def from_json(cls, text: str) -> DecodeReport:
        return cls(**json.loads(text))
