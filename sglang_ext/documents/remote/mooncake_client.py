"""This process's side of `mooncake_process`: requests with a deadline each."""

from __future__ import annotations

import json
import logging
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from sglang_ext.documents.remote.mooncake_process import AWAY
from sglang_ext.documents.remote.remote_backend import StoreAway
from sglang_ext.documents.remote.remote_options import mooncake_options

log = logging.getLogger(__name__)
ABSENT, LEASED = -704, -706  # Mooncake's codes
_MEMORY_BYTES = 16 * 2**20  # shared with the process, at least one page
_START_S = 60.0
_CALL_S = 10.0  # Mooncake gives a master that is away 4.5 s


class MooncakeClient:
    """Values in Mooncake Store. Thread-safe, one call at a time; every method raises StoreAway."""

    def __init__(self, options: Mapping[str, Any], page_bytes: int) -> None:
        """``page_bytes``: size of every page. Raises ValueError for wrong options."""
        self._options = mooncake_options(options)
        self.address = str(self._options["master_server_address"])
        self._page_bytes = page_bytes
        self._batch = max(1, _MEMORY_BYTES // page_bytes)
        size = -(-self._batch * page_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._descriptor = os.memfd_create("ragserve-mooncake")
        os.ftruncate(self._descriptor, size)
        self._memory = mmap.mmap(self._descriptor, size)
        self._pages = torch.frombuffer(self._memory, dtype=torch.uint8)[: self._batch * page_bytes]
        self._pages = self._pages.view(self._batch, page_bytes)
        self._size = size
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._link: Connection | None = None
        self._sent = self._answered = 0
        self._closed = False

    def check(self) -> None:
        """Return if the master answers."""
        with self._lock:
            _answer(self._call("check"), "asking")

    def get(self, name: str) -> bytes | None:
        """A value; None where there is none."""
        with self._lock:
            code, data = self._call("get", name)
        _answer(min(code, 0), "reading")
        return data if code == 1 else None

    def put(self, name: str, data: bytes) -> bool:
        """Store a value, in place of another; False where there is no room."""
        with self._lock:
            return _stored([self._call("put", name, data)])

    def get_pages(self, names: Sequence[str], targets: Sequence[torch.Tensor]) -> bool:
        """Fill the targets, uint8 [page_bytes]; False where one is not there."""
        for at in range(0, len(names), self._batch):
            part = list(names[at : at + self._batch])
            with self._lock:
                sizes = self._call("get_pages", part, self._page_bytes)
                if any(size != self._page_bytes for size in sizes):
                    _answer(next((code for code in sizes if _is_away(code)), 0), "reading")
                    return False
                for page, target in zip(self._pages, targets[at : at + self._batch], strict=False):
                    target.copy_(page)
        return True

    def put_pages(self, names: Sequence[str], pages: Sequence[torch.Tensor]) -> bool:
        """Store pages; False where there is no room for all."""
        for at in range(0, len(names), self._batch):
            part = list(names[at : at + self._batch])
            with self._lock:
                self._ready()
                for page, source in zip(self._pages, pages[at : at + self._batch], strict=False):
                    page.copy_(source)
                if not _stored(self._call("put_pages", part, self._page_bytes)):
                    return False
        return True

    def remove(self, names: Sequence[str]) -> None:
        """Delete values. None of them is in the store when this returns."""
        with self._lock:
            codes = self._call("remove", list(names))
        for code in codes:
            if code not in (0, ABSENT):
                reason = "it is being read or moved" if code == LEASED else f"code {code}"
                raise StoreAway(f"removing from Mooncake at {self.address}: {reason}")

    def remove_matching(self, prefix: str) -> None:
        """Delete all values whose names begin with ``prefix``."""
        with self._lock:
            _answer(self._call("remove_matching", "^" + prefix.replace(".", r"\.")), "removing")

    def close(self) -> None:
        """End the process. What it gave to the store is gone with it."""
        with self._lock:
            self._closed = True
            self._end(grace_s=5.0)

    def _call(self, operation: str, *arguments: Any) -> Any:
        """Run an operation. Requires the lock."""
        link = self._ready()
        try:
            self._sent += 1
            link.send((self._sent, operation, arguments))
            return self._reply(link, time.monotonic() + _CALL_S)
        except (EOFError, OSError) as error:
            if not isinstance(error, StoreAway):
                self._end(grace_s=0.0)
                raise StoreAway(f"the process of Mooncake's client has ended: {error!r}") from error
            raise

    def _ready(self) -> Connection:
        """The connection to a process that waits for a request: one that has not answered yet may still write
        into the shared memory."""
        if self._closed:
            raise StoreAway("the store is closed")
        if self._link is None:
            self._link = self._start()
        if self._answered < self._sent:
            try:
                self._reply(self._link, time.monotonic())
            except EOFError as error:
                self._end(grace_s=0.0)
                raise StoreAway("the process of Mooncake's client has ended") from error
        return self._link

    def _reply(self, link: Connection, until: float) -> Any:
        """The answer to the last request. Raises StoreAway when it does not come in time."""
        while self._answered < self._sent:
            if not link.poll(max(0.0, until - time.monotonic())):
                raise StoreAway(f"Mooncake at {self.address} does not answer")
            self._answered, answer = link.recv()
        return answer

    def _start(self) -> Connection:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "sglang_ext.documents.remote.mooncake_process"]
            given = [str(theirs.fileno()), str(self._descriptor), str(self._size), json.dumps(self._options)]
            quiet = {"GLOG_minloglevel": "2", "MC_LOG_LEVEL": "ERROR"}
            self._process = subprocess.Popen(
                [*command, *given],
                pass_fds=(theirs.fileno(), self._descriptor),
                env=quiet | dict(os.environ) | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=None if log.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL,
            )
        link = Connection(ours.detach())
        self._sent = self._answered = 0
        if not link.poll(_START_S):
            self._end(grace_s=0.0)
            raise StoreAway("the process of Mooncake's client does not start")
        try:
            _, reason = link.recv()
        except EOFError:
            reason = "it ended at once"
        if reason:
            link.close()
            self._end(grace_s=1.0)
            raise StoreAway(f"Mooncake's client does not start: {reason}")
        return link

    def _end(self, grace_s: float) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_away(code: int) -> bool:
    """True for codes of a master that cannot be reached; others say that a value cannot be had."""
    return code <= -900


def _answer(code: int, action: str) -> None:
    if code == AWAY:
        raise StoreAway("nothing listens at the address of Mooncake's master")
    if code < 0 and code != ABSENT:
        raise StoreAway(f"{action}: Mooncake answered with code {code}")


def _stored(codes: Sequence[int]) -> bool:
    if any(_is_away(code) for code in codes):
        _answer(min(codes), "storing")
    return not any(codes)
