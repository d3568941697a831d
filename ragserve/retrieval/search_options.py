"""The options of a search, with the server's defaults filled in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ragserve.setting_groups.answering import FollowUps, NotFound, Retrieval, Spelling
from ragserve_index.viewers import EVERYTHING, Viewer

if TYPE_CHECKING:
    from ragserve_index.filters import Filter

OFF, KEYS = "off", "keys"
"""Values of ``rerank`` beside names of CrossEncoders."""


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """How to search; `ragserve.config.Settings` describes the fields. ``k``: passages, their neighbours not
    counted. ``viewer``: who searches, and finds its documents only; whatever comes from a request says so."""

    k: int
    filter: Filter | None = None
    retrieval: Retrieval = "dense"
    follow_ups: FollowUps = "context"
    spelling: Spelling = "off"
    rerank: str = OFF
    candidates: int = 50
    neighbours: int = 0
    context_tokens: int = 0
    min_score: float | None = None
    dedupe: float = 0.0
    not_found: NotFound = "off"
    viewer: Viewer = EVERYTHING

    @property
    def depth(self) -> int:
        """Passages to search for."""
        compares = self.rerank != OFF or self.dedupe > 0
        return max(self.k, self.candidates) if compares else self.k
