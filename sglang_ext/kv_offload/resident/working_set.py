"""What bounds the number of offloaded requests: slots for their resident blocks, host pages, and the link."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from sglang_ext.kv_offload.resident.link_meter import LinkMeter
from sglang_ext.kv_offload.resident.offloaded_row import OffloadedRow
from sglang_ext.ranks.ranks import Ranks
from sglang_ext.ranks.shared_ballots import LARGEST

BOUNDS = ("device", "host", "link")
FULL_LINK = 0.9  # share of the link that loads may take: the rest is for copies to the host and documents
FIRST_COLUMNS = 2.0  # resident blocks per page of a selection before any working set has been measured
MOST_COLUMNS = 16  # likewise, however large it is
_THOUSAND = 1000


class OffloadBounds:
    """Decides how many requests are offloaded, and how many resident blocks each has. The same on all ranks:
    what they measure is exchanged, the rest are lengths, options and counts. Scheduler thread only.

    Attributes:
        ranks: those that exchange; set before the first request.
        share: of the link that loads take, the largest of any rank; as of the latest exchange.
        waiting: requests of the latest step that one of the bounds keeps from being offloaded.
    """

    def __init__(self) -> None:
        self.ranks = Ranks()
        self.link = LinkMeter()
        self.share = 0.0
        self.waiting: Counter[str] = Counter()
        self._resident_blocks = FIRST_COLUMNS  # per page of a selection, mean of what working sets have taken

    def first_resident_blocks(self, selection: int) -> int:
        """Return the resident blocks that a request begins with, whose selections have ``selection``
        pages.
        """
        return round(self._resident_blocks * selection)

    def link_allows(self, rows: Iterable[OffloadedRow]) -> bool:
        """Return whether loads of one request more fit the link, if it loads as much as each of ``rows``,
        those that are offloaded or soon will be."""
        rows = list(rows)
        loading = sum(row.moved for row in rows)
        return not loading or self.share * (len(rows) + 1) / loading <= FULL_LINK

    def exchange(self, rows: Sequence[OffloadedRow | None]) -> list[int]:
        """Let ranks agree on what they have measured. Return the working set of each row, in pages; 0: not
        known.

        ``rows``: of the running batch, in its order; None for requests that are not offloaded."""
        for row in rows:
            if row is not None:
                row.collect()
        self.link.settle()
        measured = [0 if row is None else row.loads.largest_set for row in rows]
        votes = [min(LARGEST, round(_THOUSAND * self.link.share)), *measured]
        share, *sets = (LARGEST - low for low in self.ranks.min_votes([LARGEST - vote for vote in votes]))
        self.share = share / _THOUSAND
        for row, pages in zip(rows, sets, strict=True):
            if row is not None and pages and row.settled:
                self._resident_blocks += (
                    resident_blocks_for(pages, row.selection) / row.selection - self._resident_blocks
                ) / 8
        return sets

    def describe(self) -> dict[str, Any]:
        """Return the figures for the control channel, this rank's but for ``link_share``."""
        link = self.link
        return {
            "link_share": self.share,
            "link_bytes": int(link.given or link.rate),
            "step_bytes": int(link.step_bytes),
            "step_ms": round(link.step_seconds * 1e3, 3),
            "first_resident_blocks": round(self._resident_blocks, 3),
            "waiting": {bound: self.waiting[bound] for bound in BOUNDS},
        }


def resident_blocks_for(working_set: int, selection: int) -> int:
    """Return the resident blocks for a working set in pages: at least those of one selection."""
    return max(selection, min(working_set, MOST_COLUMNS * selection))


def resized(
    resident_blocks: int, working_set: int, selection: int, *, others_wait: bool, settled: bool
) -> int:
    """Return the resident blocks that a request is to have instead of ``resident_blocks``.

    While others wait for room none are added. None are given back before as many selections have been made as
    make up a working set, and never few of them: the next selections may well want those."""
    wanted = resident_blocks_for(working_set, selection)
    if wanted > resident_blocks:
        return resident_blocks if others_wait else wanted
    return wanted if settled and resident_blocks - wanted >= max(1, selection // 8) else resident_blocks
