"""Namespaces of the server's own requests, whose KV it removes by their names."""

from __future__ import annotations

import re
import secrets
from typing import Literal

_OWN = re.compile("(calibration|warm-up)-[0-9a-f]{32}")


def own_name(purpose: Literal["calibration", "warm-up"]) -> str:
    """Return a name that no user's namespace has, as nobody can guess it: to remove its KV removes nobody
    else's. It is another one in each process."""
    return f"{purpose}-{secrets.token_hex(16)}"


def is_own(namespace: str) -> bool:
    """Return whether a name is one of `own_name`, in whatever process."""
    return _OWN.fullmatch(namespace) is not None
