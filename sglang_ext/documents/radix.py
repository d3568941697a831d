"""SGLang's radix cache, extended by composed requests and documents.

Composed KV is approximate and private: a composed request never matches and never enters the tree, its slots
are freed when it ends. That of a session enters it under the session's own key, which only its next turn asks
for. A document request's KV enters the tree under the document's key; the observer gets it
before that, for the other tiers.

What a sparse decode step has computed, and all behind it, is approximate too and is freed: the tree takes a
request's KV up to there."""

from __future__ import annotations

import re
import time
from array import array
from collections.abc import Collection
from typing import Any, Protocol

import torch
from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode

from sglang_ext.documents.pages.types import whole_pages
from sglang_ext.versions import protected_tokens, row_of
from sglang_ext.versions.tree import RequestTree

_DOCUMENT_KEY = re.compile(r"[0-9a-f]{32}")


class TreeObserver(Protocol):
    """Hears of the requests whose KV the tree would take. Scheduler thread only."""

    def is_composed(self, req: Any) -> bool:
        """True for a request that must neither match nor enter the tree."""

    def in_session(self, req: Any) -> bool:
        """True for a composed request of a session: part of its KV may be the tree's, and all of it is to be
        if it ends well."""

    def exact_tokens(self, req: Any, tokens: int) -> int:
        """Return how many of a request's first ``tokens`` have KV that no sparse decode step has touched."""

    def before_release(self, req: Any, tokens: int) -> None:
        """A request has ended with KV of ``tokens`` and still has its row and slots."""

    def on_document(self, req: Any, slots: torch.Tensor) -> None:
        """The KV in ``slots`` of an ended request is about to enter the tree."""

    def on_finished(self) -> None:
        """A request has ended and its slots are free or in the tree."""

    def on_cached(self, req: Any, node: TreeNode) -> None:
        """The KV of a request's whole pages is in the tree; it ends in this node."""

    def before_eviction(self, node: TreeNode) -> None:
        """A node is being evicted for want of room; its slots still hold its KV."""

    def on_evicted(self, node: TreeNode) -> None:
        """A node has left the tree."""


class DocumentRadixCache(RequestTree):
    """Drop-in for SGLang's `RadixCache`; what is not composed takes the original path. ``observer`` has to be
    set before the first request."""

    observer: TreeObserver
    document_tokens = 0  # under document keys, whole or in parts
    documents_evicted = 0
    _evicting = False

    def match_prefix(self, params: Any) -> Any:
        req = params.req
        if req is not None and (self.observer.is_composed(req) or getattr(req, "ragserve_on_host", False)):
            return self._empty_match_result
        return super().match_prefix(params)

    def enters(self, req: Any) -> bool:
        return not self.observer.is_composed(req) and not _is_private(req) and not _is_offloaded(req)

    def on_cached(self, req: Any, node: TreeNode) -> None:
        self.observer.on_cached(req, node)

    def leaving(self, req: Any, tokens: int, *, inserts: bool) -> int | None:
        exact = self.observer.exact_tokens(req, tokens)
        self.observer.before_release(req, tokens)
        composed = self.observer.is_composed(req)
        if not inserts or _is_private(req) or _is_offloaded(req):
            return None
        if composed:
            if not self.observer.in_session(req):
                return None
        else:
            self.observer.on_document(req, self.req_to_token_pool.req_to_token[row_of(req), :tokens])
        if exact < tokens:
            # whole pages, for a page is freed by one call; what the tree has already is exact
            return max(exact // self.page_size * self.page_size, protected_tokens(req))
        return tokens

    def own_slots(self, req: Any, tokens: int) -> torch.Tensor | None:
        slots = self.req_to_token_pool.req_to_token[row_of(req), :tokens]
        if _is_offloaded(req):
            # its prompt is in the tree or gone, and what it decoded has no place there
            (held, tail), req.ragserve_resident_blocks = req.ragserve_resident_blocks, None
            return torch.cat((held, slots[tail:].to(held.dtype)))
        if self.observer.is_composed(req) and not self.observer.in_session(req):
            # in one call: with pages the composed slots and the extended ones may share a page, which is
            # freed once per call
            return slots
        return None

    def on_left(self) -> None:
        self.observer.on_finished()

    def insert(self, params: Any) -> Any:
        result = super().insert(params)
        if is_document_key(params.key.extra_key):
            self.document_tokens += len(params.key.page_aligned(self.page_size)) - result.prefix_len
        return result

    def evict(self, params: Any) -> Any:
        self._evicting = True
        try:
            return super().evict(params)
        finally:
            self._evicting = False

    def _delete_leaf(self, node: TreeNode) -> None:
        if self._evicting:
            self.observer.before_eviction(node)
        self._mark_parent(node)
        super()._delete_leaf(node)
        if is_document_key(node.key.extra_key):
            self.document_tokens -= len(node.key)
            self.documents_evicted += self._evicting and node.parent is self.root_node
        self.observer.on_evicted(node)

    def reset(self) -> None:
        gone = _subtree(self.root_node)[1:] if hasattr(self, "root_node") else []
        super().reset()
        self.document_tokens = 0
        for node in gone:
            self.observer.on_evicted(node)

    def remove_keys(self, extra_keys: Collection[str]) -> set[str]:
        """Free every node under these extra keys that no running request has locked, in one walk. Return the
        keys that have others, for `free_removed`."""
        left: set[str] = set()
        for root in self._under(extra_keys):
            for node in reversed(_subtree(root)):  # children before their parents, which are locked with them
                if node.lock_ref:
                    node.ragserve_removed = True
                    left.add(root.key.extra_key)
                else:
                    self._free(node)
        return left

    def free_removed(self, extra_keys: Collection[str]) -> set[str]:
        """Free the nodes that `remove_keys` has left under these extra keys and nobody has locked any more,
        with what has been computed behind them; other nodes stay. Return the keys that have more of them."""
        left: set[str] = set()
        for root in self._under(extra_keys):
            for node in reversed(_subtree(root)):
                self._mark_parent(node)
            waiting = [root]
            while waiting:
                node = waiting.pop()
                if not _is_removed(node):
                    continue
                if node.lock_ref:
                    left.add(root.key.extra_key)
                    waiting.extend(node.children.values())
                else:
                    for each in reversed(_subtree(node)):
                        self._free(each)
        return left

    def _under(self, extra_keys: Collection[str]) -> list[TreeNode]:
        return [node for node in self.root_node.children.values() if node.key.extra_key in extra_keys]

    def _free(self, node: TreeNode) -> None:
        self.token_to_kv_pool_allocator.free(node.value)
        self._delete_leaf(node)
        self.removed(node)

    def _mark_parent(self, node: TreeNode) -> None:
        """A removed node's parent was removed with it, or has been split off it since, without its mark."""
        if _is_removed(node) and node.parent is not self.root_node:
            node.parent.ragserve_removed = True

    def evict_keys(self, extra_keys: Collection[str]) -> None:
        """Evict every node under these extra keys that no running request has locked, as for want of room."""
        self._evicting = True
        try:
            self.remove_keys(extra_keys)
        finally:
            self._evicting = False

    def cached_slots(self) -> torch.Tensor:
        """Slots of everything cached, int64."""
        nodes = _subtree(self.root_node)[1:]
        return torch.cat([node.value for node in nodes]) if nodes else torch.empty(0, dtype=torch.int64)

    def peek(self, ids: array[int], extra_key: str) -> int:
        """Number of leading ``ids`` cached under this key. SGLang's own lookup would split nodes and refresh
        their LRU time.
        """
        return sum(map(len, self.leading(ids, extra_key)))

    def leading(self, ids: array[int], extra_key: str) -> list[torch.Tensor]:
        """Slots of the leading ``ids`` cached under this key, int64 in parts; as `peek`, changes nothing."""
        key, node, parts = RadixKey(ids, extra_key=extra_key), self.root_node, []
        while len(key) >= self.page_size:  # less is in no tree, and has no key
            child = node.children.get(key.child_key(self.page_size))
            if child is None:
                break
            length = child.key.match(key, page_size=self.page_size)
            parts.append(child.value[:length])
            if length < len(child.key):
                break
            key, node = key[length:], child
        return parts

    def document(self, ids: array[int], extra_key: str) -> tuple[list[torch.Tensor], TreeNode] | None:
        """Slots of a document, int64 in parts, and its last node; None unless all of it is cached, in whole
        pages (`whole_pages`). Refreshes its LRU time, as a lookup does.

        SGLang's own lookup would concatenate the parts on the device and bisect the ids, for each of a
        request's documents. The last node may hold one token more than the document: it was decoded before
        SGLang knew that the document's request had ended."""
        node, at, parts, now = self.root_node, 0, [], time.monotonic()
        n, ids = len(ids), whole_pages(ids, self.page_size)
        while at < n:
            rest = ids[at:] if at else ids
            child = node.children.get(RadixKey(rest, extra_key=extra_key).child_key(self.page_size))
            if child is None:
                return None
            count = min(len(child.key), len(rest))
            # a node of a document that came in chunks keeps more ids than its key counts
            if child.key.raw_token_ids()[:count] != rest[:count]:
                return None
            child.last_access_time = now
            parts.append(child.value[: min(count, n - at)])
            node, at = child, at + count
        return parts, node

    def tokens_by_key(self) -> dict[str, int]:
        """Cached tokens under each extra key."""
        found: dict[str, int] = {}
        for root in self.root_node.children.values():
            key = root.key.extra_key
            if key is not None:
                found[key] = found.get(key, 0) + sum(len(node.key) for node in _subtree(root))
        return found


def is_document_key(extra_key: str | None) -> bool:
    """True for a document's key; the keys of namespaces and requests have another form."""
    return extra_key is not None and _DOCUMENT_KEY.fullmatch(extra_key) is not None


def _is_private(req: Any) -> bool:
    """True if the request's KV must not be cached, by its strategy or because it was removed before."""
    return bool(getattr(req, "ragserve_private", False))


def _is_offloaded(req: Any) -> bool:
    """True if the request table names resident blocks of the request, which hold any of its pages."""
    return getattr(req, "ragserve_resident_blocks", None) is not None


def _is_removed(node: TreeNode) -> bool:
    """True if the node's KV was removed while a running request read it."""
    return bool(getattr(node, "ragserve_removed", False))


def _subtree(node: TreeNode) -> list[TreeNode]:
    nodes, stack = [], [node]
    while stack:
        node = stack.pop()
        nodes.append(node)
        stack.extend(node.children.values())
    return nodes
