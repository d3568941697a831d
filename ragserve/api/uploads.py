"""Multipart bodies: spool files to disk as they arrive, each within its limit."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

from fastapi import Request
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.types import Message

from ragserve.api.body import drain, parse_json
from ragserve.errors import InvalidRequest, StorageFull, TooLarge

_FILE_FIELDS = {"files", "file"}
_TEXT_FIELDS = {"namespace", "metadata", "labels", "warm", "prechunked", "chunk_tokens", "limit"}
_JSON_FIELDS = _TEXT_FIELDS - {"namespace"}
_MAX_FIELD_BYTES = 64 * 2**10


@asynccontextmanager
async def upload_form(
    request: Request, *, max_files: int, max_file_bytes: int
) -> AsyncIterator[tuple[list[UploadFile], dict[str, Any]]]:
    """Parse a request's form into its files, open during the block, and its text fields, JSON ones parsed.

    Raises TooLarge for a file over its limit, InvalidRequest if malformed, StorageFull if there is no
    room for it."""
    complete = False

    async def receive() -> Message:
        nonlocal complete
        message = await request.receive()
        complete = not message.get("more_body", False)
        return message

    try:
        async with aclosing(Request(request.scope, receive).stream()) as stream:
            parser = _Parser(
                request.headers,
                stream,
                max_files=max_files,
                max_fields=len(_TEXT_FIELDS),
                max_part_size=_MAX_FIELD_BYTES,
            )
            parser.max_file_bytes = max_file_bytes
            form = await parser.parse()
    except (TooLarge, MultiPartException, OSError) as error:
        if not complete:  # else the client may see a reset connection in place of the error
            await drain(receive)
        if isinstance(error, MultiPartException):
            raise InvalidRequest(
                f"The form is malformed: {error.message}",
                hint=f"At most {max_files} files in fields 'files'.",
            ) from None
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(
                "The server has no room for uploads.",
                hint="Free space on the disk of its temporary files (TMPDIR), then retry.",
            ) from error
        raise
    try:
        yield await _sorted(form)
    finally:
        await form.close()


async def _sorted(form: FormData) -> tuple[list[UploadFile], dict[str, Any]]:
    files: list[UploadFile] = []
    fields: dict[str, Any] = {}
    for name, value in form.multi_items():
        if name in _FILE_FIELDS and not isinstance(value, str):
            if not value.filename:
                raise InvalidRequest(
                    "A file has no name.",
                    hint="Give each file a filename; its ending helps to read it.",
                    param=name,
                )
            files.append(value)
        elif name in _TEXT_FIELDS and isinstance(value, str):
            fields[name] = await parse_json(value.encode()) if name in _JSON_FIELDS else value
        else:
            raise InvalidRequest(
                f"The form has a field {name[:64]!r} that is unknown or of the wrong kind.",
                hint="Files go into 'files'; 'namespace' is text, all others are JSON: 'metadata' an object, "
                "'labels' a list, 'warm' and 'prechunked' true or false.",
                param=name[:64],
            )
    if not files:
        raise InvalidRequest(
            "The form holds no file.",
            hint="Send files in fields named 'files', e.g. curl -F files=@a.pdf.",
            param="files",
        )
    return files, fields


class _Parser(MultiPartParser):
    """Counts the bytes of each file while they arrive."""

    max_file_bytes = 0
    _size = 0

    def on_part_begin(self) -> None:
        self._size = 0
        super().on_part_begin()

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        file = self._current_part.file
        if file is not None:
            self._size += end - start
            if self._size > self.max_file_bytes:
                raise TooLarge(
                    f"The file {file.filename!r} is over {self.max_file_bytes:,} bytes.",
                    hint="Split it, or raise max_upload_bytes.",
                    param="files",
                )
        super().on_part_data(data, start, end)
