"""KV of composed sessions that the device had to give up, in host pages until a later turn needs it.

SGLang evicts a dialogue from its last turn back, node by node. Each node's KV becomes an entry of the host
tier, under a name that is a digest of the session's key, of where the node begins and of all tokens up to
its end: nothing else finds it. It stays off the disk and shares the host tier's budget and LRU with
documents. It is of use at its own positions only, so it comes back as it is, behind what the device still has
of the same dialogue."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_ext.documents.pages.types import DocumentMeta
from sglang_ext.wire.protocol import holds_of, session_namespace

if TYPE_CHECKING:
    from sglang_ext.documents.tier_store import TierStore

MOST = 4096
"""Entries of all sessions that are remembered; the oldest go."""
MOST_AT_ONCE = 64
"""Entries that one request takes, at most."""
_COMPOSED = ":composed"
_START = "session:"


@dataclass(frozen=True, slots=True)
class TurnPages:
    """Tokens ``start`` to ``end`` of a dialogue on the host. ``name``: of the host tier's entry; ``pages``:
    int64 [blocks]."""

    name: str
    start: int
    end: int
    pages: Any


class SessionPages:
    """What the host tier has of sessions, by key. Scheduler thread only.

    Ranks may have host pages of different turns: how far they go is for the ranks to agree on."""

    def __init__(self, pool: Any, tiers: TierStore, fingerprint: str) -> None:
        """``pool``: SGLang's, in plain KV. ``tiers``: `TierStore`."""
        self._pool = pool
        self._tiers = tiers
        self._fingerprint = fingerprint
        # pages of 8 bits would bring back another KV than was evicted
        self._is_on = tiers.shape.bits == 16
        self._entries: OrderedDict[str, tuple[str, int, int]] = OrderedDict()  # name: key, start, end
        self._of: dict[str, dict[int, list[str]]] = {}  # by key and start

    def __len__(self) -> int:
        return len(self._entries)

    def keys(self) -> set[str]:
        """Keys of sessions with KV here."""
        return set(self._of)

    def save(self, node: Any) -> None:
        """Copy the KV of a tree's node that is being evicted, as far as the host lacks it; nothing of a node
        that is no session's. From CUDA the copy is enqueued on the current stream."""
        key = node.key.extra_key
        if not self._is_on or not is_composed_session(key):
            return
        parts: list[array[int]] = []
        at = node
        while at.parent is not None:
            # a node of a prompt that came in chunks keeps more ids than its key counts
            parts.append(array("q", at.key.raw_token_ids()[: len(at.key)]))
            at = at.parent
        ids: array[int] = array("q")
        for part in reversed(parts):
            ids.extend(part)
        begin = start = len(ids) - len(parts[0])
        while (there := self._next(self._of.get(key, {}).get(start, ()), key, ids)) is not None:
            start = there.end  # the host has it since an earlier eviction
        if start == len(ids):
            return
        name, own = _name(key, ids, start), ids[start:]
        meta = DocumentMeta(name, session_namespace(key), own, len(own), self._fingerprint)
        layers = range(self._pool.layer_num)
        k = [self._pool.get_key_buffer(layer) for layer in layers]
        v = [self._pool.get_value_buffer(layer) for layer in layers]
        self._tiers.put(meta, k, v, slots=node.value[start - begin :], to_disk=False)
        self._remember(name, key, start, len(ids))

    def find(self, key: str, ids: array[int], held: int) -> list[TurnPages]:
        """Return and pin what continues the first ``held`` of the ``ids`` of a dialogue, piece by piece.

        The caller unpins each by its name."""
        found: list[TurnPages] = []
        of_key = self._of.get(key, {})
        while len(found) < MOST_AT_ONCE and (piece := self._next(of_key.get(held, ()), key, ids)) is not None:
            self._tiers.pin(piece.name)
            self._entries.move_to_end(piece.name)
            found.append(piece)
            held = piece.end
        return found

    def _next(self, names: Sequence[str], key: str, ids: array[int]) -> TurnPages | None:
        for name in reversed(names):
            _, start, end = self._entries[name]
            if end > len(ids) or _name(key, ids[:end], start) != name:
                continue  # another way on from there
            pages = self._tiers.host_pages(name, array("i", ids[start:end]), session_namespace(key))
            if pages is not None and (pages >= 0).all():
                return TurnPages(name, start, end, pages)
        return None

    def forget(self, keys: Iterable[str]) -> None:
        """Drop what is here of these sessions."""
        for key in keys:
            for names in self._of.pop(key, {}).values():
                for name in names:
                    del self._entries[name]
                    self._tiers.remove_from_host(name)

    def forget_namespace(self, namespace: str) -> None:
        """Drop what is here of sessions of a namespace, alone or among others."""
        self.forget([key for key in self._of if holds_of(key, namespace)])

    def _remember(self, name: str, key: str, start: int, end: int) -> None:
        if name not in self._entries:
            self._of.setdefault(key, {}).setdefault(start, []).append(name)
        self._entries[name] = key, start, end
        self._entries.move_to_end(name)
        while len(self._entries) > MOST:
            oldest, (of, first, _) = self._entries.popitem(last=False)
            self._of[of][first].remove(oldest)
            if not self._of[of][first]:
                del self._of[of][first]
            if not self._of[of]:
                del self._of[of]
            self._tiers.remove_from_host(oldest)


def is_composed_session(key: str | None) -> bool:
    """True for the extra key of a session's composed KV."""
    return key is not None and key.startswith(_START) and key.endswith(_COMPOSED)


def _name(key: str, ids: array[int], start: int) -> str:
    """Name of an entry of tokens ``start`` to the end of ``ids``, 32 hex digits."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(len(key.encode()).to_bytes(4, "little") + key.encode() + start.to_bytes(8, "little"))
    digest.update(ids.tobytes())
    return digest.hexdigest()
