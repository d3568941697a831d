"""Whom a request comes from, and what it may do and see: the one thing that routes ask.

However somebody has proved who they are, by an API key or otherwise, `Principal` is what is made of it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from ragserve.tenants.key_file import ALL, KeyLimits, Right, TenantKey
from ragserve_index.viewers import EVERYTHING, LABEL, UNLABELLED, Viewer

_NO_LIMITS = KeyLimits()


@dataclass(frozen=True, slots=True)
class Grant:
    """Rights in the namespaces that one of the patterns matches: a name, the beginning of names followed by
    ``*``, or ``*`` for all."""

    namespaces: tuple[str, ...]
    rights: frozenset[Right]

    def covers(self, namespace: str) -> bool:
        """True if a pattern matches ``namespace``."""
        return any(
            namespace.startswith(each[:-1]) if each.endswith(ALL) else namespace == each
            for each in self.namespaces
        )


@dataclass(frozen=True, slots=True)
class Principal:
    """``id`` is in the audit log with ``name``, and ``limits`` are counted by it. ``viewer``: which documents
    of its namespaces it sees. ``user``: tells those apart who share an id."""

    id: str
    name: str
    grants: tuple[Grant, ...] = ()
    viewer: Viewer = UNLABELLED
    limits: KeyLimits = _NO_LIMITS
    user: str = ""

    @classmethod
    def of_key(cls, key: TenantKey, header: str | None = None) -> Principal:
        """Who comes with an API key. ``header``: the value of the key's ``labels_header``, labels with commas
        between them; they count as far as the key has them, and without any the request has none."""
        grants = (Grant(key.namespaces, key.rights),)
        viewer = EVERYTHING if key.is_admin else Viewer.holding(key.labels)
        if key.labels_header is None:
            return cls(key.key_id, key.name, grants, viewer, key.limits)
        named = (each.strip() for each in (header or "").split(","))
        own = frozenset(each for each in named if LABEL.fullmatch(each) and viewer.holds((each,)))
        user = hashlib.blake2b(",".join(sorted(own)).encode(), digest_size=8).hexdigest()
        return cls(key.key_id, key.name, grants, Viewer(own), key.limits, user)

    @property
    def owner(self) -> str:
        """Whose its sessions are."""
        return f"{self.id}/{self.user}" if self.user else self.id

    @property
    def is_admin(self) -> bool:
        """True if everything is allowed, and every document seen."""
        return self.has("admin")

    @property
    def patterns(self) -> tuple[str, ...] | None:
        """Patterns of its namespaces; None for all."""
        return None if self.is_admin else tuple(each for grant in self.grants for each in grant.namespaces)

    def has(self, right: Right) -> bool:
        """True if it has the right in some namespace, or in the server; admin includes all others. What it
        may do in a namespace, `may` says."""
        return any(right in grant.rights or "admin" in grant.rights for grant in self.grants)

    def covers(self, namespace: str) -> bool:
        """True if it has any right in a namespace."""
        return any(grant.covers(namespace) for grant in self.grants)

    def may(self, right: Right, namespace: str) -> bool:
        """True if it has the right in a namespace."""
        return any(
            grant.covers(namespace) and (right in grant.rights or "admin" in grant.rights)
            for grant in self.grants
        )


NOBODY = Principal("nobody", "nobody")
"""Has no right, for requests that need none."""
