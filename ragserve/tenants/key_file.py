"""API keys on disk: `keys.json` in the data folder, written by `ragserve keys`.

A secret has 256 random bits. Nobody finds it by trying, so the slow hashes that protect passwords would only
delay every request. The file holds BLAKE2b digests of the secrets under a random key of its own: they are in
no table, and equal secrets of two installations differ."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, model_validator

from ragserve.errors import Conflict, InvalidRequest, NotFound, Unavailable
from ragserve.files import locked, write_text
from ragserve_index.viewers import LABEL
from sglang_ext.wire.protocol import NAMESPACE

KEYS_FILE = "keys.json"  # in data_dir
ALL = "*"
Right = Literal["read", "ingest", "delete", "metrics", "admin"]
Pattern = Annotated[str, Field(pattern=rf"^(?:{NAMESPACE.pattern}\*?|\*)$")]
"""The name of a namespace, the beginning of names followed by ``*``, or ``*`` for all."""

_PREFIX = "rsk-"  # lets scanners for leaked secrets find them
_SECRET_BYTES = 32
_WAIT_S = 10.0


KeyLabel = Annotated[str, Field(pattern=rf"^(?:{LABEL.pattern}|\*)$")]
"""A label of documents that the key sees, or ``*`` for all."""
MAX_KEY_LABELS = 256


class KeyLimits(BaseModel):
    """Limits of a key, besides the server's own; None sets none."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)
    concurrent_requests: int | None = Field(default=None, ge=1)
    max_upload_bytes: int | None = Field(default=None, ge=1)
    max_k: int | None = Field(default=None, ge=1)


class TenantKey(BaseModel):
    """A key: what it opens, and the digest of its secret.

    ``labels``: of the documents that it sees beside those without any. ``labels_header``: the header in which
    a gateway that holds the key names the labels of its user; they count as far as the key has them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key_id: str
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.@ -]{0,63}$")
    digest: str
    namespaces: tuple[Pattern, ...]
    rights: frozenset[Right] = Field(min_length=1)
    created_at: AwareDatetime
    expires_at: AwareDatetime | None = None
    limits: KeyLimits = KeyLimits()
    labels: Annotated[tuple[KeyLabel, ...], Field(max_length=MAX_KEY_LABELS)] = ()
    labels_header: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9-]{0,63}$")] | None = None

    @model_validator(mode="after")
    def _fits_its_rights(self) -> TenantKey:
        everywhere = self.rights & {"admin", "metrics"}
        if everywhere and self.namespaces not in ((), (ALL,)):
            raise ValueError(f"{min(everywhere)} covers the whole server: give it without namespaces")
        if not self.namespaces and self.rights != {"metrics"}:
            raise ValueError("only a key for metrics alone has no namespaces")
        if self.is_admin and (self.labels or self.labels_header):
            raise ValueError("admin sees every document: give it without labels")
        return self

    @property
    def is_admin(self) -> bool:
        return "admin" in self.rights

    @property
    def expired(self) -> bool:
        return self.expires_at is not None and self.expires_at <= datetime.now(UTC)


class KeyTable(BaseModel):
    """The content of the file."""

    model_config = ConfigDict(extra="forbid")

    version: Literal[1] = 1
    hash_key: str = Field(default_factory=lambda: secrets.token_hex(_SECRET_BYTES), pattern="^[0-9a-f]{64}$")
    keys: list[TenantKey] = Field(default_factory=list)

    def digest(self, secret: bytes) -> str:
        """The keyed hash under which a secret is stored."""
        return hashlib.blake2b(secret, key=bytes.fromhex(self.hash_key), digest_size=32).hexdigest()


class KeyFile:
    """The keys of a data folder. Each change is atomic, durable and safe among processes."""

    def __init__(self, data_dir: Path) -> None:
        self.path = data_dir / KEYS_FILE

    def read(self) -> KeyTable:
        """Return the keys; none where there is no file.

        Raises Unavailable for a file that cannot be read, and for a link to none."""
        try:
            return KeyTable.model_validate_json(self.path.read_bytes())
        except (OSError, ValidationError) as error:
            hint = "Restore the file from a backup."
            if isinstance(error, FileNotFoundError):
                if not self.path.is_symlink():
                    return KeyTable()
                place = self.path.resolve()
                hint = f"It links to {place}, which is not there: mount its volume or restore it."
            raise Unavailable(
                f"The API keys in {self.path} cannot be read: {str(error).splitlines()[0]}.",
                hint=hint,
                code="keys_unreadable",
            ) from error

    def create(
        self,
        name: str,
        namespaces: Sequence[str],
        rights: Sequence[Right],
        *,
        expires_at: datetime | None = None,
        limits: KeyLimits | None = None,
        labels: Sequence[str] = (),
        labels_header: str | None = None,
    ) -> tuple[TenantKey, str]:
        """Add a key and return it with its secret, which is stored nowhere.

        Raises InvalidRequest for a wrong value, Conflict for a name that is taken, also as an id."""
        secret = _PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
        with self._changed() as table:
            taken = {each for key in table.keys for each in (key.key_id, key.name)}
            if name in taken:
                raise Conflict(
                    f"There is a key {name!r} already.", hint="Revoke it first, or choose another name."
                )
            try:
                key = TenantKey(
                    key_id=next(each for each in iter(_new_id, "") if each not in taken),
                    name=name,
                    digest=table.digest(secret.encode()),
                    namespaces=tuple(namespaces) or (() if set(rights) == {"metrics"} else (ALL,)),
                    rights=frozenset(rights),
                    created_at=datetime.now(UTC).replace(microsecond=0),
                    expires_at=expires_at,
                    limits=limits or KeyLimits(),
                    labels=tuple(sorted(set(labels))),
                    labels_header=labels_header,
                )
            except ValidationError as error:
                raise _invalid(error, "create") from None
            table.keys.append(key)
        return key, secret

    def relabel(self, name: str, add: Iterable[str], remove: Iterable[str]) -> TenantKey:
        """Give a key labels and take others from it, and return it.

        Raises NotFound, InvalidRequest, and Conflict as `revoke` does."""
        with self._changed() as table:
            found = _named(table, name)
            labels = tuple(sorted({*found.labels, *add}.difference(remove)))
            try:
                changed = TenantKey.model_validate(found.model_dump() | {"labels": labels})
            except ValidationError as error:
                raise _invalid(error, "label") from None
            table.keys[table.keys.index(found)] = changed
        return changed

    def revoke(self, name: str) -> TenantKey:
        """Remove a key, given its id or its name, and return it.

        Raises NotFound, and Conflict for one's id that is another's name."""
        with self._changed() as table:
            found = _named(table, name)
            table.keys.remove(found)
        return found

    @contextmanager
    def _changed(self) -> Iterator[KeyTable]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock = Path(os.path.realpath(self.path)).with_suffix(".lock")  # one for all links to a file
        with locked(lock, wait_s=_WAIT_S) as alone:
            if not alone:
                raise Unavailable("Another process is changing the API keys.", hint="Try again.")
            table = self.read()
            yield table
            # Even without a key left: a server without the file would be open to its machine.
            write_text(self.path, table.model_dump_json(indent=1) + "\n", durable=True, mode=0o600)


def _new_id() -> str:
    return secrets.token_hex(4)


def _named(table: KeyTable, name: str) -> TenantKey:
    """The key of an id or a name. Raises NotFound, and Conflict for one's id that is another's name."""
    found = [key for key in table.keys if name in (key.key_id, key.name)]
    if not found:
        raise NotFound(
            f"There is no key {name!r}.", hint="`ragserve keys list` shows them.", code="key_not_found"
        )
    if len(found) > 1:
        raise Conflict(
            f"{name!r} is a key's id and another's name.", hint="Give the one's name, or the other's id."
        )
    return found[0]


def _invalid(error: ValidationError, command: str) -> InvalidRequest:
    wrong = error.errors(include_url=False)[0]
    place = f"{wrong['loc'][0]}: " if wrong["loc"] else ""
    return InvalidRequest(
        f"{place}{wrong['msg'].removeprefix('Value error, ')}.", hint=f"See `ragserve keys {command} --help`."
    )
