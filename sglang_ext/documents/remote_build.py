"""Builds the remote tier from its configuration."""

from __future__ import annotations

from sglang_ext.documents.pages.page_format import PageLayout
from sglang_ext.documents.pages.types import RemoteConfig
from sglang_ext.documents.remote.deletions import Deletions
from sglang_ext.documents.remote.document_values import DEFAULT_PREFILL_MS, DocumentValues
from sglang_ext.documents.remote.folder_backend import FolderBackend
from sglang_ext.documents.remote.mooncake_backend import MooncakeBackend
from sglang_ext.documents.remote.remote_backend import RemoteBackend
from sglang_ext.documents.remote.remote_options import folder_options
from sglang_ext.documents.remote.tier import RemoteTier
from sglang_ext.documents.tiers import Tiers


def remote_tier(config: RemoteConfig, tiers: Tiers) -> RemoteTier:
    """The remote tier of these tiers. Raises ValueError for options that the store does not have."""
    layout = tiers.layout
    prefill_ms = config.prefill_ms or DEFAULT_PREFILL_MS
    return RemoteTier(
        _backend(config, layout),
        layout,
        lock=tiers.lock,
        host=tiers.host,
        disk=tiers.disk,
        faults=tiers.faults,
        metrics=tiers.metrics,
        # a rank stores its heads of a document: all ranks together store these bytes
        values=DocumentValues(config.min_value, layout.page_bytes * layout.world, layout.block, prefill_ms),
        deletions=Deletions(config.journal),
        queue_bytes=config.queue_bytes,
        retry_s=config.retry_s,
    )


def _backend(config: RemoteConfig, layout: PageLayout) -> RemoteBackend:
    if config.store == "mooncake":
        return MooncakeBackend(layout, config.options)
    if config.store == "shared":
        folder, budget_bytes = folder_options(config.options)
        return FolderBackend(folder, layout, budget_bytes)
    raise ValueError(f"there is no shared store {config.store!r}: mooncake or shared")
