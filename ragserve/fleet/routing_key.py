"""Routing keys: a router sends requests of one key to one worker, and the worker sees for whom a key is."""

from __future__ import annotations

ROUTING_KEY = "x-smg-routing-key"
"""Header by which SGLang's router chooses the worker, and which it passes on."""

WORKER = "x-ragserve-worker"
"""Header of answers: the worker that has got the request."""

MARK = "x-correlation-id"
"""Header that a router passes on. It tells questions about the way from requests."""

ASK = "ragserve-which-worker"
PROBE = "ragserve-probe:"  # and a name of the probe


def routing_key(worker: str, number: int) -> str:
    """Return a key for a worker; ``number`` tells its keys apart."""
    return f"{worker}/{number}"


def meant_for(key: str) -> str:
    """Return the worker that a key is for."""
    return key.rpartition("/")[0]
