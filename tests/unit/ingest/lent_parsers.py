"""Parsing processes that one job of a test leaves to the next: starting one takes half a second of a core."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock
from typing import Any
from unittest import mock

from ragserve.ingest import ingestor, preview
from ragserve.ingest.parsing.parse_process import Failed, ParsedFile, ParseProcess, ParseRequest, Unchanged

_KEPT = 4  # processes that wait for a job
_taking = Lock()  # jobs run in several threads

Options = tuple[tuple[str, Hashable], ...]


class Process:
    """A `ParseProcess` and the thread that uses it. It ends with its thread, so that is not a job's."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.parser = ParseProcess(**dict(options))  # type: ignore[arg-type]
        self.temporary = tempfile.gettempdir()  # where attachments will wait
        self._thread = ThreadPoolExecutor(1)

    def parse(self, request: ParseRequest) -> ParsedFile | Unchanged | Failed:
        return self._thread.submit(self.parser.parse, request).result()

    def close(self) -> None:
        self.parser.interrupt()
        self._thread.submit(self.parser.close).result()
        self._thread.shutdown()


class LentParser:
    """What a job takes for a `ParseProcess`. The process ends only if it is interrupted while it parses."""

    def __init__(self, left: list[Process], temporary: str, **options: Any) -> None:
        self._left = left
        self._temporary = temporary
        self.timeout_s: float = options["timeout_s"]
        self._options: Options = tuple(sorted(options.items()))
        self._process: Process | None = None
        self._lock = Lock()
        self._parses = self._interrupted = self._ended = False

    def parse(self, request: ParseRequest) -> ParsedFile | Unchanged | Failed:
        with self._lock:
            if self._interrupted:
                return Failed("interrupted", "interrupted")
            self._parses = True
            process = self._process = self._process or self._taken(request)
        try:
            return process.parse(request)
        finally:
            with self._lock:
                self._parses = False

    def _taken(self, request: ParseRequest) -> Process:
        if not os.path.isabs(request.path):
            self._ended = True  # where the process was started matters
            return Process(self._options)
        with _taking:
            fitting = [each for each in self._left if each.options == self._options]
            if fitting:
                self._left.remove(fitting[0])
        return fitting[0] if fitting else Process(self._options)

    def interrupt(self) -> None:
        with self._lock:
            self._interrupted = True
            if self._parses and self._process is not None:
                self._ended = True
                self._process.parser.interrupt()

    def __enter__(self) -> LentParser:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._interrupted = True
        if self._process is None:
            return
        stays = self._process.temporary == self._temporary  # not a folder that goes with a command
        if self._ended or self._parses or not stays or len(self._left) >= _KEPT:
            self._process.close()
        else:
            self._left.append(self._process)


@contextmanager
def lent_parsers() -> Iterator[None]:
    """Lend processes to the jobs of every `Ingestor`."""
    left: list[Process] = []
    temporary = tempfile.gettempdir()

    def lent(**options: Any) -> LentParser:
        return LentParser(left, temporary, **options)

    with mock.patch.object(ingestor, "ParseProcess", lent), mock.patch.object(preview, "ParseProcess", lent):
        yield
    for process in left:
        process.close()
