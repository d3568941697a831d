"""The API keys that a running server admits."""

from __future__ import annotations

import hmac
from datetime import UTC, datetime
from pathlib import Path

from ragserve.errors import Unauthorized, Unavailable
from ragserve.tenants.key_file import ALL, KeyFile, KeyTable, Right, TenantKey


def _built_in(name: str, namespaces: tuple[str, ...], rights: frozenset[Right]) -> TenantKey:
    return TenantKey.model_construct(
        key_id=name, name=name, digest="", namespaces=namespaces, rights=rights, created_at=datetime.now(UTC)
    )


class Keyring:
    """The keys of a data folder and the one of ``--api-key``, which has all rights.

    A changed file counts from the next request on. A server without any key is open, unless people sign in to
    it (``closed``); one whose file was there once stays closed when it goes."""

    def __init__(self, data_dir: Path, api_key: str | None, *, closed: bool = False) -> None:
        self._file = KeyFile(data_dir)
        self._api_key = None if api_key is None else api_key.encode()
        self._master, self._anyone = (
            _built_in(name, (ALL,), frozenset({"admin"})) for name in ("--api-key", "no key")
        )
        self._signature: tuple[int, ...] | None = None
        self._table = KeyTable()
        self._by_digest: dict[str, TenantKey] = {}
        self._unreadable: Unavailable | None = None
        self._had_file = False
        self._closed = closed

    @property
    def is_open(self) -> bool:
        """True if no request needs a key."""
        self._refresh()
        return self._api_key is None and not self._had_file and not self._closed

    def admit(self, authorization: bytes) -> TenantKey:
        """Return the key of a request with this header. Raises Unauthorized, and Unavailable for a file that
        cannot be read."""
        if self.is_open:
            return self._anyone
        scheme, _, secret = authorization.partition(b" ")
        secret = secret.strip() if scheme.lower() == b"bearer" else b""
        if self._api_key and hmac.compare_digest(secret, self._api_key):
            return self._master
        if self._unreadable is not None:
            raise self._unreadable
        # The digest is keyed: how long its look-up takes says nothing about secrets.
        found = self._by_digest.get(self._table.digest(secret)) if secret else None
        if found is not None and not found.expired:
            return found
        message = "The API key is wrong." if authorization else "This server requires an API key."
        raise Unauthorized(
            "The API key has expired." if found else message,
            hint="Send it as the header 'Authorization: Bearer KEY'.",
        )

    def _refresh(self) -> None:
        """Read the file again if it is another one than before. Files are replaced, so the inode tells."""
        try:
            found = self._file.path.stat()
            signature: tuple[int, ...] | None = (found.st_ino, found.st_mtime_ns, found.st_size)
        except FileNotFoundError:
            signature = ()
        except OSError:  # there may be a file
            signature = None
        if signature is not None and signature == self._signature:
            return
        self._had_file = self._had_file or signature != ()
        try:
            self._table, self._unreadable = self._file.read(), None
            self._signature = signature
        except Unavailable as error:  # with the next request again: the file may be put back as it was
            self._table, self._unreadable = KeyTable(), error
            self._signature, self._had_file = None, True
        self._by_digest = {key.digest: key for key in self._table.keys}
