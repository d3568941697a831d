"""Documents on the device: whose they are, which running requests will cache more, and how they are removed
from every tier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any
from weakref import WeakSet

from sglang_ext.documents.radix import is_document_key
from sglang_ext.protocol import prefix_key

_SWEEP_AT = (
    10_000  # documents remembered as on the device before those that the tree has evicted are forgotten
)


class DeviceDocuments:
    """One object per scheduler process, on its thread. Removing means all tiers: a document's other tiers are
    told, too.
    """

    def __init__(self, model_runner: Any, tree: Any, tiers: Any) -> None:
        self._runner = model_runner
        self._tree = tree
        self._tiers = tiers
        self._namespaces: dict[str, str] = {}  # of documents on the device or on their way there
        self._doomed: set[str] = (
            set()
        )  # removed while a running request held them: gone for everyone else, freed when it ends
        self._caching: WeakSet[Any] = WeakSet()  # running requests whose KV will be cached for others
        self._evictions_told = 0
        self.on_removed: Callable[[Sequence[str] | None], None] = lambda keys: (
            None
        )  # documents by key; None: perhaps any

    def document_request(self, req: Any, namespace: str) -> None:
        """A document is going to be prefilled; its key is the request's."""
        self._namespaces[req.extra_key] = namespace
        self._caching.add(req)

    def exact_request(self, req: Any) -> None:
        """An ordinary request arrived; its key says by which strategy (see `ragserve.engine.stream.payload`)."""
        kind, separator, _ = str(req.extra_key or "").partition(":")
        if separator and kind == "namespace":
            self._caching.add(req)
        elif separator and kind == "full":  # nobody will ask for this key again
            req.ragserve_private = True

    def is_removed(self, key: str) -> bool:
        """Whether the document was removed and only waits for its last reader."""
        return key in self._doomed

    def cached(self, key: str) -> None:
        """A document has been prefilled and nobody removed it meanwhile."""
        self._doomed.discard(key)
        if len(self._namespaces) > _SWEEP_AT:
            self.sweep()

    def remove(self, keys: Sequence[str], namespace: str) -> int:
        """Evict documents from every tier, and the namespace's exact prefixes, which may hold them; how many
        documents were in a tier.

        What a running request still reads is freed when that ends.
        """
        prefixes = prefix_key(namespace)
        on_device = self._tree.tokens_by_key()
        removed = 0
        for key in keys:
            removed += bool(self._tiers.remove(key)) or key in on_device
        self.on_removed(keys)
        gone = {prefixes, *keys}
        for req in self._caching:
            if req.extra_key in gone:
                req.ragserve_private = True
        self._doomed |= {key for key in gone if not self._tree.remove_key(key)}
        return removed

    def remove_namespace(self, namespace: str) -> int:
        """Evict all documents of a namespace."""
        on_device = [key for key, owner in self._namespaces.items() if owner == namespace]
        below = self._tiers.remove_namespace(namespace)
        self.on_removed(None)
        return max(below, self.remove(on_device, namespace))

    def clear(self) -> None:
        """Evict all documents from every tier."""
        self.evict(("device",))
        self._tiers.clear()
        self.on_removed(None)

    def evict(self, tiers: Sequence[str]) -> None:
        """Drop documents from the device (all that no request reads) or from host memory; the tiers below
        keep them.
        """
        if "device" in tiers:
            for key in self.document_tokens():
                self._tree.remove_key(key)
        if "host" in tiers:
            self._tiers.flush(30)
            self._tiers.drop_host()

    def sweep(self) -> None:
        """Free removed documents whose last reader has gone, and forget whose those were that the tree has
        evicted.
        """
        self._free_doomed()
        known = {*self._tree.tokens_by_key(), *(req.extra_key for req in self._caching)}
        self._namespaces = {key: owner for key, owner in self._namespaces.items() if key in known}

    def request_ended(self) -> None:
        """Perhaps it was the last reader of a removed document; perhaps its own documents are on the device
        now.
        """
        self._free_doomed()
        metrics = self._tiers.metrics
        metrics.bytes.labels("device").set(self._tree.document_tokens * self.slot_bytes)
        metrics.evictions.labels("device").inc(self._tree.documents_evicted - self._evictions_told)
        self._evictions_told = self._tree.documents_evicted

    def _free_doomed(self) -> None:
        if self._doomed:
            self._doomed -= {key for key in self._doomed if self._tree.remove_key(key)}

    def check(self) -> None:
        """Raises IntegrityError when the tree's count of document tokens is not their sum."""
        from sglang_ext.documents.types import IntegrityError

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
        return int(sum(self._runner.token_to_kv_pool.get_kv_size_bytes())) // max(
            1, self._tree.token_to_kv_pool_allocator.size
        )

    @property
    def pool_bytes(self) -> int:
        """Bytes of the KV pool."""
        return int(sum(self._runner.token_to_kv_pool.get_kv_size_bytes()))
