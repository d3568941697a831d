"""Requests a minute, by a clock that the test moves."""

from __future__ import annotations

import pytest

from ragserve.errors import TooManyRequests
from ragserve.tenants.key_file import KeyLimits
from ragserve.tenants.principal import Principal
from ragserve.tenants.rate_limits import RateLimits


def key(name: str, **limits: int) -> Principal:
    return Principal(name, name, limits=KeyLimits(**limits))


def admitted(limits: RateLimits, of: Principal, requests: int) -> int:
    """Requests that are admitted, of so many at one moment."""
    passed = 0
    for _ in range(requests):
        try:
            with limits.admit(of):
                passed += 1
        except TooManyRequests:
            continue
    return passed


def test_a_minutes_requests_at_once_and_then_evenly() -> None:
    now = 1000.0
    limits = RateLimits(lambda: now)
    fast, slow = key("fast", requests_per_minute=60), key("slow", requests_per_minute=1)
    assert admitted(limits, fast, 100) == 60
    assert admitted(limits, slow, 100) == 1
    now += 10
    assert admitted(limits, fast, 100) == 10
    assert admitted(limits, slow, 1) == 0
    now += 50
    assert admitted(limits, slow, 2) == 1
    now += 3600
    assert admitted(limits, fast, 100) == 60


def test_a_refusal_says_how_long_to_wait() -> None:
    now = 0.0
    limits = RateLimits(lambda: now)
    three = key("three", requests_per_minute=3)
    assert admitted(limits, three, 3) == 3
    now += 4.5
    with pytest.raises(TooManyRequests) as refused, limits.admit(three):
        pass
    assert refused.value.retry_after_s == 16
    now += 16
    assert admitted(limits, three, 5) == 1


def test_tokens_come_back_evenly_and_what_is_used_beyond_them_is_waited_for() -> None:
    now = 50.0
    limits = RateLimits(lambda: now)
    of, other = key("of", tokens_per_minute=600), key("other", tokens_per_minute=600)

    def wait_s() -> int:
        try:
            limits.check_tokens(of)
        except TooManyRequests as refused:
            return refused.retry_after_s
        return 0

    limits.spend_tokens(of, 599)
    assert wait_s() == 0, "one is left"
    limits.spend_tokens(of, 301)
    assert wait_s() == 31, "300 were too many, and one has to come back"
    limits.check_tokens(other)
    assert admitted(limits, of, 3) == 3, "what runs no model goes on"
    now += 30.2
    assert wait_s() == 0
    now += 3600
    limits.spend_tokens(of, 600)
    assert wait_s() == 1, "no more than a minute's are saved"
    limits.spend_tokens(key("unlimited"), 10**9)
    limits.check_tokens(key("unlimited"))


def test_so_many_at_once() -> None:
    limits = RateLimits()
    two = key("two", concurrent_requests=2)
    with limits.admit(two), limits.admit(two):
        assert admitted(limits, two, 1) == 0
        assert admitted(limits, key("other", concurrent_requests=1), 3) == 3
    assert admitted(limits, two, 1) == 1


def test_a_failed_request_is_no_longer_running() -> None:
    limits = RateLimits()
    one = key("one", concurrent_requests=1)
    with pytest.raises(ZeroDivisionError), limits.admit(one):
        raise ZeroDivisionError
    assert admitted(limits, one, 1) == 1
