"""A server of one's own for the length of an evaluation."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx

from ragserve.errors import Unavailable

_STOP_S = 30


@contextlib.contextmanager
def own_server(flags: Mapping[str, str], *, start_timeout_s: float = 300.0) -> Iterator[str]:
    """Run ``ragserve serve`` on a free port with an empty data folder and these flags; yields its URL once it is ready.

    Raises ``Unavailable`` with the end of its log if it does not become ready.
    """
    with tempfile.TemporaryDirectory(prefix="ragserve-eval-") as folder:
        log_path = Path(folder) / "server.log"
        port = _free_port()
        command = [sys.executable, "-m", "ragserve.cli", "serve", "--port", str(port), "--data-dir", str(Path(folder) / "data")]
        command += [part for name, value in flags.items() for part in (f"--{name}", value)]
        with log_path.open("wb") as log:
            # A session of its own, so that everything the server starts can be stopped with it.
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_ready(url, process, log_path, start_timeout_s)
            yield url
        finally:
            _stop(process)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_ready(url: str, process: subprocess.Popen[bytes], log_path: Path, timeout_s: float) -> None:
    key = os.environ.get("RAGSERVE_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/ready", headers=headers, timeout=5).status_code == 200:
                return
        time.sleep(0.2)
    said = "\n".join(log_path.read_text(errors="replace").splitlines()[-20:])
    state = f"exited with {process.returncode}" if process.returncode is not None else f"was not ready after {timeout_s:.0f} s"
    raise Unavailable(f"The server {state}. The end of its log:\n{said}\n", hint="ragserve doctor says what is missing.")


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
    with contextlib.suppress(ProcessLookupError):  # whatever of its group is left, normally nothing
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
