"""Namespaces of the server's own requests, whose KV it removes by their names."""

from __future__ import annotations

import secrets


def own_name(purpose: str) -> str:
    """Return a name that no user's namespace has, as nobody can guess it: to remove its KV removes nobody
    else's. It is another one in each process."""
    return f"{purpose}-{secrets.token_hex(16)}"
