"""Strategy `passages`: exact prefill of the best passages alone, whole, within a token budget.

It is a choice of what is read, before the engine: the engine answers it as `prefix`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from sglang_ext.wire.option_checks import RequestOptions, checked
from sglang_ext.wire.protocol import EXACT_STRATEGIES
from sglang_ext.wire.request_options import Share

PASSAGES = "passages"
NOT_COMPOSED = (*EXACT_STRATEGIES, PASSAGES)
"""The strategies whose KV is computed for the prompt as it is."""
KEEP = 0.25


class PassagesOptions(RequestOptions):
    """`passages`: exact prefill of the best passages, whole, in the prompt's order.

    The first passage is always kept, and one that does not fit is skipped for the next."""

    keep: Share | None = Field(
        default=None,
        description="Most tokens to keep, as a share of the document tokens found or given. Default: "
        f"{KEEP}; with `tokens` 1.",
    )
    tokens: int | None = Field(
        default=None,
        ge=1,
        description="Most document tokens to keep, whatever their share. Default: no limit.",
    )

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> PassagesOptions:
        """Check the options of a request. Raises PlanError."""
        return checked(cls, options, f"strategy {PASSAGES!r}")

    def chosen(self, sizes: Sequence[int], ranking: Sequence[int] | None = None) -> list[int]:
        """The numbers of the passages to keep, ascending, of passages of ``sizes`` tokens. ``ranking``: their
        numbers, the best first; None: they are in this order."""
        share = (KEEP if self.tokens is None else 1.0) if self.keep is None else self.keep
        room = share * sum(sizes)
        if self.tokens is not None:
            room = min(room, self.tokens)
        kept: list[int] = []
        for number in range(len(sizes)) if ranking is None else ranking:
            if not kept or sizes[number] <= room:
                kept.append(number)
                room -= sizes[number]
        return sorted(kept)
