"""Who may see which document: the labels of documents, and those that a reader holds.

A document with labels is seen by readers that hold at least one of them, as groups are meant in access
control lists; one without labels by all readers of its namespace."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ragserve.errors import InvalidRequest

MAX_LABELS = 32  # of a document
LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:@/-]{0,63}")
EVERY_LABEL = "*"
"""Held by a reader in place of all labels."""


@dataclass(frozen=True, slots=True)
class Viewer:
    """A reader. ``labels``: those that it holds; None sees every document."""

    labels: frozenset[str] | None

    @classmethod
    def holding(cls, labels: Iterable[str]) -> Viewer:
        """A reader with these labels, of which `EVERY_LABEL` stands for all."""
        held = frozenset(labels)
        return EVERYTHING if EVERY_LABEL in held else cls(held)

    def sees(self, labels: Collection[str]) -> bool:
        """True if the reader sees a document with these labels."""
        return self.labels is None or not labels or not self.labels.isdisjoint(labels)

    def holds(self, labels: Collection[str]) -> bool:
        """True if the reader has all of these labels, and so may give them to documents."""
        return self.labels is None or self.labels.issuperset(labels)

    def shown(self, labels: Collection[str]) -> list[str]:
        """Those of a document's labels that the reader may know of: its own."""
        return sorted(each for each in labels if self.labels is None or each in self.labels)


EVERYTHING, UNLABELLED = Viewer(None), Viewer(frozenset())
"""The operator and what the server does by itself; and who holds no label."""


def checked_labels(labels: Iterable[str], most: int = MAX_LABELS) -> tuple[str, ...]:
    """Labels as a document has them: ascending, each once. Raises InvalidRequest."""
    found = tuple(sorted(set(labels)))
    wrong = next((each for each in found if not LABEL.fullmatch(each)), None)
    if wrong is not None:
        raise InvalidRequest(
            f"{wrong!r:.80} is no label.",
            hint="At most 64 letters, digits and _ . : @ / -, of which a letter or digit comes first.",
            code="invalid_labels",
            param="labels",
        )
    if len(found) > most:
        raise InvalidRequest(
            f"{len(found)} labels; at most {most} are kept.", code="invalid_labels", param="labels"
        )
    return found
