"""The parent's side of the parsing process: one request at a time, a time limit, and a fresh process after a
crash or a hang.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from ragserve.errors import Unavailable
from ragserve_index.types import NewChunk

__all__ = ["Failed", "ParseProcess", "ParseRequest", "ParsedFile", "Unchanged"]

MEMORY_BYTES = 3 * 2**30
"""Address space of the parsing process: the largest upload as 4-byte text, parsed and cut, fits; a
decompression bomb does not.
"""

_START_S = 60.0  # imports and the tokenizer; seconds


@dataclass(frozen=True, slots=True)
class ParseRequest:
    """One file. ``salt`` is what else shapes the result (see `content_salt`); a file with ``known_hash`` is
    not parsed.
    """

    path: str
    filename: str
    ext: str
    salt: str
    known_hash: str | None = None
    url: str | None = None
    charset: str | None = None
    parser: str | None = None


@dataclass(frozen=True, slots=True)
class ParsedFile:
    hash: str
    size: int
    mime: str
    title: str
    metadata: Mapping[str, Any]
    chunks: Sequence[NewChunk] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Unchanged:
    hash: str
    size: int


@dataclass(frozen=True, slots=True)
class Failed:
    """``code`` is machine-readable: that of the error, or ``timeout``, ``crash``, ``memory``, ``unreadable``,
    ``parse_error``.
    """

    reason: str
    code: str


class ParseProcess:
    """Starts on the first ``parse`` and again after a failure that ended it. Used by one thread;
    ``interrupt`` may come from another.
    """

    def __init__(
        self,
        *,
        tokenizer_json: str,
        chunk_tokens: int,
        max_bytes: int,
        timeout_s: float,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        self._timeout_s = timeout_s
        self._config = {
            "tokenizer_json": tokenizer_json,
            "chunk_tokens": chunk_tokens,
            "max_bytes": max_bytes,
            "timeout_s": timeout_s,
            "memory_bytes": memory_bytes,
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._pending = b""
        self._interrupted = False

    @property
    def pid(self) -> int | None:
        """Of the running process, if there is one."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def parse(self, request: ParseRequest) -> ParsedFile | Unchanged | Failed:
        """Raises ``Unavailable`` where the process cannot be started at all; whatever a file does to it is
        ``Failed``.
        """
        if self._interrupted:
            return Failed("interrupted", "interrupted")
        if self.pid is None:
            self._start()
        try:
            self._send({name: getattr(request, name) for name in ParseRequest.__slots__})
            reply = self._receive(self._timeout_s)
        except _TimedOut:
            self._kill()
            return Failed(
                f"took longer than {self._timeout_s:g} s to parse (RAGSERVE_PARSE_TIMEOUT_S)", "timeout"
            )
        except (EOFError, BrokenPipeError):
            return Failed(f"the parser crashed on this file ({self._end()})", "crash")
        if "failed" in reply:
            return Failed(reply["failed"], reply["code"])
        if "unchanged" in reply:
            return Unchanged(reply["unchanged"], reply["size"])
        chunks = [NewChunk(*chunk) for chunk in reply["chunks"]]
        return ParsedFile(
            reply["hash"], reply["size"], reply["mime"], reply["title"], reply["metadata"], chunks
        )

    def interrupt(self) -> None:
        """For good, from another thread: the ``parse`` in progress and later ones return ``Failed``."""
        self._interrupted = True
        process = self._process
        if process is not None:
            process.kill()  # pipes and the zombie are left to the thread that reads them

    def close(self) -> None:
        """End the process."""
        self._kill()

    def __enter__(self) -> ParseProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        self._end()
        environment = {
            **os.environ,
            "TOKENIZERS_PARALLELISM": "false",
            "CHONKIE_LOG": "off",
            "PYTHONUNBUFFERED": "1",
        }
        self._process = subprocess.Popen(
            # -P: without it the working directory, which may be the folder of sources being ingested, comes
            # before the libraries
            [sys.executable, "-P", "-m", "ragserve.ingest.parsing.parse_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # libxml2 and PDFium complain there about every odd file
            env=environment,
            start_new_session=True,  # Ctrl-C goes to the parent, which ends this one in order
        )
        self._pending = b""
        try:
            self._send(self._config)
            self._receive(_START_S)
        except (_TimedOut, EOFError, BrokenPipeError) as error:
            raise Unavailable(
                f"The parsing process did not start ({self._kill() or type(error).__name__}).",
                hint="Run `python -P -m ragserve.ingest.parsing.parse_worker </dev/null` to see why, and `ragserve doctor`.",
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
                    raise _TimedOut
                piece = os.read(process.stdout.fileno(), 1 << 20)
                if not piece:
                    raise EOFError
                head, newline, rest = piece.partition(b"\n")
                parts.append(head)
                if newline:
                    self._pending = rest
                    reply: dict[str, Any] = json.loads(b"".join(parts))
                    return reply

    def _kill(self) -> str:
        if self._process is not None:
            self._process.kill()
        return self._end()

    def _end(self) -> str:
        """Reap the process; how it ended, in words."""
        process, self._process = self._process, None
        if process is None:
            return ""
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue  # an unsent request to a process that is gone
        code = process.wait()
        if code < 0:
            return signal.Signals(-code).name
        return f"exit status {code}"


class _TimedOut(Exception):
    """Internal: the reply did not come in time."""
