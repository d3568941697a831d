"""Whose requests may measure: have distributions over the vocabulary sent and tokens forced.

A distribution costs as much as its whole answer otherwise does, so the fields are the server's own: of its
engine's requests, of the servers in front of a worker, and of operators where control routes are open.
`sglang_ext.sglang_internals.request_checks` refuses them of others. Imports neither torch nor SGLang."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from sglang_ext.wire.protocol import DISTRIBUTION_FIELD, FORCED_FIELD, MAX_TRACED

_measures: ContextVar[bool] = ContextVar("ragserve_measures", default=False)


@contextmanager
def measuring(*, allowed: bool = True) -> Iterator[None]:
    """Let the requests measure that the block, and tasks started in it, give to SGLang, if ``allowed``."""
    token = _measures.set(allowed)
    try:
        yield
    finally:
        _measures.reset(token)


def may_measure() -> bool:
    """Whether the current request is the server's own, or an operator's."""
    return _measures.get()


def check_measuring(params: dict[str, Any], sequences: int) -> None:
    """Check the sampling parameters of a request for ``sequences`` answers. Raises ValueError."""
    custom = params.get("custom_params")
    if not isinstance(custom, dict):
        return
    for name in (DISTRIBUTION_FIELD, FORCED_FIELD):
        if custom.get(name) is not None and not _measures.get():
            raise ValueError(f"{name} is the server's own; omit it")
    count = custom.get(DISTRIBUTION_FIELD)
    if isinstance(count, int) and count * sequences > MAX_TRACED:
        raise ValueError(f"{DISTRIBUTION_FIELD} is at most {MAX_TRACED} in all, not {count} x {sequences}")
