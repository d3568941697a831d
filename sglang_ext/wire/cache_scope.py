"""Whose prefix cache a request to SGLang's own routes uses, and whose requests it may end.

The server's app sets the scope around SGLang's app. `sglang_ext.sglang_internals.request_checks` applies
it where all routes that generate meet, in the same process. Imports neither torch nor SGLang."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from sglang_ext.wire.joint_names import names_of
from sglang_ext.wire.protocol import PLAN_FIELD, prefix_key

_OF_NAMESPACE = prefix_key("")
_scope: ContextVar[CacheScope | None] = ContextVar("ragserve_cache_scope", default=None)


@dataclass(frozen=True, slots=True)
class CacheScope:
    """``owner`` separates prefix caches, so that nobody learns by waiting times what others have sent.
    ``reads``: whether the owner may read a namespace, and so use its caches."""

    owner: str
    reads: Callable[[str], bool]

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Apply to the requests that the block, and tasks started in it, give to SGLang."""
        token = _scope.set(self)
        try:
            yield
        finally:
            _scope.reset(token)


def confine(obj: Any) -> None:
    """Keep a request within the active scope: set its extra key, mark its id, which SGLang aborts by prefix,
    and raise ValueError for a plan of a namespace that the owner may not read, or that writes to one."""
    scope = _scope.get()
    if scope is None:
        return
    if hasattr(obj, "extra_key"):
        obj.extra_key = _each(obj.extra_key, lambda key: _own(scope, key))
    if getattr(obj, "rid", None):
        obj.rid = _each(obj.rid, lambda rid: f"{scope.owner}:{rid}")
    params = getattr(obj, "sampling_params", None)
    for each in params if isinstance(params, list) else [params]:
        custom = each.get("custom_params") if isinstance(each, dict) else None
        if isinstance(custom, dict) and custom.get(PLAN_FIELD) is not None:
            _check_plan(scope, str(custom[PLAN_FIELD]))


def _each(value: Any, change: Callable[[Any], str]) -> str | list[str]:
    return [change(each) for each in value] if isinstance(value, list) else change(value)


def _own(scope: CacheScope, key: Any) -> str:
    text = str(key or "")
    shared = text.startswith(_OF_NAMESPACE) and _reads(scope, text.removeprefix(_OF_NAMESPACE))
    return text if shared else f"{scope.owner}:{text}"


def _reads(scope: CacheScope, name: str) -> bool:
    """Whether the owner may read all namespaces of a name."""
    return all(map(scope.reads, names_of(name)))


def _check_plan(scope: CacheScope, text: str) -> None:
    try:
        plan = json.loads(text)
        namespace, session, operation = plan["namespace"], plan.get("session"), plan["op"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError("the plan cannot be read") from None
    if session is not None:
        raise ValueError("sessions go on over /rag/query and /v1/chat/completions only")
    if operation == "document":  # would last, though no index has its text and so no removal names it
        raise ValueError("documents are computed for the cache by the server only")
    if not isinstance(namespace, str) or not _reads(scope, namespace):
        raise ValueError(f"this API key may not use the cache of namespace {str(namespace)[:64]!r}")
