"""Requests of each key: how many a minute, and how many at once."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ragserve.errors import TooManyRequests
from ragserve.tenants.key_file import TenantKey

_MINUTE = 60.0


class RateLimits:
    """Counts in the memory of one server. A key that was idle may send a whole minute's requests at once;
    then they come back evenly (the generic cell rate algorithm, which keeps one time per key)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._used_up_to: dict[str, float] = {}  # time at which the key has its whole minute again
        self._running: Counter[str] = Counter()

    @contextmanager
    def admit(self, key: TenantKey) -> Iterator[None]:
        """Count a request for the block. Raises TooManyRequests with the seconds to wait."""
        at_once = key.limits.concurrent_requests
        if at_once is not None and self._running[key.key_id] >= at_once:
            raise TooManyRequests(
                f"{at_once} requests of this API key are already being answered.", hint="Retry in a moment."
            )
        self._take_one(key)
        self._running[key.key_id] += 1
        try:
            yield
        finally:
            self._running[key.key_id] -= 1
            if not self._running[key.key_id]:
                del self._running[key.key_id]

    def _take_one(self, key: TenantKey) -> None:
        per_minute = key.limits.requests_per_minute
        if per_minute is None:
            return
        now, interval = self._clock(), _MINUTE / per_minute
        used_up_to = max(self._used_up_to.get(key.key_id, now), now)
        wait = used_up_to + interval - now - _MINUTE
        if wait > 1e-6:
            seconds = math.ceil(wait)
            raise TooManyRequests(
                f"This API key may send {per_minute:,} requests a minute.",
                hint=f"Retry in {seconds} s.",
                code="rate_limited",
                retry_after_s=seconds,
            )
        self._used_up_to = {id_: until for id_, until in self._used_up_to.items() if until > now}
        self._used_up_to[key.key_id] = used_up_to + interval
