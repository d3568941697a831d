"""Requests and tokens of each key: how many a minute, and how many requests at once."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ragserve.errors import TooManyRequests
from ragserve.tenants.principal import Principal

_MINUTE = 60.0


class _Allowance:
    """So many things a minute for each key. A key that was idle may take a whole minute's at once; then they
    come back evenly (the generic cell rate algorithm, which keeps one time per key)."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._used_up_to: dict[str, float] = {}  # time at which the key has its whole minute again

    def wait_s(self, key_id: str, per_minute: int) -> int:
        """Seconds until the key may take one; 0 if it may now."""
        now = self._clock()
        self._used_up_to = {id_: until for id_, until in self._used_up_to.items() if until > now}
        wait = self._used_up_to.get(key_id, now) + _MINUTE / per_minute - now - _MINUTE
        return math.ceil(wait) if wait > 1e-6 else 0

    def take(self, key_id: str, per_minute: int, n: int) -> None:
        """Take ``n``, even more than are left: the key then waits until they are made up for."""
        now = self._clock()
        self._used_up_to[key_id] = max(self._used_up_to.get(key_id, now), now) + n * _MINUTE / per_minute


class RateLimits:
    """Counts in the memory of one server."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._requests, self._tokens = _Allowance(clock), _Allowance(clock)
        self._running: Counter[str] = Counter()

    @contextmanager
    def admit(self, who: Principal) -> Iterator[None]:
        """Count a request for the block. Raises TooManyRequests with the seconds to wait."""
        at_once = who.limits.concurrent_requests
        if at_once is not None and self._running[who.id] >= at_once:
            raise TooManyRequests(
                f"{at_once} requests of this API key are already being answered.", hint="Retry in a moment."
            )
        if per_minute := who.limits.requests_per_minute:
            _refuse(self._requests.wait_s(who.id, per_minute), f"send {per_minute:,} requests a minute")
            self._requests.take(who.id, per_minute, 1)
        self._running[who.id] += 1
        try:
            yield
        finally:
            self._running[who.id] -= 1
            if not self._running[who.id]:
                del self._running[who.id]

    def check_tokens(self, who: Principal) -> None:
        """Raises TooManyRequests, with the seconds to wait, for a key that has no token left."""
        if per_minute := who.limits.tokens_per_minute:
            _refuse(
                self._tokens.wait_s(who.id, per_minute),
                f"use {per_minute:,} tokens of prompts and answers a minute",
            )

    def spend_tokens(self, who: Principal, n: int) -> None:
        """Count tokens of a prompt or an answer."""
        if n and (per_minute := who.limits.tokens_per_minute):
            self._tokens.take(who.id, per_minute, n)


def _refuse(seconds: int, what: str) -> None:
    if seconds:
        raise TooManyRequests(
            f"This API key may {what}.",
            hint=f"Retry in {seconds} s.",
            code="rate_limited",
            retry_after_s=seconds,
        )
