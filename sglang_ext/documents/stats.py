"""Figures about the tiers, for `TierStore`. All functions require the store's lock."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from sglang_ext.documents.pages.page_format import pages_of_file
from sglang_ext.documents.pages.types import DiskConfig
from sglang_ext.documents.tiers import Tiers
from sglang_ext.documents.writeback import WriteBack


def stat(tiers: Tiers, writes: WriteBack, config: DiskConfig | None) -> dict[str, Any]:
    """See ``TierStore.stat``."""
    host, index, page_bytes = tiers.host, tiers.index, tiers.shape.page_bytes
    everyone = host.all_entries()
    metadata = sum(entry.metadata_bytes for entry in everyone)
    figures: dict[str, Any] = {
        "host": {
            "bytes": host.used * page_bytes,
            "budget_bytes": host.limit * page_bytes,
            "capacity_bytes": host.capacity * page_bytes,
            "pages": host.used,
            "documents": sum(1 for entry in host.entries.values() if entry.resident()),
            "pinned_documents": sum(1 for entry in everyone if entry.pins),
            "metadata_bytes": metadata,
            "metadata_share": _share(metadata, host.used * page_bytes),
            "namespaces": _by_namespace(
                (entry.namespace, n := len(entry.resident()), n * page_bytes)
                for entry in host.entries.values()
            ),
        },
        "disk": None,
        "hits": {tier: tiers.counts[f"hits_{tier}"] for tier in ("device", "host", "disk")},
        "misses": tiers.counts["misses"],
        "evictions": {"host": host.evictions, "disk": index.evictions},
        "moved_bytes": {
            direction: tiers.moved[direction] for direction in ("to_host", "to_disk", "from_disk")
        },
        "faults": dict(tiers.faults.counts),
        "dropped_writes": tiers.counts["dropped_writes"],
    }
    if tiers.remote is not None:
        figures["hits"]["remote"] = tiers.counts["hits_remote"]
        figures["moved_bytes"]["from_remote"] = tiers.moved["from_remote"]
        figures["remote"] = tiers.remote.stat()
    if config is not None:
        block = tiers.shape.block
        spaces = _by_namespace(
            (
                entry.namespace,
                pages_of_file(entry.size, entry.namespace, key, block=block, page_bytes=page_bytes),
                entry.size,
            )
            for key, entry in index.entries.items()
        )
        pages = sum(space["pages"] for space in spaces.values())
        figures["disk"] = {
            "backend": config.backend,
            "path": None if config.path is None else str(config.path),
            "bytes": index.used,
            "budget_bytes": index.budget,
            "documents": len(index.entries),
            "pages": pages,
            "metadata_bytes": index.used - pages * page_bytes,
            "metadata_share": _share(index.used - pages * page_bytes, pages * page_bytes),
            "namespaces": spaces,
            "scanned": index.scanned,
            "queued_bytes": writes.queued_bytes,
            "waiting_documents": writes.waiting,
        }
    return figures


def held(tiers: Tiers) -> dict[str, Any]:
    """Tokens of the documents on host and on disk by key, least recently used first; the tokens that both
    have room for (None: no limit); whether the scan of the disk has ended."""
    pages, block, budget = tiers.shape.page_bytes, tiers.shape.block, tiers.index.budget
    host = tiers.host.entries.items()
    return {
        "host": {key: len(entry.token_ids) for key, entry in host if not entry.missing()},
        "disk": {key: entry.size // pages * block for key, entry in tiers.index.entries.items()},
        "host_room": tiers.host.limit * block,
        "disk_room": None if budget is None else budget // pages * block,
        "scanned": tiers.index.scanned,
    }


def room(tiers: Tiers, writes: WriteBack, config: DiskConfig | None) -> dict[str, Any]:
    """Figures by which a warm-up paces itself: the lowest tier, its budget, the write queue in page bytes,
    and faults so far."""
    disk = config is not None
    return {
        "lasting": "disk" if disk else "host",
        "budget_bytes": tiers.index.budget if disk else tiers.host.limit * tiers.shape.page_bytes,
        "write_room_bytes": writes.room(),
        "queued_bytes": writes.queued_bytes,
        "block": tiers.shape.block,
        "page_bytes": tiers.shape.page_bytes,
        "faults": dict(tiers.faults.counts),
    }


def _share(metadata: int, pages: int) -> float:
    """Metadata bytes per byte of KV; 0 for a tier without KV."""
    return round(metadata / pages, 5) if pages else 0.0


def _by_namespace(documents: Iterable[tuple[str, int, int]]) -> dict[str, dict[str, int]]:
    """Sum documents (namespace, pages, bytes) by namespace."""
    spaces: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for namespace, pages, bytes_ in documents:
        spaces[namespace].update({"documents": min(pages, 1), "pages": pages, "bytes": bytes_})
    return {name: dict(figures) for name, figures in sorted(spaces.items())}
