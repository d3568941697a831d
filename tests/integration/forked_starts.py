"""Servers of tests that are forked, and whose engine's processes are: what is imported is imported once
(`fork_parent`, `forked_main`)."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO
from unittest import mock

import torch

from ragserve.engine import running_server as server
from ragserve.engine.running_server import RunningServer
from tests.conftest import REPO

DTYPE = "bfloat16" if torch.cuda.is_available() else "float32"  # SGLang's norms on GPUs have no float32


@contextlib.contextmanager
def forked_server(**options: Any) -> Iterator[RunningServer]:
    """`running_server`, for tests that do not ask how processes are started. With an accelerator they are
    spawned, as in production, and so are those that import from another PYTHONPATH than the fork parent has.
    It computes in `DTYPE`: in float32 answers can be compared with references on every CPU.
    RAGSERVE_ATTENTION names its attention backend where SGLang's default lacks its library. On a GPU it
    captures few CUDA graphs: all of SGLang's sizes take minutes."""
    options = {"dtype": DTYPE} | options
    if attention := os.environ.get("RAGSERVE_ATTENTION"):
        engine_args = json.loads(options.get("engine_args", "{}"))
        graphs = {"cuda_graph_max_bs_decode": 4, "disable_prefill_cuda_graph": True}
        options["engine_args"] = json.dumps({"attention_backend": attention} | graphs | engine_args)
    with contextlib.ExitStack() as stack:
        env = options.get("env") or {}
        if spawned := torch.cuda.is_available() or "PYTHONPATH" in env:
            options["env"] = {"PYTHONPATH": os.pathsep.join([str(REPO), *sys.path])} | env
        with mock.patch.object(server, "spawn", server.spawn if spawned else _forking):
            running = stack.enter_context(server.running_server(**options))
        yield running


def _forking(command: Sequence[str], output: BinaryIO, env: Mapping[str, str], *, outlive: bool) -> Forked:
    assert not outlive, "it ends with the fork parent"
    assert list(command[:3]) == [sys.executable, "-m", "ragserve.cli"]
    return fork_parent().start("tests.integration.forked_main", command[3:], env, output)


class Forked:
    """What `subprocess.Popen` is for a child of its own, for one of the fork parent, which writes to the pipe
    ``ended`` how it has ended."""

    def __init__(self, command: Sequence[str], pid: int, ended: int) -> None:
        self.args, self.pid, self.returncode = command, pid, None
        self._ended = ended

    def poll(self) -> int | None:
        return self._code(0)

    def wait(self, timeout: float | None = None) -> int:
        if (code := self._code(timeout)) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _code(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._ended], [], [], timeout)[0]:
            self.returncode = int(os.read(self._ended, 16) or -signal.SIGKILL)
            os.close(self._ended)
        return self.returncode


class ForkParent:
    """The process that is forked: that at the other end of ``sock``, or one of its own, which ends with
    this one."""

    def __init__(self, sock: socket.socket | None = None) -> None:
        self._process = None
        self._socket = sock or self._started()

    def _started(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            program = [sys.executable, "-m", "tests.integration.fork_parent"]
            self._process = subprocess.Popen(
                [*program, str(theirs.fileno()), str(os.getpid())],
                cwd=REPO,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        return ours

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        env: Mapping[str, str],
        output: BinaryIO | socket.socket,
        errors: BinaryIO | None = None,
    ) -> Forked:
        """Run a module as a program with this environment added, in a session of its own. ``errors``: where
        they go if not to the ``output``."""
        env = {**os.environ, **env}
        env["PYTHONPATH"] = os.pathsep.join([str(REPO), *filter(None, [env.get("PYTHONPATH")])])
        request = {"module": module, "arguments": list(arguments), "env": env, "cwd": os.getcwd()}
        ended, reported = os.pipe()
        descriptors = [output.fileno(), (errors or output).fileno(), reported]
        socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
        os.close(reported)
        return Forked([module, *arguments], int(self._socket.recv(16)), ended)

    def end(self) -> None:
        self._socket.close()
        if self._process is not None:
            self._process.wait()


_parents: list[ForkParent] = []


def ask(sock: socket.socket) -> None:
    """Have servers of this process forked by the process at the other end, see `fork_parent.serve`."""
    _parents.append(ForkParent(sock))


def fork_parent() -> ForkParent:
    """The one of this process."""
    if not _parents:
        _parents.append(ForkParent())
    return _parents[0]


def start_module(
    module: str,
    arguments: Sequence[str],
    env: Mapping[str, str],
    output: BinaryIO | socket.socket,
    errors: BinaryIO,
) -> Forked | subprocess.Popen[bytes]:
    """Run a module as a program in the project's folder: forked, with what is imported, if
    `scripts/test` runs it and no other PYTHONPATH is given."""
    with contextlib.chdir(REPO):
        if _parents and "PYTHONPATH" not in env:
            return _parents[0].start(module, arguments, env, output, errors)
        command = [sys.executable, "-m", module, *arguments]
        return subprocess.Popen(command, stdout=output, stderr=errors, env={**os.environ, **env})


def run_module(
    module: str, *arguments: str, timeout: float, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a module as `start_module` does, and wait for it."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = start_module(module, arguments, env or {}, output, errors)
        try:
            code = process.wait(timeout)
        finally:
            process.send_signal(signal.SIGKILL)
        said = []
        for each in (output, errors):
            each.seek(0)
            said.append(each.read().decode())
    return subprocess.CompletedProcess([module, *arguments], code, *said)


def end_fork_parent() -> None:
    """At the end of the session, if there is one."""
    while _parents:
        _parents.pop().end()
