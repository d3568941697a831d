"""Start SGLang's router `smg` in its own process, as docs/fleet.md says, for benchmarks and tests."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import httpx

from ragserve.engine.ports import LOOPBACK, hold_port, port_of
from ragserve.engine.running_server import kill_session, spawn
from ragserve.errors import Unavailable

START_TIMEOUT_S = 300.0
_OPTIONS = (
    *("--disable-retries", "--disable-circuit-breaker", "--disable-health-check"),
    *("--disable-load-monitoring", "--worker-startup-check-interval", "1", "--log-level", "warn"),
)


def is_installed() -> bool:
    """Whether the router of `ragserve[router]` is there."""
    return find_spec("smg") is not None


@contextlib.contextmanager
def running_router(
    urls: Sequence[str], log: Path, key: str, *, port: int, policy: str = "consistent_hashing"
) -> Iterator[subprocess.Popen[bytes]]:
    """Start the router in front of workers, wait until it knows all of them, and kill it at the end of the
    block. ``key`` is the workers' and its own. Raises Unavailable with the end of ``log`` if it does not
    come up."""
    command = [sys.executable, "-m", "smg", "launch", "--host", LOOPBACK, "--port", str(port)]
    command += ["--api-key", key, "--policy", policy, *_OPTIONS, "--worker-urls", *urls]
    with hold_port() as metrics, log.open("ab") as output:  # which it must have, and nobody reads
        command += ["--prometheus-host", LOOPBACK, "--prometheus-port", str(port_of(metrics))]
        process = spawn(command, output, {})
        try:
            _wait(process, f"http://{LOOPBACK}:{port}/workers", key, len(urls), log)
            yield process
        finally:
            kill_session(process)


def _wait(process: subprocess.Popen[bytes], url: str, key: str, count: int, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    headers = {"Authorization": f"Bearer {key}"}
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            answer = httpx.get(url, headers=headers, timeout=5)
            if answer.is_success and answer.json()["total"] >= count:
                return
        time.sleep(0.05)
    raise Unavailable(f"The router did not start:\n{log.read_bytes()[-2000:].decode('utf-8', 'replace')}")
