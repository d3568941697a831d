"""Choice of passages before the engine: the best ones alone, whole, within a token budget.

Strategy `passages` prefills them exactly, as `prefix` does. Option `passages` of a composed strategy composes
them: the others are neither loaded nor moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from sglang_ext.wire.option_checks import PlanError, RequestOptions, checked
from sglang_ext.wire.protocol import EXACT_STRATEGIES
from sglang_ext.wire.request_options import STRATEGY_OPTIONS, Share

PASSAGES = "passages"
NOT_COMPOSED = (*EXACT_STRATEGIES, PASSAGES)
"""The strategies whose KV is computed for the prompt as it is."""
KEEP = 0.25
KEEP_ADAPTIVE = 0.4
ENOUGH = 2.5
"""Score, in standard deviations above a question's mean, of passages that an adaptive choice keeps."""


class PassagesOptions(RequestOptions):
    """`passages`: exact prefill of the best passages, whole, in the prompt's order.

    The best passage is always kept, and one that does not fit is skipped for the next."""

    keep: Share | None = Field(
        default=None,
        description="Most tokens to keep, as a share of the document tokens found or given. Default: "
        f"{KEEP}; {KEEP_ADAPTIVE} with `adaptive`; 1 with `tokens`.",
    )
    tokens: int | None = Field(
        default=None,
        ge=1,
        description="Most document tokens to keep, whatever their share. Default: no limit.",
    )
    by: Literal["links", "score"] = Field(
        default="links",
        description="Order in which passages are taken. `links`: by the search's scores, the question's "
        "words, and what the passages taken before name, which finds the second step of a question; `score`: "
        "that of the search, or of the documents as they are given.",
    )
    adaptive: bool = Field(
        default=False,
        description="Take as many as stand out for the question, at least `keep_least` and at most `keep` "
        "and `tokens`. Needs by=links.",
    )
    keep_least: Share = Field(
        default=0.1, description="With `adaptive`: least share of the document tokens to keep."
    )

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.adaptive and self.by != "links":
            raise ValueError(f"adaptive needs by=links, and by is {self.by}")
        if "keep_least" in self.model_fields_set and not self.adaptive:
            raise ValueError("keep_least needs adaptive=true")
        return self

    @classmethod
    def of(cls, options: Mapping[str, Any], owner: str = f"strategy {PASSAGES!r}") -> PassagesOptions:
        """Check the options of a request. Raises PlanError."""
        return checked(cls, options, owner)

    def chosen(
        self,
        question: str,
        passages: Sequence[tuple[str, str]],
        sizes: Sequence[int],
        scores: Sequence[float | None] | None = None,
    ) -> list[int]:
        """The numbers of the passages to keep, ascending. ``passages``: title and text of each, in the order
        of a search, the best first; ``sizes``: their tokens; ``scores``: the search's, as `linked` takes
        them."""
        room = self.share * sum(sizes)
        if self.tokens is not None:
            room = min(room, self.tokens)
        if self.by == "score":
            return filled(range(len(sizes)), sizes, room)
        from ragserve.linked_passages import linked

        ranking = linked(question, passages, scores)
        order = ranking.order
        if self.adaptive:
            order = standing_out(order, ranking.scores, sizes, self.keep_least * sum(sizes), ENOUGH)
        return filled(order, sizes, room)

    @property
    def share(self) -> float:
        """Most tokens to keep, as a share of all document tokens."""
        if self.keep is not None:
            return self.keep
        if self.tokens is not None:
            return 1.0
        return KEEP_ADAPTIVE if self.adaptive else KEEP


def filled(order: Sequence[int], sizes: Sequence[int], room: float) -> list[int]:
    """The numbers of the passages that fill ``room`` tokens, ascending. ``order``: those to take, the best
    first, which is taken in any case; one that does not fit is skipped for the next."""
    kept: list[int] = []
    for number in order:
        if not kept or sizes[number] <= room:
            kept.append(number)
            room -= sizes[number]
    return sorted(kept)


def standing_out(
    order: Sequence[int], scores: Sequence[float], sizes: Sequence[int], least: float, enough: float
) -> list[int]:
    """The beginning of an ``order``: up to the first passage that has less than ``enough`` of the ``scores``
    with which they were taken, once those before it have ``least`` tokens."""
    taken = 0
    for place, (number, score) in enumerate(zip(order, scores, strict=True)):
        if taken >= least and score < enough:
            return list(order[:place])
        taken += sizes[number]
    return list(order)


def choice_of(strategy: str, options: Mapping[str, Any]) -> tuple[PassagesOptions | None, dict[str, Any]]:
    """How passages are chosen for a strategy, None for all, and its options for the engine. Raises
    PlanError."""
    rest = dict(options)
    if strategy == PASSAGES:
        return PassagesOptions.of(rest), {}
    is_chosen = strategy in STRATEGY_OPTIONS and PASSAGES in rest
    if rest.get("recompute") == "all" and (is_chosen or (strategy == "samkv" and rest.get("keep") != 1)):
        raise PlanError(
            f"strategy {strategy!r} with recompute=all uses no stored KV of what it keeps; strategy "
            f"{PASSAGES!r} with the same keep prefills as much exactly, and sooner"
        )
    if not is_chosen:
        return None, rest
    owner = f"{PASSAGES} of strategy {strategy!r}"
    given = rest.pop(PASSAGES)
    if not isinstance(given, Mapping):
        raise PlanError(f"option {owner} is {given!r}: must be options, as {PASSAGES}.keep=0.25")
    return PassagesOptions.of(given, owner), rest
