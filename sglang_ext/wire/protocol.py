"""Plain data that ragserve and SGLang's processes exchange. Imports neither torch nor SGLang.

A query is one ordinary SGLang generate call: the token ids of the whole prompt, and in
``sampling_params.custom_params`` the entry ``{"ragserve": <plan as JSON text>}`` (SGLang takes flat values
only). The report comes back in ``meta_info["ragserve"]``."""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

from sglang_ext.wire.joint_names import MOST, names_of
from sglang_ext.wire.request_options import DecodeOptions as DecodeOptions
from sglang_ext.wire.request_options import PlanError as PlanError

GPU_SGLANG, CPU_SGLANG = "0.5.17", "0.5.23"  # installed on machines with and without a GPU
SGLANG_VERSIONS = (GPU_SGLANG, CPU_SGLANG)  # all that `sglang_ext.versions` has a module for
PLAN_FIELD = "ragserve"
PLAN_VERSION = 1
# In custom_params: of how many first tokens the distributions are sent; in meta_info: a list of them
# (`sglang_ext.diagnostics.distribution`).
DISTRIBUTION_FIELD = "ragserve_distribution"
FORCED_FIELD = "ragserve_forced"  # in custom_params: token ids that the answer begins with, a JSON list
MAX_TRACED = 512  # tokens of both: 300 MB of distributions with a vocabulary of 150,000
# In custom_params: a request's decode options as JSON text; in meta_info: its DecodeReport.
DECODE_FIELD = "ragserve_decode"
PREFILL_FIELD = "ragserve_prefill"  # the same of its prefill
BACKGROUND_FIELD = "ragserve_background"  # in custom_params, set by the server only
FULL_KEY = "full:"  # begins the extra key of strategy `full`, which is a request's own
MISSING_PREFIX = "ragserve:missing:"
CONTROL_METHOD = "ragserve"
CACHE_BACKEND = "ragserve"  # SGLang's name for our document cache
# Environment variables of the scheduler processes, both JSON.
KV_CONFIG_VARIABLE = "RAGSERVE_KV"  # document cache
ATTENTION_CONFIG_VARIABLE = "RAGSERVE_ATTENTION_CONFIG"  # sparse decoding; absent: off
PREFILL_KERNELS_VARIABLE = "RAGSERVE_PREFILL_KERNELS"  # of FlashInfer, not JSON: fa2; otherwise FA3 on Hopper
NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")  # also safe as a folder name
EXACT_STRATEGIES = ("full", "prefix")
DOCUMENT_PAGE = 16  # tokens of a document's page on host and disk
_CHARS_PER_TOKEN = 64  # few tokens have more
_MIN_CHARS = 2**20

Operation = Literal["compose", "document"]


def longest_text(context_length: int) -> int:
    """Characters of text beyond which no prompt fits into the context, 1 Mi at least. Tokenising more would
    hold up the event loop for nothing."""
    return max(_CHARS_PER_TOKEN * context_length, _MIN_CHARS)


@dataclass(frozen=True, slots=True)
class Span:
    """``ids[start:end]``: the system text or one document, prefilled alone and cached under its key."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class SessionPart:
    """The dialogue that a request goes on with.

    ``key``: SGLang's extra key of its KV, see `session_key`. ``held``: the leading tokens of the prompt whose
    KV is to be found under that key; 0 in the first turn. The rest of the first span is computed again."""

    key: str
    held: int = 0


@dataclass(frozen=True, slots=True)
class RetrievalScores:
    """The retriever's scores of a plan's documents: cosines to the question, higher is nearer.

    ``documents``: one for each span behind the system text; None where it is unknown. ``sentences``: for each
    of these spans (token, score) pairs, tokens counted in the document. A score holds from its token to the
    next pair's; () where they are unknown."""

    documents: tuple[float | None, ...]
    sentences: tuple[tuple[tuple[int, float], ...], ...]

    def to_lists(self) -> dict[str, Any]:
        """The scores as JSON values, rounded to four digits: cosines of MiniLM are no better known."""
        return {
            "documents": [None if score is None else round(score, 4) for score in self.documents],
            "sentences": [[[token, round(score, 4)] for token, score in one] for one in self.sentences],
        }

    @classmethod
    def from_lists(cls, raw: Any, documents: Sequence[Span]) -> RetrievalScores:
        """Parse and check the scores of ``documents``. Raises PlanError."""
        try:
            given, pairs = raw["documents"], raw["sentences"]
            if len(given) != len(documents) or len(pairs) != len(documents):
                raise ValueError(f"{len(given)} and {len(pairs)} scores for {len(documents)} documents")
            return cls(
                tuple(None if score is None else _cosine(score) for score in given),
                tuple(
                    _sentence_scores(one, d.end - d.start) for one, d in zip(pairs, documents, strict=True)
                ),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(f"the plan's scores cannot be used: {error}") from None


def _sentence_scores(raw: Any, tokens: int) -> tuple[tuple[int, float], ...]:
    pairs = tuple((_whole(token), _cosine(score)) for token, score in raw)
    places = [token for token, _ in pairs]
    if any(a >= b for a, b in pairwise(places)):
        raise ValueError("tokens of sentences must ascend")
    if places and not 0 <= places[0] <= places[-1] < tokens:
        raise ValueError(f"a sentence begins outside of its document of {tokens} tokens")
    return pairs


def _cosine(score: Any) -> float:
    if type(score) not in (int, float) or not -1.001 <= score <= 1.001:  # false for NaN, too
        raise ValueError(f"a score must be a number from -1 to 1, not {score!r}")
    return float(score)


@dataclass(frozen=True, slots=True)
class ContextPlan:
    """The plan to serve one request.

    ``compose``: spans cover ``ids[0:question_start]`` without gaps, the system text first; the rest of the
    ids is extended over the composed slots. ``document``: the ids are one document, to be prefilled without
    others and cached; its option ``analyse`` false leaves the analysis to the first request that needs it,
    ``lasting`` false keeps it off the disk, ``first`` true makes it the text that prompts begin with.
    ``scores``: what the retriever knows, for strategies that choose. ``session``: the request's KV is kept
    under the session's key when it ends; from the second turn on the first span is all of the dialogue before
    the new documents. ``computed``: numbers of the spans that were in no tier and have been computed for this
    request; for its report. ``owners``: the namespace of each span, where ``namespace`` is a joint name."""

    operation: Operation
    namespace: str
    strategy: str = ""
    spans: tuple[Span, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    scores: RetrievalScores | None = None
    session: SessionPart | None = None
    computed: tuple[int, ...] = ()
    owners: tuple[str, ...] = ()

    def owner(self, number: int) -> str:
        """The namespace of a span's document, whose key and tiers are that namespace's."""
        return self.owners[number] if self.owners else self.namespace

    @property
    def question_start(self) -> int:
        return self.spans[-1].end if self.spans else 0

    @property
    def analyse(self) -> bool:
        """Analyse the document as soon as it is prefilled, if the engine analyses at ingestion."""
        analyse: bool = self.options.get("analyse", True)
        return analyse

    @property
    def lasting(self) -> bool:
        """Write the document through to disk."""
        lasting: bool = self.options.get("lasting", True)
        return lasting

    @property
    def first(self) -> bool:
        """The document is a system text: prompts begin with it."""
        first: bool = self.options.get("first", False)
        return first

    def to_json(self) -> str:
        fields: dict[str, Any] = {
            "v": PLAN_VERSION,
            "op": self.operation,
            "namespace": self.namespace,
            "strategy": self.strategy,
            "spans": [[s.start, s.end] for s in self.spans],
            "options": dict(self.options),
        }
        if self.scores is not None:
            fields["scores"] = self.scores.to_lists()
        if self.session is not None:
            fields["session"] = [self.session.key, self.session.held]
        if self.computed:
            fields["computed"] = list(self.computed)
        if self.owners:
            fields["owners"] = list(self.owners)
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str, n_ids: int) -> ContextPlan:
        """Parse and check against a prompt of ``n_ids`` tokens. Raises PlanError."""
        try:
            raw = json.loads(text)
            version, operation, namespace = raw["v"], raw["op"], raw["namespace"]
            spans = tuple(Span(_whole(a), _whole(b)) for a, b in raw["spans"])
            strategy, options = str(raw["strategy"]), dict(raw["options"])
            key, held = raw.get("session") or (None, 0)
            session = None if key is None else SessionPart(str(key), _whole(held))
            computed = tuple(_whole(number) for number in raw.get("computed", ()))
            owners = tuple(str(name) for name in raw.get("owners", ()))
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise PlanError(f"not a context plan: {error!r}") from None
        if version != PLAN_VERSION:
            raise PlanError(
                f"the plan has version {version} and this engine understands {PLAN_VERSION}: run one version "
                "of ragserve"
            )
        if (
            operation not in ("compose", "document")
            or not isinstance(namespace, str)
            or not all(map(NAMESPACE.fullmatch, names_of(namespace)))
        ):
            raise PlanError(
                "op must be compose or document, and namespace a name of letters, digits, '_', '.' and '-'"
            )
        plan = cls(
            operation, namespace, strategy, spans, options, session=session, computed=computed, owners=owners
        )
        plan._check(n_ids)
        if raw.get("scores") is None:
            return plan
        return replace(plan, scores=RetrievalScores.from_lists(raw["scores"], spans[1:]))

    def _check(self, n_ids: int) -> None:
        names = names_of(self.namespace)
        if self.operation == "document":
            if len(names) > 1:
                raise PlanError("a document is of one namespace")
            if self.session is not None:
                raise PlanError("a document has no session")
            flags = all(isinstance(value, bool) for value in self.options.values())
            if set(self.options) - {"analyse", "lasting", "first"} or not flags:
                raise PlanError("a document plan has the options analyse, lasting and first: true or false")
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
                f"the spans end at {position} and the prompt at {n_ids}: the question must have at least one "
                "token"
            )
        wanted = len(self.spans) if len(names) > 1 else 0
        if len(names) > MOST or len(self.owners) != wanted or not set(self.owners) <= set(names):
            raise PlanError(
                f"a plan over up to {MOST} namespaces names that of each span, one of them, and a plan in "
                "one namespace names none"
            )
        if self.session is not None and not (
            self.session.key.startswith(session_key(self.namespace))
            and 0 <= self.session.held <= self.spans[0].end
        ):
            raise PlanError("a session's key names its namespace, and it holds no more than the first span")


def _whole(number: Any) -> int:
    """The number of a plan's JSON, unless it only looks like one: ``1.9``, ``"3"`` and ``true``."""
    if type(number) is not int:
        raise TypeError(f"a span begins and ends at whole numbers, not at {number!r}")
    return number


def prefix_key(namespace: str) -> str:
    """SGLang's extra key for a namespace's exact prefix cache. The colon keeps it apart from document
    keys."""
    return f"namespace:{namespace}"


def session_key(namespace: str, name: str = "") -> str:
    """SGLang's extra key for the exact KV of a session; without ``name``, what all keys of a namespace begin
    with. No other key begins so, and no namespace has a colon."""
    return f"session:{namespace}:{name}"


def session_namespace(key: str) -> str:
    """The namespace under which a session's KV is kept, given its `session_key`: the first of several."""
    return names_of(key.split(":")[1])[0]


def holds_of(key: str, namespace: str) -> bool:
    """True for a `prefix_key` or `session_key` under which there may be documents of a namespace."""
    kind, _, rest = key.partition(":")
    return kind in ("namespace", "session") and namespace in names_of(rest.partition(":")[0])


def composed_session_key(key: str) -> str:
    """SGLang's extra key for the composed KV of the session whose exact KV has ``key``."""
    return f"{key}:composed"


class SystemText(list[int]):
    """Token ids that prompts begin with. Their KV is computed without the prefix of documents, and has a key
    of its own."""


def pieces_of(ids: Sequence[int], spans: Sequence[Span]) -> list[Sequence[int]]:
    """The texts of a composed prompt: the system text, then each document."""
    texts = [ids[span.start : span.end] for span in spans]
    return [SystemText(text) if number == 0 else text for number, text in enumerate(texts)]


def document_key(namespace: str, fingerprint: str, ids: Sequence[int]) -> str:
    """Cache key of a document's KV: 32 hex digits over namespace, model fingerprint and token ids, and over
    whether it is a `SystemText`.

    The namespace is part of the key, so the same text in two namespaces is two documents."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (namespace.encode(), fingerprint.encode()):
        digest.update(len(part).to_bytes(4, "little") + part)
    if isinstance(ids, SystemText):
        digest.update(b"first")
    digest.update(array("q", ids).tobytes())
    return digest.hexdigest()


def doc(text: str, default: Any = MISSING) -> Any:
    """Declare a field of a report with its text, which REST answers and their docs show, too."""
    if default is MISSING:
        return field(metadata={"doc": text})
    return field(default=default, metadata={"doc": text})


@dataclass(frozen=True, slots=True)
class ContextReport:
    """Account of a composed request: document tokens (the system text is exact and not counted), milliseconds
    by stage. Each field says what it counts."""

    strategy: str = doc("Composed strategy that answered.")
    document_tokens: int = doc("Document tokens of the prompt.")
    kept: int = doc("Document tokens that the answer could attend to.")
    recomputed: int = doc(
        "Document tokens computed with this query's context: by exact strategies all that were not cached, "
        "by composed ones those computed again."
    )
    by_tier: Mapping[str, int] = doc(
        "Document tokens by the tier of the cache that their KV came from; `remote`: the store that engines "
        "share. `computed`: those that were in no tier and were computed for this query."
    )
    compose_ms: float = doc("Composed: filling the context from cached documents.")
    load_ms: float = doc("Composed: waiting for documents from disk.")
    recompute_ms: float = doc("Composed: recomputing selected tokens, mostly with the question.")
    extend_ms: float = doc(
        "Forward of the question, or of its first chunk, and its batch; logits if one_pass.", 0.0
    )
    analysis_ms: float = doc("Analysing documents without an analysis.", 0.0)
    query_ms: float = doc("SamKV's query pass, shared by its batch.", 0.0)
    select_ms: float = doc("Choosing what to keep and what to recompute.", 0.0)
    ask_ms: float = doc("Part of recompute_ms: the question's attention, where the rule needs it.", 0.0)
    recompute_graph: bool = doc("The recompute pass was one CUDA graph.", False)
    one_pass: bool = doc("The recompute pass computed the question too; recompute_ms includes it.", False)
    keep_reason: str = doc("Why so many tokens are kept, where the strategy chose.", "")
    recompute_reason: str = doc("Why so many are computed again, where the rule chose.", "")
    unknown_sensitivity: tuple[int, ...] = doc(
        "Spans whose context sensitivity was not known: the question's attention alone chose of them.", ()
    )
    session_held: int = doc("Tokens of earlier turns that were found under the session's key.", 0)
    session_computed: int = doc("Tokens of earlier turns that were computed again.", 0)

    def to_json(self) -> str:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return json.dumps(fields | {"by_tier": dict(self.by_tier)}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> ContextReport:
        fields = json.loads(text)
        unknown = tuple(fields.pop("unknown_sensitivity", ()))
        return cls(**fields, unknown_sensitivity=unknown)


@dataclass(slots=True, kw_only=True)
class OffloadCounts:
    """The part of a `DecodeReport` that offloading counts; each field says what. A request that is retracted
    is offloaded anew, and counts on."""

    offloaded_steps: int = doc("Steps that read the prompt's pages in GPU-resident blocks.", 0)
    hits: int = doc("Selected pages of KV heads that were in a resident block, summed over layers.", 0)
    misses: int = doc("Selected pages that were loaded into resident blocks, likewise.", 0)
    fills: int = doc(
        "`progressive`: selected pages that steps read on the host and wrote to resident blocks.", 0
    )
    host_reads: int = doc("`progressive`: offloaded pages that steps read on the host.", 0)
    loaded_bytes: int = doc("Bytes of these misses and reads.", 0)
    resident_blocks: int = doc("Pages on the device for each KV head of an offloaded request.", 0)
    working_set: float = doc("Offloaded pages that a head's latest selections have named, the mean.", 0.0)
    resumed: int = doc("How often it was retracted and continued from its host pages.", 0)
    segmented_tokens: int = doc("Prompt tokens prefilled layer by layer, onto host pages.", 0)


@dataclass(slots=True)
class DecodeReport(OffloadCounts):
    """Account of a request's decode steps; each field says what it counts. Pages are means over layers and KV
    heads, or sums over them where it says so."""

    mode: str = doc("`hierarchical` (a token budget) or `progressive` (a threshold).")
    steps: int = doc("Decode steps: one per token after the first.")
    sparse_steps: int = doc("Of these, steps that did not read all of the context.")
    pages: float = doc("Pages of KV read per step, mean over layers and KV heads.")
    pages_held: float = doc("Pages of the context, likewise.")
    share: float = doc("Share of the context's pages that were read.")
    weight: float | None = doc(
        "Estimated share of the attention weight in the pages read; null without an estimate."
    )
    lag: int = doc("Steps between a page selection and its use.", 0)

    def to_json(self) -> str:
        return json.dumps(
            {name: getattr(self, name) for name in self.__dataclass_fields__}, separators=(",", ":")
        )

    @classmethod
    def from_json(cls, text: str) -> DecodeReport:
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True)
class PrefillReport:
    """Account of a request's sparse prefill; each field says what it counts."""

    mode: str = doc("`vertical_slash` or `block_sparse`.")
    alpha: float = doc("Share of the attention weight that was to be held.")
    tokens: int = doc("Prompt tokens prefilled sparsely; others were cached, made likewise.")
    share: float = doc(
        "Share of the blocks of dense attention that were computed, over layers and query heads."
    )
    reused_lines: float = doc(
        "`vertical_slash`: lines taken from those of an earlier turn; mean by query head and 1,024 tokens.",
        0.0,
    )
    new_lines: float = doc("`vertical_slash`: other lines taken, likewise.", 0.0)

    def to_json(self) -> str:
        return json.dumps(
            {name: getattr(self, name) for name in self.__dataclass_fields__}, separators=(",", ":")
        )

    @classmethod
    def from_json(cls, text: str) -> PrefillReport:
        return cls(**json.loads(text))
