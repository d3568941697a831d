"""The namespaces that a request is about: one, or several by their names and by patterns."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ragserve.errors import InvalidRequest
from ragserve_index.registry import namespace_not_found
from sglang_ext.wire.joint_names import MOST, is_joint, joint_name, matches

if TYPE_CHECKING:
    from ragserve.api.access import Access
    from ragserve.api.services import Services


@dataclass(frozen=True, slots=True)
class AskedNamespaces:
    """``name``: of the namespace, or the joint name of several. ``by_pattern``: a pattern was among what was
    given."""

    name: str
    by_pattern: bool = False


async def readable(given: Sequence[str], svc: Services, caller: Access, *, param: str) -> AskedNamespaces:
    """The namespaces that a request may read, by names and patterns. A pattern matches those that there are
    and the key may read.

    Raises NotFound alike for a namespace that is not the key's and one that does not exist, and for a pattern
    that matches none; InvalidRequest for too many."""
    names: set[str] = set()
    patterns = [each for each in given if each.endswith("*")]
    for each in given:
        if each not in patterns:
            caller.require("read", each)
            names.add(each)
    if patterns:
        every = await asyncio.to_thread(svc.store.namespaces)
        there = [one.name for one in every if caller.who.may("read", one.name)]
        for pattern in patterns:
            found = {name for name in there if matches(name, pattern)}
            if not found:
                raise namespace_not_found(pattern)
            names |= found
    check_number(len(names), param=param)
    return AskedNamespaces(joint_name(names), bool(patterns))


def check_number(n: int, *, param: str) -> None:
    """Raise InvalidRequest for more namespaces than a request may be about."""
    if n > MOST:
        raise InvalidRequest(
            f"The question is about {n:,} namespaces; the limit is {MOST}.",
            hint="Name fewer, or a longer beginning of their names.",
            code="too_many_namespaces",
            param=param,
        )


async def asked_namespaces(
    namespace: str, namespaces: Sequence[str] | None, svc: Services, caller: Access
) -> AskedNamespaces:
    """The namespaces of a body: its ``namespace``, unless it has ``namespaces``. Raises as `readable`."""
    if namespaces is None:
        caller.require("read", namespace)
        return AskedNamespaces(namespace)
    return await readable(namespaces, svc, caller, param="namespaces")


def check_alone(namespace: str, documents: object) -> None:
    """Raise InvalidRequest for given documents with several namespaces."""
    if documents is not None and is_joint(namespace):
        raise InvalidRequest(
            "Documents that come with the question are kept under one namespace's name, not several.",
            hint="Name one namespace, or omit documents.",
            param="documents",
        )
