"""What browsers keep: a sign-in that has begun, and who is signed in. Both are signed with a secret of the
data folder, so that they outlive a restart."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ragserve.errors import Unavailable
from ragserve.files import locked, write_text

SECRET_FILE = "sso-secret"
_SECRET_BYTES = 32
_SECRET = re.compile(rb"[0-9a-f]{64}")
_WAIT_S = 10.0
_ALGORITHM = "HS256"  # a key of our own, for cookies alone: tokens of a provider never come here
MOST_CHARS = 4000
"""Characters of a cookie: browsers keep no more than 4,096, with its name and attributes."""


class Signer:
    """Signs what a cookie says, and reads it again.

    Args:
        data_dir: Has the secret, which is made if there is none. Servers of one address need one secret:
            copy the file.
    """

    def __init__(self, data_dir: Path) -> None:
        self._key = _secret(data_dir)

    def sign(self, kind: str, seconds: float, **said: Any) -> str:
        """A text that says this for so long."""
        import jwt

        return jwt.encode(
            {**said, "aud": kind, "exp": time.time() + seconds}, self._key, algorithm=_ALGORITHM
        )

    def read(self, kind: str, text: str) -> Mapping[str, Any] | None:
        """What a text of this kind says; None if it is not ours, of another kind, or over."""
        import jwt

        if not text or len(text) > MOST_CHARS:
            return None
        try:
            return jwt.decode(
                text, self._key, algorithms=[_ALGORITHM], audience=kind, options={"require": ["exp", "aud"]}
            )
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError):
            return None


def _secret(data_dir: Path) -> bytes:
    """Read the secret, or make it, readable for its owner only. Raises ``Unavailable``."""
    path = data_dir / SECRET_FILE
    data_dir.mkdir(parents=True, exist_ok=True)
    with locked(data_dir / f"{SECRET_FILE}.lock", wait_s=_WAIT_S) as alone:
        if not alone:
            raise Unavailable(f"Another process is making {path}.", hint="Try again.")
        try:
            found = path.read_bytes()
        except FileNotFoundError:
            found = secrets.token_hex(_SECRET_BYTES).encode()
            write_text(path, found.decode(), durable=True, mode=0o600)
    if not _SECRET.fullmatch(found):
        raise Unavailable(f"{path} is damaged.", hint="Remove it: everybody then signs in again.")
    return bytes.fromhex(found.decode())
