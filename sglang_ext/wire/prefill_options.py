"""Options of sparse prefill and the cache keys of its KV: plain data, without torch or SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from sglang_ext.wire.decode_fields import MORE_TOKENS
from sglang_ext.wire.option_checks import PlanError, RequestOptions, checked, given_in
from sglang_ext.wire.renamed import with_new_mode

MAX_OBSERVE = 256  # sampled queries of 1,024
SHARE_DENSE_BELOW = (
    49_152  # of a `share`, not calibrated: below it attention is the smaller part of a prefill
)
NEVER = 2**31 - 1  # tokens that no prompt exceeds
DENSE_LAST = 256  # a question and the template behind it
_MARK = "|prefill="  # in no namespace's name, session's id or document's key

# Options that are settings of the server, too
PrefillMode = Annotated[
    Literal["dense", "vertical_slash", "block_sparse"],
    BeforeValidator(with_new_mode),
    Field(
        description="`dense`: exact attention; `vertical_slash`: to the vertical and slash lines that "
        "sampled queries point to (LoopServe); `block_sparse`: to the first, local and best-scoring blocks "
        "(LServe). The sparse modes need sparse_attention=on. They are approximate, for exact strategies, "
        "and their KV has a prefix cache of its own."
    ),
]
Alpha = Annotated[
    float,
    Field(
        gt=0,
        le=1,
        description="Sparse modes: share of the attention weight to hold, as the mode estimates it.",
    ),
]
Observe = Annotated[
    int, Field(ge=1, le=MAX_OBSERVE, description="vertical_slash: queries sampled of every 1,024.")
]
DenseLast = Annotated[
    int,
    Field(
        ge=0,
        lt=MORE_TOKENS,
        description="Sparse modes: last tokens of the prompt, such as the question, that attend to "
        "everything, with those before them in their block of 128.",
    ),
]
DenseBelow = Annotated[
    int | None,
    Field(
        ge=0,
        lt=MORE_TOKENS,
        description="Prompt length, in tokens, up to which prefill is dense in any mode. Default: the result "
        f"of calibrate --part prefill; without one, it is dense up to {SHARE_DENSE_BELOW:,} with a `share`, "
        "and always with `alpha`: how many blocks that takes, and so whether it is faster, depends on the "
        "model.",
    ),
]


def _without_defaults(schema: dict[str, Any]) -> None:
    for field in schema["properties"].values():
        field.pop("default", None)


class PrefillOptions(RequestOptions):
    """The way in which a request's prompt attends to itself. An option left out has the server's value."""

    model_config = ConfigDict(json_schema_extra=_without_defaults)

    mode: PrefillMode = "dense"
    alpha: Alpha = 0.955
    observe: Observe = 64
    share: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of the blocks to compute, instead of as many as hold `alpha`: the cost is known, "
        "the weight that is held is not. `vertical_slash` takes lines of this length together, and computes "
        "less where they cross.",
    )
    dense_last: DenseLast = DENSE_LAST
    streaming: bool = Field(
        default=False,
        description="block_sparse: heads of the server's pattern file attend to first and local blocks only.",
    )
    dense_below: DenseBelow = None

    @property
    def dense_up_to(self) -> int:
        """Tokens of the longest prompt that is prefilled densely."""
        if self.dense_below is not None:
            return self.dense_below
        return NEVER if self.share is None else SHARE_DENSE_BELOW

    def updated(self, changes: Mapping[str, Any]) -> PrefillOptions:
        """These options with some replaced. Raises PlanError for unknown names and bad values."""
        return checked(PrefillOptions, {**self.model_dump(), **changes}, "sparse prefill")

    def from_request(self, text: str) -> PrefillOptions:
        """These options, the server's, with those of a request's JSON text. Raises PlanError."""
        changes = given_in(text, "prefill")
        options = self.updated(changes)
        if "observe" in changes and options.mode != "vertical_slash":
            raise PlanError(f"observe is for mode 'vertical_slash', and this request's is {options.mode!r}")
        if changes.get("streaming") and options.mode != "block_sparse":
            raise PlanError(f"streaming is for mode 'block_sparse', and this request's is {options.mode!r}")
        if changes.get("share") is not None and "alpha" in changes:
            raise PlanError("alpha and share both say how many blocks are computed: give one of them")
        return options

    def sparse_key(self, extra_key: str | None) -> str:
        """The extra key of KV made with these options by requests whose exact KV has ``extra_key``: KV of
        sparse prefill is approximate, and no other request may find it."""
        observe = f",{self.observe}" if self.mode == "vertical_slash" else ""
        amount = repr(self.alpha) if self.share is None else f"share={self.share!r}"
        streaming = ",streaming" if self.mode == "block_sparse" and self.streaming else ""
        return f"{extra_key or ''}{_MARK}{self.mode},{amount}{observe},last={self.dense_last}{streaming}"


def exact_key(extra_key: str) -> str:
    """The extra key without what `PrefillOptions.sparse_key` adds."""
    return extra_key.partition(_MARK)[0]
