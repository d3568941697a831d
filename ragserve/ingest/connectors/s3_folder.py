"""A folder in S3-compatible storage, by botocore, which finds credentials, region and endpoint as the AWS
command line does: ``AWS_*`` variables, profiles, roles. Without credentials requests are anonymous."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from ragserve.errors import InvalidRequest, NotFound, RagserveError, TooLarge, Unavailable
from ragserve.ingest.connectors.base import Limits, RemoteFile, RemoteFolder, too_large, write_blocks
from ragserve.ingest.connectors.source_addresses import S3Address
from ragserve.ingest.parsers.base import one_line

_CONNECT_S, _READ_S, _OBJECT_S = 10.0, 30.0, 300.0
_ATTEMPTS = 3
_BLOCK = 1 << 18  # bytes
_GONE = ("NoSuchKey", "404")
_ARCHIVED = "InvalidObjectState"


class S3Folder(RemoteFolder):
    """The objects below an address, or the one object of that key.

    Args:
        should_stop: Ends a listing or a download (``Unavailable``).
    """

    def __init__(self, address: S3Address, limits: Limits, should_stop: Callable[[], bool]) -> None:
        self._address = address
        self._limits = limits
        self._should_stop = should_stop
        with _explained(address):
            self._client = _client(address)

    def files(self) -> Iterator[RemoteFile]:
        """Raises ``NotFound`` where there is no object at all: a folder whose last object was removed is
        taken for a wrong address, not for an order to remove its documents."""
        folder = self._address.folder
        prefix = f"{folder}/" if folder else ""
        n = 0
        for entry in self._entries(prefix):
            key = str(entry["Key"])
            if key.endswith("/") and not entry.get("Size"):
                continue  # stands for a folder in consoles
            n += 1
            if n > self._limits.files:
                limit = f"{self._limits.files:,} objects (RAGSERVE_SOURCE_FILES)"
                raise TooLarge(f"{self._address} has more than {limit}.")
            yield self._file(entry, key.removeprefix(prefix))
        if not n and folder and (single := self._single(folder)):
            yield self._file(single, folder.rpartition("/")[2])
        elif not n:
            raise NotFound(f"There is no object in {self._address}.", hint="Check the bucket and the folder.")

    def expect(self, files: list[RemoteFile]) -> None:
        """Each object is fetched by itself."""

    def fetch(self, file: RemoteFile, path: Path) -> str:
        if file.size is not None and file.size > self._limits.file_bytes:
            raise too_large(file.size, self._limits)
        key = file.source.removeprefix(self._address.container)
        deadline = time.monotonic() + _OBJECT_S

        def check() -> None:
            if self._should_stop():
                raise Unavailable("interrupted", code="interrupted")
            if time.monotonic() > deadline:
                raise Unavailable(f"took longer than {_OBJECT_S:g} s to download")

        with _explained(self._address):
            answer = self._client.get_object(Bucket=self._address.bucket, Key=key)
            with closing(answer["Body"]) as body:
                blocks = iter(lambda: body.read(_BLOCK), b"")
                write_blocks(blocks, path, file.name.rpartition("/")[2], self._limits, check)
        return _version(answer, answer.get("ContentLength"))

    def close(self) -> None:
        self._client.close()

    def _file(self, entry: dict[str, Any], name: str) -> RemoteFile:
        size = entry.get("Size")
        return RemoteFile(self._address.container + str(entry["Key"]), name, _version(entry, size), size)

    def _entries(self, prefix: str, **options: Any) -> Iterator[dict[str, Any]]:
        more: dict[str, str] = {}
        while True:
            if self._should_stop():
                raise Unavailable("interrupted", code="interrupted")
            with _explained(self._address):
                page = self._client.list_objects_v2(
                    Bucket=self._address.bucket, Prefix=prefix, **options, **more
                )
            yield from page.get("Contents", ())
            if not page.get("IsTruncated"):
                return
            token = page.get("NextContinuationToken")
            if not token or token == more.get("ContinuationToken"):
                raise Unavailable(f"The listing of {self._address} breaks off: no token for its next page.")
            more = {"ContinuationToken": token}

    def _single(self, key: str) -> dict[str, Any] | None:
        """The object of this key: the first of all that begin with it."""
        first = next(self._entries(key, MaxKeys=1), None)
        return first if first is not None and first["Key"] == key else None


def _version(entry: dict[str, Any], size: int | None) -> str:
    """The ETag, which changes with the content, or where a storage has none the time of the last change."""
    tag = str(entry.get("ETag") or entry.get("LastModified")).strip('"')
    return f"{tag}:{size}"


def _client(address: S3Address) -> Any:
    try:
        import botocore.session
        from botocore import UNSIGNED
        from botocore.config import Config
    except ImportError as error:
        raise Unavailable(
            "S3 folders need the package botocore, which is not installed.",
            hint="pip install 'ragserve[s3]'.",
            code="no_botocore",
        ) from error
    session = botocore.session.Session(profile=address.profile or None)
    config = Config(
        connect_timeout=_CONNECT_S,
        read_timeout=_READ_S,
        retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
        user_agent_appid="ragserve",
        signature_version=None if session.get_credentials() else UNSIGNED,
    )
    region = session.get_config_variable("region") or "us-east-1"
    return session.create_client("s3", region_name=region, config=config)


@contextmanager
def _explained(address: S3Address) -> Iterator[None]:
    """Make the errors of botocore, and of the connections below it, those of ragserve."""
    try:
        yield
    except RagserveError:
        raise
    except Exception as error:
        if (said := _explanation(error, address)) is None:
            raise
        raise said from error


def _explanation(error: Exception, address: S3Address) -> RagserveError | None:
    from botocore import exceptions

    if isinstance(error, exceptions.ClientError):
        said = error.response.get("Error", {})
        code = one_line(str(said.get("Code", "")))[:80]
        text = f"{code}: {one_line(str(said.get('Message', '')))[:300]}"
        if code in _GONE:
            return NotFound(f"removed since the listing ({text})", code="object_gone")
        if code == _ARCHIVED:
            return Unavailable(f"archived: restore it first ({text})")
        return Unavailable(f"{address} answers {text}", code="s3_error")
    if isinstance(error, exceptions.ProfileNotFound):
        return InvalidRequest(f"The AWS configuration has no profile {address.profile!r}.")
    if isinstance(error, exceptions.BotoCoreError | exceptions.HTTPClientError):
        return Unavailable(
            f"{address} is not reachable: {type(error).__name__}: {one_line(str(error))[:300]}"
        )
    return None
