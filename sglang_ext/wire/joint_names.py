"""Names of several namespaces as one: joined by ``+``, which no namespace's name has, in ascending order.

A request over several namespaces carries such a name where others have that of their namespace, and each
document's own namespace beside it. Imports nothing."""

from __future__ import annotations

from collections.abc import Iterable

JOINT = "+"
MOST = 16
"""Namespaces that a request may be about."""


def joint_name(names: Iterable[str]) -> str:
    """The name of these namespaces together; of one, its own."""
    return JOINT.join(sorted(set(names)))


def names_of(name: str) -> list[str]:
    """The namespaces of a name: several for a joint one."""
    return name.split(JOINT)


def is_joint(name: str) -> bool:
    """True for the name of several namespaces."""
    return JOINT in name


def matches(name: str, pattern: str) -> bool:
    """True if a namespace's name is the pattern, or begins as a pattern that ends in ``*`` does."""
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern
