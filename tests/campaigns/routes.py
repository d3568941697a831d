"""100,000 cheap operations on the routes that run no model: searches, listings, tokenising, ingestion and
removal, and hostile values in each field of each route that a key without admin may call. Violations are
those of campaign `mixed`."""

from __future__ import annotations

from typing import Any

from tests.campaigns import mixed
from tests.campaigns.mixed import Caller
from tests.campaigns.progress import Progress
from tests.campaigns.site import Site

TARGET = 100_000
MIX = (
    (Caller.retrieve, 30),
    (Caller.look, 40),
    (Caller.tokens, 15),
    (Caller.ingest, 1),
    (Caller.replace, 1),
    (Caller.hostile, 12),
    (Caller.clear, 1),
)


def run(progress: Progress, site: Site | None = None, **options: Any) -> None:
    """``options`` are those of `mixed.run`."""
    mixed.run(progress, site, **{"mix": MIX, "schemas": 0, **options})
