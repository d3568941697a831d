"""The device tier: documents in SGLang's radix tree, their namespaces, and removal from every tier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from sglang_ext.documents.radix import is_document_key
from sglang_ext.documents.session_pages import SessionPages, is_composed_session
from sglang_ext.wire.prefill_options import exact_key
from sglang_ext.wire.protocol import FULL_KEY, composed_session_key, holds_of, prefix_key

if TYPE_CHECKING:
    from sglang_ext.documents.radix import DocumentRadixCache
    from sglang_ext.documents.tier_store import TierStore

_SWEEP_AT = 10_000  # namespaces remembered, at least, before those of evicted documents are forgotten


class DeviceDocuments:
    """Documents on the device. Removing a document removes it from the other tiers as well.

    One per scheduler process. Scheduler thread only."""

    def __init__(self, model_runner: Any, tree: DocumentRadixCache, tiers: TierStore) -> None:
        self._runner = model_runner
        self._tree = tree
        self._tiers = tiers
        self._namespaces: dict[str, str] = {}  # by key, of documents on the device or in prefill
        self._sweep_at = _SWEEP_AT
        # removed while a running request reads them: hidden from other requests, freed when it ends
        self._pending_removal: set[str] = set()
        self._caching: WeakSet[Any] = WeakSet()  # running requests whose KV will be cached
        self._evictions_counted = 0
        self.sessions: SessionPages | None = None  # None where no session's KV goes to the host
        # called with the removed keys; None: any document may have been removed
        self.on_removed: Callable[[Sequence[str] | None], None] = lambda keys: None

    def document_request(self, req: Any, namespace: str) -> None:
        """Register a request that prefills a document; its extra key is the document's key."""
        self._namespaces[req.extra_key] = namespace
        self._caching.add(req)

    def caching_request(self, req: Any) -> None:
        """Register a composed request whose KV is kept under its extra key."""
        self._caching.add(req)

    def exact_request(self, req: Any) -> None:
        """Register an ordinary request. The prefix of its extra key, set by `ragserve.engine.stream.payload`,
        gives the strategy.
        """
        key = str(req.extra_key or "")
        if _may_hold_documents(key):
            self._caching.add(req)
        elif key.startswith(FULL_KEY):  # no other request has this key
            req.ragserve_private = True

    def is_removed(self, key: str) -> bool:
        """True while a removed document waits for its last reader."""
        return key in self._pending_removal

    def cached(self, key: str) -> None:
        """Note that a document has been prefilled, and not been removed meanwhile."""
        self._pending_removal.discard(key)
        if len(self._namespaces) > self._sweep_at:
            self.sweep()

    def remove(self, keys: Sequence[str], namespace: str) -> int:
        """Remove documents from every tier, and the exact prefixes and sessions of the namespace, alone or
        among others, which may contain them. Returns the number of documents that were in a tier.

        KV that a running request reads is freed when the request ends.
        """
        on_device = self._tree.tokens_by_key()
        removed = 0
        for key in keys:
            removed += bool(self._tiers.remove(key, namespace)) or key in on_device
        self.on_removed(keys)
        self._drop({prefix_key(namespace), *keys, *self._holding(namespace)})
        return removed

    def _holding(self, namespace: str) -> set[str]:
        """Keys of exact prefixes and sessions of a namespace, alone or among others."""
        below = set() if self.sessions is None else self.sessions.keys()
        return {key for key in map(exact_key, self._known() | below) if holds_of(key, namespace)}

    def remove_session(self, key: str) -> None:
        """Drop the KV of a session, exact and composed."""
        self._drop({key, composed_session_key(key)})

    def _drop(self, gone: set[str]) -> None:
        """Free what is under these keys, and cache nothing more under them from running requests."""
        gone |= {key for key in self._known() if exact_key(key) in gone}  # of sparse prefill
        for req in self._caching:
            if req.extra_key in gone:
                req.ragserve_private = True
        if self.sessions is not None:
            self.sessions.forget(gone)
        self._pending_removal |= self._tree.remove_keys(gone)

    def remove_namespace(self, namespace: str) -> int:
        """Remove all documents of a namespace from every tier and return their number."""
        on_device = [key for key, owner in self._namespaces.items() if owner == namespace]
        if self.sessions is not None:
            self.sessions.forget_namespace(namespace)
        below = self._tiers.remove_namespace(namespace, on_device)
        cached = self._tree.tokens_by_key()
        self.on_removed(None)
        self._drop({prefix_key(namespace), *on_device, *self._holding(namespace)})
        return max(below, sum(key in cached for key in on_device))

    def clear(self) -> None:
        """Remove all documents from every tier, and exact prefixes and sessions, which may contain them. What
        running requests read stays."""
        keys = [key for key in self._tree.tokens_by_key() if is_document_key(key) or _may_hold_documents(key)]
        # for any key, a tree that does not tell its keys drops all
        self._tree.remove_keys({*keys, prefix_key("")})
        if self.sessions is not None:
            self.sessions.forget(self.sessions.keys())
        self._tiers.clear()
        self.on_removed(None)

    def evict(self, tiers: Sequence[str], keys: Sequence[str] | None = None) -> None:
        """Drop documents (of ``keys`` only, if given) that no request reads from the device or from host
        memory; the tiers below keep them. What waits to be written is lost with the host tier: flush it
        first. Tier "sessions": evict sessions' composed KV from the device.
        """
        if "sessions" in tiers and (gone := set(filter(is_composed_session, self._tree.tokens_by_key()))):
            self._tree.evict_keys(gone)
        if "device" in tiers and (there := self.document_tokens().keys()):
            self._tree.remove_keys(set(there) if keys is None else there & set(keys))
        if "host" in tiers:
            self._tiers.drop_host(keys)

    def sweep(self) -> None:
        """Free removed documents whose last reader has ended, and forget the namespaces of evicted ones."""
        self._free_removed()
        known = self._known()
        self._namespaces = {key: owner for key, owner in self._namespaces.items() if key in known}
        self._sweep_at = max(_SWEEP_AT, 2 * len(self._namespaces))  # a sweep walks through the whole tree

    def _known(self) -> set[str]:
        """Extra keys of what is cached, and of running requests whose KV will be."""
        keys = {*self._tree.tokens_by_key(), *(req.extra_key for req in self._caching)}
        return {key for key in keys if key is not None}

    def request_ended(self) -> None:
        """Free removed documents whose last reader has ended, and update the metrics."""
        self._free_removed()
        metrics = self._tiers.metrics
        metrics.bytes.labels("device").set(self._tree.document_tokens * self.slot_bytes)
        evicted = self._tree.documents_evicted - self._evictions_counted
        metrics.evictions.labels("device").inc(evicted * metrics.own)
        self._evictions_counted = self._tree.documents_evicted

    def _free_removed(self) -> None:
        if self._pending_removal:
            self._pending_removal = self._tree.free_removed(self._pending_removal)

    def check(self) -> None:
        """Raise IntegrityError when the tree's count of document tokens is not their sum."""
        from sglang_ext.documents.pages.types import IntegrityError

        tokens = sum(self.document_tokens().values())
        if tokens != self._tree.document_tokens:
            raise IntegrityError(
                f"{tokens} document tokens on the device, {self._tree.document_tokens} counted"
            )

    def document_tokens(self) -> dict[str, int]:
        """Tokens on the device by document key."""
        return {key: n for key, n in self._tree.tokens_by_key().items() if is_document_key(key)}

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of one slot over all layers."""
        return self.pool_bytes // max(1, self._tree.token_to_kv_pool_allocator.size)

    @property
    def pool_bytes(self) -> int:
        """Bytes of the KV pool. Some pools count K and V apart."""
        sizes = self._runner.token_to_kv_pool.get_kv_size_bytes()
        return int(sum(sizes) if isinstance(sizes, tuple) else sizes)


def _may_hold_documents(extra_key: str) -> bool:
    """True for the key of a namespace's exact prefixes, or of a session."""
    return extra_key.startswith(("namespace:", "session:"))
