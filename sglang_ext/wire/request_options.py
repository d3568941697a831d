"""Options of composed strategies and of sparse decoding: plain data, without torch or SGLang.

ragserve checks them where a request or a command arrives. The scheduler checks them again, because a plan may
also come from a client of SGLang's ``/generate``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from sglang_ext.wire import decode_fields, renamed
from sglang_ext.wire.option_checks import PlanError as PlanError
from sglang_ext.wire.option_checks import RequestOptions as RequestOptions
from sglang_ext.wire.option_checks import checked, given_in

Share = Annotated[float, Field(gt=0, le=1)]
Weight = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
RuleName = Literal[
    "all",
    "anchors",
    "deviation",
    "first",
    "none",
    "outliers",
    "question",
    "random",
    "sensitivity",
    "sentences",
]
Recompute = Annotated[
    RuleName | list[Count],
    Field(
        description="Tokens to compute again: a rule, or a list of positions in the prompt. `sentences`: "
        "whole sentences that the question attends to and that depend on other documents; `sensitivity`: "
        "the tokens that depend most on other documents; `deviation`: those whose values differ most from "
        "the cached ones at layer 1 (CacheBlend); `question`: the tokens that the question attends to most "
        "(after ProphetKV); `anchors`: the same after it has read a few tokens of each document (QCFuse); "
        "`first`: the beginning of each document (EPIC); `outliers`: SamKV's; `random`, `all`, `none`."
    ),
]
KeptPositions = Literal["original", "compact"]
QuestionQuery = Literal["last", "mean"]
# Option `experimental.scoring` by selection; the first is the default.
SCORINGS = {
    "sentences": ("keys", "attention"),
    "shared": ("attention", "zscore", "softmax", "raw"),
    "layers": ("attention", "zscore", "softmax", "raw"),
}
OFFLOAD_LAG = 2  # steps in which the link loads what a choice misses
MAX_LAG = 7  # with it, pages of 16 still see one page begin at most while a choice serves
MIN_TOKENS = 1024  # so few cost next to nothing, and a share of them answers less
SENSITIVE_RULES = ("sensitivity", "sentences")
_SCORED_RULES = ("anchors", "question", *SENSITIVE_RULES)
_SHARED_RULES = (*_SCORED_RULES, "deviation", "random")


class ConcatExperiment(RequestOptions):
    """Switches for ablations of `concat`; not for serving."""

    rotate: bool = Field(
        default=True,
        description="false leaves keys at their documents' own positions, which is wrong on purpose.",
    )
    kept: list[Count] | list[list[Count]] | None = Field(
        default=None,
        description="Positions to keep, ascending: one list, or a list of the same length for every layer.",
    )


class SamKvExperiment(RequestOptions):
    """Tuned constants and ablation switches of `samkv`; their defaults were measured together."""

    scoring: Literal["keys", "attention", "zscore", "softmax", "raw"] | None = Field(
        default=None,
        description="Score of what may be kept. Sentences: `keys` (default; the retrieval heads' token "
        "keys) or `attention`; blocks: `attention` (default), `zscore` (the paper's), `softmax` or `raw`.",
    )
    question_query: QuestionQuery = Field(
        default="last",
        description="Query that stands for the question: its last token's, or the mean (the paper's).",
    )
    lexical_weight: Weight = Field(
        default=0.3, description="sentences: weight of words beside attention; 1 needs no query pass."
    )
    retrieval_weight: Weight = Field(
        default=0.67,
        description="sentences: weight of the retriever's scores of passages and sentences beside words and "
        "attention, where the request has them.",
    )
    document_weight: Weight = Field(default=0.5, description="sentences: passages' part of retrieval_weight.")
    continuation_weight: Weight = Field(
        default=0.7,
        description="sentences: a passage that names no subject of its own (`Further notes`) has at least "
        "this share of the retriever's score of the passage before it.",
    )
    feedback_weight: Weight = Field(
        default=0.3,
        description="sentences: weight, beside the other signals, of words shared with the best sentences of "
        "other documents: finds the second step of a question.",
    )
    document_prior: Weight = Field(
        default=0.0,
        description="blocks: exponent of the retriever's scores of passages as a prior over documents; 0, as "
        "in the paper, leaves them out.",
    )
    title_weight: Weight = Field(
        default=0.6,
        description="sentences: a document's first sentence scores at least this share of the best sentence "
        "of its own and of the next document.",
    )
    attention_power: Weight = Field(default=0.5, description="sentences: exponent of the attention score.")
    length_penalty: Weight = Field(
        default=0.5, description="sentences: a score is divided by the sentence's tokens to this power."
    )


class ComposedOptions(RequestOptions):
    """Options that all composed strategies share."""

    recompute: Recompute = "none"
    share: Share | None = Field(
        default=None,
        description="Share of the kept document tokens that the rule computes again. Default: 0.15; for "
        "rule `sentences` 0.1, and 0.66 where samkv keeps sentences. With `share_top_p` the most.",
    )
    share_top_p: Share | None = Field(
        default=None,
        description="Rules with scores (`sentences`, `question`, `anchors`, `sensitivity`): compute the best "
        "tokens again that hold this share of the sum of all scores, at least `share_least` and at most "
        "`share` (0.3 by default, 1 where samkv keeps sentences) of the kept document tokens. Default: "
        "`share` decides.",
    )
    share_least: Share = Field(
        default=0.02, description="With `share_top_p`: least share of the kept document tokens."
    )
    max_recomputed: int | None = Field(
        default=None,
        ge=1,
        lt=2**63,
        description="Most document tokens that a rule with a share computes again, whatever their share. "
        "Default: no limit.",
    )
    first: Count | None = Field(
        default=None,
        description="Tokens of each document's beginning: all that rule `first` takes (default 16), and "
        "what `sentences` takes before any sentence (default 4).",
    )
    seed: Count = Field(default=0, description="Seed of rule `random`.")
    update: Literal["overwrite", "fusion"] = Field(
        default="overwrite",
        description="Recomputed KV replaces the cached, or is blended with it by cosine similarity (SamKV).",
    )

    @model_validator(mode="after")
    def _fits_the_rule(self) -> Self:
        rule = self.recompute if isinstance(self.recompute, str) else "positions"
        if self.share_top_p is not None and rule not in _SCORED_RULES:
            raise ValueError(
                f"share_top_p needs one of the rules {', '.join(_SCORED_RULES)}, and recompute is {rule}"
            )
        if self.max_recomputed is not None and rule not in _SHARED_RULES:
            raise ValueError(
                f"max_recomputed needs one of the rules {', '.join(_SHARED_RULES)}, and recompute is {rule}"
            )
        return self


class KeepOptions(ComposedOptions):
    """Options of strategies that keep evenly spaced blocks."""

    keep: Share = Field(
        default=1.0, description="Share of each document's blocks of 16 tokens to keep, evenly spaced."
    )


class ConcatOptions(KeepOptions):
    """`concat`: the documents' KV as it is, moved to its place; nothing is recomputed by default."""

    kept_positions: KeptPositions = Field(
        default="original",
        description="Positions of kept tokens: those in the full prompt, or those of a prompt of the kept "
        "tokens alone.",
    )
    experimental: ConcatExperiment = Field(
        default_factory=ConcatExperiment, description="Switches for ablations."
    )

    @model_validator(mode="after")
    def _fits_compact_positions(self) -> ConcatOptions:
        kept = self.experimental.kept
        if self.kept_positions == "compact" and kept and isinstance(kept[0], list):
            raise ValueError("kept_positions=compact needs the same tokens in every layer")
        if self.kept_positions == "compact" and not self.experimental.rotate:
            raise ValueError("experimental.rotate=false needs kept_positions=original; compact moves keys")
        return self


class EpicOptions(KeepOptions):
    """`epic`: the first tokens of every document are recomputed (EPIC)."""

    recompute: Recompute = "first"


class RandomOptions(KeepOptions):
    """`random`: a random share of the document tokens is recomputed; the baseline of every rule."""

    recompute: Recompute = "random"


class CacheBlendOptions(ComposedOptions):
    """`cacheblend`: the tokens whose values at layer 1 differ most are recomputed (CacheBlend)."""

    recompute: Recompute = "deviation"


class SamKvOptions(ComposedOptions):
    """`samkv`: sentences or blocks that the question and the other documents point to are kept (SamKV).

    The paper's method is ``selection=layers,update=fusion,experimental.question_query=mean``, with
    ``experimental.scoring=zscore``."""

    selection: Literal["sentences", "shared", "layers", "none"] = Field(
        default="sentences",
        description="What is kept: whole `sentences`; blocks, the same in all layers (`shared`) or by layer "
        "(`layers`, the paper's); or initial and local blocks alone (`none`).",
    )
    recompute: Recompute = "sentences"
    keep: Share | None = Field(
        default=None,
        description="Share of the document tokens to keep. Default: 0.15 of sentences; blocks: as many as "
        "the documents' statistics ask for, at most one document's share.",
    )
    top_p: Share | None = Field(
        default=None,
        description="sentences: keep the best ones that hold this share of the weight of all scores, at "
        "least `keep_least` and at most `keep` (0.6 by default) of the document tokens. Default: `keep` "
        "decides.",
    )
    keep_least: Share = Field(
        default=0.05, description="sentences with `top_p`: least share of the document tokens to keep."
    )
    min_tokens: Count = Field(
        default=MIN_TOKENS,
        description="sentences: least document tokens to keep. 0 by default with `keep` or `top_p`.",
    )
    personalised: bool = Field(
        default=False,
        description="Bias each document's query towards the other documents (the paper's equation 1). "
        "Default for blocks: true.",
    )
    score_positions: Literal["original", "adjacent"] = Field(
        default="original",
        description="Position of a document while it is scored: its own, or right before the question.",
    )
    kept_positions: KeptPositions = Field(
        default="compact",
        description="Positions of kept tokens: those in the full prompt, or those of a prompt of the kept "
        "tokens alone. Default for blocks: `original`.",
    )
    block_size: int | None = Field(
        default=None,
        ge=0,
        le=64,
        description="Tokens of a block: a power of two from 4; 0: about 1/32 of the document. Default: the "
        "server's.",
    )
    initial_blocks: Count = Field(default=1, description="First blocks of a document that are always kept.")
    local_blocks: int | None = Field(
        default=None,
        ge=1,
        le=4,  # documents are analysed again for each value
        description="Last blocks of a document that are always kept. Default: the server's.",
    )
    experimental: SamKvExperiment = Field(
        default_factory=SamKvExperiment, description="Tuned constants and ablation switches."
    )

    @model_validator(mode="before")
    @classmethod
    def _defaults_by_selection(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        blocks: dict[str, Any] = {"recompute": "outliers", "personalised": True, "kept_positions": "original"}
        if given.get("selection", "sentences") == "sentences":
            blocks = {}
        asked = given.get("keep") is not None or given.get("top_p") is not None
        few = {"min_tokens": 0} if asked else {}
        return {**blocks, **few, **given}

    @field_validator("block_size")
    @classmethod
    def _power_of_two(cls, size: int | None) -> int | None:
        if size and (size & (size - 1) or size < 4):  # documents are analysed again for each value
            raise ValueError("must be 0 or a power of two from 4 to 64")
        return size

    @model_validator(mode="after")
    def _fit_together(self) -> SamKvOptions:
        scorings = SCORINGS.get(self.selection, (self.scoring,))
        if self.scoring not in scorings:
            raise ValueError(
                f"experimental.scoring is {self.scoring!r}: with selection={self.selection} it must be one "
                f"of {', '.join(scorings)}"
            )
        if self.kept_positions == "compact" and self.selection == "layers":
            raise ValueError("kept_positions=compact needs the same tokens in every layer")
        return self

    @property
    def by_sentence(self) -> bool:
        """Sentences are chosen among all document tokens, instead of blocks between initial and local
        ones."""
        return self.selection == "sentences"

    @property
    def scoring(self) -> str:
        return self.experimental.scoring or SCORINGS.get(self.selection, ("attention",))[0]

    @property
    def needs_query(self) -> bool:
        """The selection reads the question's queries."""
        lexical = self.by_sentence and self.experimental.lexical_weight == 1
        return not lexical and self.selection != "none"


STRATEGY_OPTIONS: dict[str, type[ComposedOptions]] = {
    "cacheblend": CacheBlendOptions,
    "concat": ConcatOptions,
    "epic": EpicOptions,
    "random": RandomOptions,
    "samkv": SamKvOptions,
}
"""The composed strategies, sorted by name."""


def _without_defaults(schema: dict[str, Any]) -> None:
    for field in schema["properties"].values():
        field.pop("default", None)


class DecodeOptions(RequestOptions):
    """The way in which a request's decode steps attend to its KV. An option left out has the server's
    value."""

    model_config = ConfigDict(json_schema_extra=_without_defaults)
    renamed: ClassVar[Mapping[str, str]] = renamed.DECODE

    mode: decode_fields.Mode = "hierarchical"
    budget: decode_fields.Budget = 2048
    reuse: decode_fields.Reuse = 16
    observe: decode_fields.Observe = "window"
    window: decode_fields.Window = 16
    scores: decode_fields.Scores = "auto"
    threshold: decode_fields.Threshold = 0.95
    dense_below: int = Field(
        default=8192,
        ge=0,
        lt=decode_fields.MORE_TOKENS,
        description="Context length in tokens up to which decoding is dense in any mode.",
    )
    streaming: bool = Field(
        default=False, description="Heads of the server's pattern file attend to the first and latest tokens."
    )
    offloaded: bool | Literal["auto"] = Field(
        default=False,
        description="hierarchical, progressive: the prompt's KV is on the host; `auto`: once others wait.",
    )
    resident_blocks: int = Field(
        default=0,
        ge=0,
        le=16,
        description="offloaded: device pages per page of a choice; 0: a working set's.",
    )
    lag: int = Field(
        default=0, ge=0, le=MAX_LAG, description="Steps until a choice of pages is used; offloaded: 0 is 2."
    )

    @property
    def lag_steps(self) -> int:
        """``lag``, or the default one of offloaded requests; 0 where no choice serves later steps.

        A progressive request chooses only what its resident blocks are to hold."""
        if self.mode == "dense" or (self.mode == "progressive" and not self.offloaded):
            return 0
        return self.lag or (OFFLOAD_LAG if self.offloaded else 0)

    @property
    def chooses_by_window(self) -> bool:
        """Return True if the mean of a window of queries chooses pages."""
        return self.mode == "hierarchical" and self.observe == "window"

    def updated(self, changes: Mapping[str, Any]) -> DecodeOptions:
        """These options with some replaced. Raises PlanError for unknown names and bad values."""
        return checked(DecodeOptions, {**self.model_dump(), **changes}, "sparse decoding")

    def from_request(self, text: str) -> DecodeOptions:
        """These options, the server's, with those of a request's JSON text. Raises PlanError."""
        changes = given_in(text, "decode", renamed.DECODE)
        options = self.updated(changes)
        for name in ("offloaded", "lag", "observe", "window", "scores"):
            modes = ["hierarchical", *(["progressive"] if name in ("offloaded", "lag") else [])]
            if changes.get(name) and options.mode not in modes:
                known = " or ".join(repr(mode) for mode in modes)
                raise PlanError(f"{name} is for mode {known}, and this request's is {options.mode!r}")
        if changes.get("lag") and options.mode == "progressive" and not options.offloaded:
            raise PlanError("In mode 'progressive', lag requires offloaded=true. Set it, or omit lag.")
        return options


def strategy_options(strategy: str, given: Mapping[str, Any]) -> ComposedOptions:
    """The options of a composed strategy. Raises PlanError for an unknown strategy, unknown names and bad
    values."""
    if strategy not in STRATEGY_OPTIONS:
        raise PlanError(f"no strategy {strategy!r}: one of {', '.join(STRATEGY_OPTIONS)}")
    return checked(STRATEGY_OPTIONS[strategy], given, f"strategy {strategy!r}")


def reads_sensitivity(strategy: str, given: Mapping[str, Any]) -> bool:
    """Whether the rule of a strategy reads the documents' context sensitivity."""
    kind = STRATEGY_OPTIONS.get(strategy)
    return (
        kind is not None and given.get("recompute", kind.model_fields["recompute"].default) in SENSITIVE_RULES
    )


def copies_documents(options: ComposedOptions) -> bool:
    """Return whether options alone say that a context is its documents' KV as it is, the same tokens in all
    layers; an offloaded request reads such a context on the host."""
    if isinstance(options, SamKvOptions) or options.recompute != "none" or options.update != "overwrite":
        return False
    concat = options if isinstance(options, ConcatOptions) else ConcatOptions()
    by_layer = isinstance((concat.experimental.kept or [0])[0], list)
    return concat.kept_positions == "original" and not by_layer


def merged(defaults: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """``defaults`` with ``options`` on top; fields of groups, as `experimental`, one by one."""
    both = {**defaults, **options}
    for name in defaults.keys() & options.keys():
        groups = [each[name] for each in (defaults, options)]
        if all(isinstance(group, Mapping) for group in groups):
            both[name] = {**groups[0], **groups[1]}
    return both
