"""A real `mooncake_master` on loopback, for tests."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from sglang_ext.documents.remote.mooncake_process import load_libraries


def why_not() -> str:
    """Why Mooncake cannot run here; empty if it can."""
    if find_spec("mooncake") is None:
        return "needs Mooncake: requirements/mooncake.txt, which `scripts/install` installs"
    try:
        load_libraries()
    except OSError as error:
        return f"needs the system library of Mooncake, libibverbs1: {error}"
    return ""


class Master:
    """A master on ports of its own, which can be killed and started again."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as rpc, socket.create_server(("127.0.0.1", 0)) as metrics:
            self._ports = rpc.getsockname()[1], metrics.getsockname()[1]
        self.address = f"127.0.0.1:{self._ports[0]}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it listens."""
        spec = find_spec("mooncake")
        assert spec is not None
        binary = Path(str(spec.origin)).with_name("mooncake_master")
        rpc, metrics = self._ports
        flags = [f"-rpc_port={rpc}", "-rpc_address=127.0.0.1", "-rpc_thread_num=1"]
        flags += [f"-metrics_port={metrics}", "-metrics_host=127.0.0.1"]
        libraries = str(Path(sys.prefix) / "lib" / "ibverbs")
        self._process = subprocess.Popen(
            [binary, *flags],
            env=os.environ | {"LD_LIBRARY_PATH": libraries},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 240
        while True:
            try:
                socket.create_connection(("127.0.0.1", rpc), timeout=1).close()
                return
            except OSError:
                assert time.monotonic() < deadline
                assert self._process.poll() is None, "mooncake_master has ended"
                time.sleep(0.02)

    def kill(self) -> None:
        """End it without a word."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
