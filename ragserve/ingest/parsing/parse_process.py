"""The parent's side of the parsing process: one request at a time, time limits, restarts after failures."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from ragserve.config import Settings
from ragserve.errors import Unavailable
from ragserve.ingest.tokenizer import TokenizerSource
from ragserve_index.types import NewChunk

MEMORY_BYTES = 3 * 2**30
"""Address space of the parsing process. The largest upload fits as 4-byte text, parsed and cut; a
decompression bomb does not.
"""

OCR_MEMORY_BYTES = 16 * 2**30
"""The same with OCR, whose models and libraries are mapped into it."""

INTERRUPTED = "interrupted"
"""Code of a file that was not taken to its end, because the run was stopped."""

_START_S = 60.0  # seconds for imports and the tokenizer


@dataclass(frozen=True, slots=True)
class ParseRequest:
    """A file to parse, unless its hash is ``known_hash``. ``salt`` enters the hash (see `content_salt`).
    ``version``: what the hash is made of instead of the file's bytes. ``attachments``: those of a message are
    wanted, too."""

    path: str
    filename: str
    ext: str
    salt: str
    known_hash: str | None = None
    url: str | None = None
    charset: str | None = None
    parser: str | None = None
    version: str | None = None
    attachments: bool = True


class AttachedFile(NamedTuple):
    """An attachment that waits in a file to be parsed. ``name`` is that within the message."""

    path: str
    name: str
    charset: str | None


@dataclass(frozen=True, slots=True)
class ParsedFile:
    """A parsed and chunked file. ``size`` is in bytes; ``note`` is for the job's report. Who takes
    ``attachments`` removes their files."""

    filename: str
    ext: str
    hash: str
    size: int
    mime: str
    title: str
    metadata: Mapping[str, Any]
    chunks: Sequence[NewChunk] = field(repr=False)
    note: str = ""
    attachments: Sequence[AttachedFile] = ()


@dataclass(frozen=True, slots=True)
class Unchanged:
    """A file that has its known hash. ``size`` is in bytes."""

    hash: str
    size: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A file that could not be parsed.

    ``code`` is that of the error, or ``timeout``, ``crash``, ``memory``, ``unreadable``, ``parse_error``.
    """

    reason: str
    code: str


def parsing_options(settings: Settings, tokenizer: TokenizerSource) -> dict[str, Any]:
    """The arguments of a `ParseProcess` that parses as ``settings`` say."""
    return {
        "tokenizer_json": tokenizer.json,
        "chunk_tokens": settings.chunk_tokens,
        "max_bytes": settings.max_upload_bytes,
        "timeout_s": settings.parse_timeout_s,
        "ocr": settings.ocr == "docling",
        "hidden": settings.ingest_hidden,
        "comments": settings.ingest_comments,
    }


class ParseProcess:
    """Starts on the first ``parse``, and again after a failure that ended it.

    Used by one thread; ``interrupt`` may be called from another.
    """

    def __init__(
        self,
        *,
        tokenizer_json: str,
        chunk_tokens: int,
        max_bytes: int,
        timeout_s: float,
        memory_bytes: int | None = None,
        ocr: bool = False,
        hidden: bool = False,
        comments: bool = True,
    ) -> None:
        self.timeout_s = timeout_s
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._ocr = ocr
        self._config = {
            "tokenizer_json": tokenizer_json,
            "chunk_tokens": chunk_tokens,
            "max_bytes": max_bytes,
            "timeout_s": timeout_s,
            "memory_bytes": memory_bytes or (OCR_MEMORY_BYTES if ocr else MEMORY_BYTES),
            "ocr": ocr,
            "hidden": hidden,
            "comments": comments,
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._pending = b""
        self._interrupted = False

    @property
    def pid(self) -> int | None:
        """Process id, or None if the process is not running."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def parse(self, request: ParseRequest) -> ParsedFile | Unchanged | Failed:
        """Parse one file. Whatever the file does to the process is ``Failed``.

        Raises ``Unavailable`` if the process cannot be started at all, and ``OSError`` if attachments cannot
        be stored.
        """
        if self._interrupted:
            return Failed("interrupted", INTERRUPTED)
        if self.pid is None:
            self._start()
        waiting = set(os.listdir(self._attachments()))
        result: ParsedFile | Unchanged | Failed | None = None
        try:
            result = self._parsed(request)
        finally:
            if not isinstance(result, ParsedFile):  # nobody gets those that were stored
                for file in set(os.listdir(self._attachments())) - waiting:
                    os.unlink(os.path.join(self._attachments(), file))
        return result

    def _parsed(self, request: ParseRequest) -> ParsedFile | Unchanged | Failed:
        try:
            self._send(asdict(request))
            reply = self._receive(self.timeout_s)
        except TimeoutError:
            self._end()
            reason = f"took longer than {self.timeout_s:g} s to parse (RAGSERVE_PARSE_TIMEOUT_S)"
            return Failed(reason, "timeout")
        except (EOFError, BrokenPipeError):
            return Failed(f"the parser crashed on this file ({self._reap()})", "crash")
        if "not_stored" in reply:
            raise OSError(*reply["not_stored"])
        if "failed" in reply:
            return Failed(reply["failed"], reply["code"])
        if "unchanged" in reply:
            return Unchanged(reply["unchanged"], reply["size"])
        reply["chunks"] = [NewChunk(*chunk) for chunk in reply["chunks"]]
        folder = self._attachments()
        reply["attachments"] = [
            AttachedFile(os.path.join(folder, os.path.basename(file)), name, charset)
            for file, name, charset in reply["attachments"]
        ]
        return ParsedFile(request.filename, request.ext, **reply)

    def interrupt(self) -> None:
        """Make the ``parse`` in progress and all later ones return ``Failed``. Callable from any thread."""
        self._interrupted = True
        process = self._process
        if process is not None:
            process.kill()  # the thread that reads from it closes the pipes and reaps it

    def close(self) -> None:
        """End the process, and remove what waits to be parsed."""
        self._end()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _end(self) -> str:
        """End the process and return how it ended, empty if there was none."""
        if self._process is not None:
            self._process.kill()
        return self._reap()

    def __enter__(self) -> ParseProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _attachments(self) -> str:
        """The folder that attachments wait in; it is removed with this object."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="ragserve-attached-")
        return self._folder.name

    def _start(self) -> None:
        self._reap()
        extra = {"TOKENIZERS_PARALLELISM": "false", "CHONKIE_LOG": "off", "PYTHONUNBUFFERED": "1"}
        if self._ocr:
            extra["CUDA_VISIBLE_DEVICES"] = ""  # its driver maps more memory than the limit
        self._process = subprocess.Popen(
            # -P keeps the working directory, which may hold the files being ingested, out of sys.path
            [sys.executable, "-P", "-m", "ragserve.ingest.parsing.parse_worker", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # libxml2 and PDFium complain about every odd file
            env=os.environ | extra,
            start_new_session=True,  # Ctrl-C goes to the parent, which ends this process
        )
        self._pending = b""
        try:
            self._send(self._config | {"attachments": self._attachments()})
            self._receive(_START_S)
        except (TimeoutError, EOFError, BrokenPipeError) as error:
            raise Unavailable(
                f"The parsing process did not start ({self._end() or type(error).__name__}).",
                hint="To see why, run `python -P -m ragserve.ingest.parsing.parse_worker </dev/null`.",
            ) from error

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._process is None or self._process.stdin is None:
            raise EOFError
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        process = self._process
        if process is None or process.stdout is None:
            raise EOFError
        deadline = time.monotonic() + timeout_s
        parts = [self._pending]
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while True:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                piece = os.read(process.stdout.fileno(), 1 << 20)
                if not piece:
                    raise EOFError
                head, newline, self._pending = piece.partition(b"\n")
                parts.append(head)
                if newline:
                    return dict(json.loads(b"".join(parts)))

    def _reap(self) -> str:
        """Wait for the process to exit and return how it ended, empty if there was none."""
        process, self._process = self._process, None
        if process is None:
            return ""
        for pipe in filter(None, (process.stdin, process.stdout)):
            with suppress(BrokenPipeError):  # an unsent request to a process that is gone
                pipe.close()
        code = process.wait()
        return signal.Signals(-code).name if code < 0 else f"exit status {code}"
