"""Start a real `ragserve serve` in its own process, for benchmarks, evaluations and tests."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import httpx

from ragserve.children import end_with_parent
from ragserve.config import SECRETS
from ragserve.engine.ports import LOOPBACK, hold_port, port_of
from ragserve.errors import Unavailable

START_TIMEOUT_S = 300
_NOTHING_SHARED = {"REGISTRY_URL": "", "KV_STORAGE": "file"}  # also where ragserve.toml names them
STOP_TIMEOUT_S = 30


@dataclass
class RunningServer:
    """A server that is ready; its output goes to the file ``log``."""

    url: str
    data_dir: Path
    process: subprocess.Popen[bytes]
    log: Path
    start_s: float
    api_key: str | None = None
    detached: bool = False  # set it to leave a server started with ``outlive`` running when the block ends

    def client(self, **options: Any) -> httpx.Client:
        """An HTTP client for it, with its API key."""
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return httpx.Client(
            base_url=self.url, headers=headers, timeout=options.pop("timeout", 300), **options
        )

    def check(self) -> None:
        """Raise Unavailable, with the end of the log, if its process has ended: it will not answer again."""
        code = self.process.poll()
        if code is not None:
            message = f"The server exited with {code}:\n{_tail(self.log)}"
            raise Unavailable(message) from ChildProcessError(code)

    def resident_bytes(self) -> int:
        """Resident memory of all its processes. What they share counts once: forks share what they import."""
        import psutil

        parent = psutil.Process(self.process.pid)
        return sum(p.memory_full_info().pss for p in [parent, *parent.children(recursive=True)])

    def cpu_seconds(self) -> float:
        """CPU time of all its processes so far, user and system. Processes that have ended do not count."""
        import psutil

        parent = psutil.Process(self.process.pid)
        times = [p.cpu_times() for p in [parent, *parent.children(recursive=True)]]
        return float(sum(each.user + each.system for each in times))


@contextlib.contextmanager
def running_server(
    *,
    data_dir: Path | None = None,
    env: dict[str, str] | None = None,
    outlive: bool = False,
    worker: bool = False,
    **flags: Any,
) -> Iterator[RunningServer]:
    """Start `ragserve serve` (``--worker``) with the settings ``flags`` (``port=0``: a free one), wait until
    /ready, and stop it at the end of the block. It listens on loopback, verifies nothing by itself and keeps
    no questions unless ``flags`` say so. Without a ``data_dir`` it has an empty one, and shares neither a
    registry nor a store of documents' KV with other servers.

    The server is killed when the thread that started it ends, for instance by a kill, unless ``outlive``.
    Raises Unavailable: with the end of the log if the server does not come up, and if it needs a key that it
    was not given."""
    with contextlib.ExitStack() as stack:
        env = env or {}
        if data_dir is None:
            env = {f"RAGSERVE_{name}": value for name, value in _NOTHING_SHARED.items()} | env
            data_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ragserve-")))
        data_dir.mkdir(parents=True, exist_ok=True)
        port = port_of(stack.enter_context(hold_port(port=flags.pop("port", 0))))
        log = data_dir / f"server-{port}.log"
        own = {"host": LOOPBACK, "idle_tuning": False, "verify_share": 0, "query_log_bytes": 0}
        given = {name: value for name, value in flags.items() if value is not None}
        options = {"data_dir": data_dir, "port": port, **own, **given}
        # every user of the machine may read a command line
        env = env | {f"RAGSERVE_{name.upper()}": str(options.pop(name)) for name in SECRETS & options.keys()}
        command = [sys.executable, "-m", "ragserve.cli", "serve", *(["--worker"] if worker else [])]
        for name, value in options.items():
            command += ["--" + name.replace("_", "-"), str(value)]
        started = time.monotonic()
        output = stack.enter_context(log.open("wb"))
        process = spawn(command, output, env, outlive=outlive)
        api_key = (os.environ | env).get("RAGSERVE_API_KEY")
        server = RunningServer(f"http://{LOOPBACK}:{port}", data_dir, process, log, 0.0, api_key)
        stack.callback(_stop, server)
        _wait_ready(server)
        server.start_s = time.monotonic() - started
        yield server


def spawn(
    command: Sequence[str], output: BinaryIO, env: Mapping[str, str], *, outlive: bool = False
) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own; it is killed when the thread that started it ends, unless
    ``outlive``."""
    return subprocess.Popen(
        command,
        stdout=output,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **env},
        start_new_session=True,
        preexec_fn=None if outlive else partial(end_with_parent, os.getpid()),
    )


def kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill a command of :func:`spawn` with all processes that it started, and wait for it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait_ready(server: RunningServer) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    with server.client(timeout=5) as client:
        while time.monotonic() < deadline:
            server.check()
            with contextlib.suppress(httpx.HTTPError):
                status = client.get("/ready").status_code
                if status == httpx.codes.OK:
                    return
                if status == httpx.codes.UNAUTHORIZED:
                    raise Unavailable(
                        "The server that was started needs a key.", hint="Set RAGSERVE_API_KEY."
                    )
            time.sleep(0.1)
    raise Unavailable(f"The server was not ready within {START_TIMEOUT_S} s:\n{_tail(server.log)}")


def _tail(log: Path, size: int = 4000) -> str:
    return log.read_bytes()[-size:].decode("utf-8", "replace")


def _stop(server: RunningServer) -> None:
    """Send SIGTERM, so that the server saves its state, then SIGKILL to its session, so that no engine
    process is left."""
    if server.detached:
        return
    process = server.process
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
    kill_session(process)
    server.log.unlink(missing_ok=True)
