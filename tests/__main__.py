"""`scripts/check` and all tests, in groups side by side, as `scripts/test` runs them: ``python -m tests``.

Importing torch, SGLang and what else tests import takes as long as hundreds of tests. This process does it
once and is forked for each group, and before that for the parents of the servers that tests start. It has no
threads, so forks miss none. Its children end with it.
"""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import socket
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from typing import BinaryIO

from ragserve.children import end_with_parent
from sglang_ext.sglang_internals.imports import collect_again
from tests.environment import set_environment
from tests.groups import Group, groups

SIDE_BY_SIDE = 4
"""More than cores: groups with engines wait a good part of their time."""
MODULES = (
    "sglang.srt.layers.quantization",
    "sglang.srt.layers.radix_attention",
    "sglang.srt.managers.schedule_policy",
    "sglang.srt.mem_cache.radix_cache",
    "sglang.srt.model_executor.forward_batch_info",
    "sglang.srt.server_args",
    "faiss",
    "hypothesis.strategies",
    "tantivy",
)
"""What several groups import, besides what servers do. Nothing of ours: kernels are tested in Triton's
interpreter, which they learn when they are imported."""


@dataclass(frozen=True)
class Servers:
    """A process that is forked for each server and each program of a group, and the socket by which to ask
    it."""

    parent: int
    socket: socket.socket


@dataclass
class Running:
    """A group that has been started."""

    group: Group
    output: BinaryIO
    began: float
    servers: Servers | None


def main() -> int:
    """Return 0 if nothing failed."""
    set_environment()
    from tests.integration import fork_parent

    fork_parent.import_modules()
    to_run = groups()
    servers: dict[str, Servers] = {}
    for engines in (True, False):  # those of engines import SGLang in their own environment
        if not engines:
            _import()
        for group in to_run:
            if group.paths and group.engines == engines:
                servers[group.name] = _fork_servers(list(servers.values()))
    parent, running, failed = os.getpid(), dict[int, Running](), []
    seconds: dict[int, float] = {}
    while to_run or running:
        while to_run and len(running) < SIDE_BY_SIDE:
            group = to_run.pop(0)
            output = tempfile.TemporaryFile()  # noqa: SIM115 - its child's, too
            each = Running(group, output, time.monotonic(), servers.pop(group.name, None))
            if not (pid := os.fork()):
                end_with_parent(parent)
                return _run(each, list(servers.values()))
            running[pid] = each
            if each.servers is not None:
                each.servers.socket.close()  # or its parent would not end with the group
        pid, status = _wait(-1, seconds)
        if (ended := running.pop(pid, None)) is None:
            continue
        if ended.servers is not None:
            if ended.servers.parent not in seconds:
                _wait(ended.servers.parent, seconds)
            seconds[pid] += seconds[ended.servers.parent]
        took = f"{time.monotonic() - ended.began:.0f} s, {seconds[pid]:.0f} CPU seconds"
        _say(f"{ended.group.name}: {'failed' if status else 'passed'} in {took}")
        failed += [ended.group.name] * bool(status)
        ended.output.seek(0)
        shutil.copyfileobj(ended.output, sys.stdout.buffer)
        sys.stdout.flush()
    _say(f"failed: {', '.join(failed)}" if failed else "all passed")
    return bool(failed)


def _wait(child: int, seconds: dict[int, float]) -> tuple[int, int]:
    """Wait for a child, or for any; return it and its status, and note how much CPU time it took with its
    own children."""
    pid, status, used = os.wait4(child, 0)
    seconds[pid] = used.ru_utime + used.ru_stime
    return pid, status


def _say(line: str) -> None:
    print(f"[tests] {line}", flush=True)


def _fork_servers(others: list[Servers]) -> Servers:
    """Start a parent of servers, for `tests.integration.forked_starts`."""
    from tests.integration.fork_parent import serve

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if not (pid := os.fork()):
        end_with_parent(parent)
        for sock in (ours, *(each.socket for each in others)):
            sock.close()
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        serve(theirs)
        sys.exit()
    theirs.close()
    return Servers(pid, ours)


def _import() -> None:
    gc.disable()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in MODULES:
            importlib.import_module(name)
    collect_again()


def _run(each: Running, not_its: list[Servers]) -> int:
    for other in not_its:
        other.socket.close()
    for stream in (1, 2):
        os.dup2(each.output.fileno(), stream)
    if not each.group.paths:
        os.execv("scripts/check", ["scripts/check"])
    if each.servers is not None:
        from tests.integration import forked_starts

        forked_starts.ask(each.servers.socket)
    import pytest

    sys.argv = ["pytest", *each.group.arguments]
    return int(pytest.main(each.group.arguments))


if __name__ == "__main__":
    sys.exit(main())
