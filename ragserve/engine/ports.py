"""TCP ports: check the server's before SGLang starts, or find a free one."""

from __future__ import annotations

import socket

from ragserve.errors import Conflict


def free_port() -> int:
    """Return a port of the loopback interface that nothing listens on."""
    return claim_port("127.0.0.1", 0)


def claim_port(host: str, port: int) -> int:
    """Return the port, or a free one for 0.

    Raises Conflict if it is taken: better now than after the engine has started."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise Conflict(
                f"Cannot bind {host}:{port}: {error.strerror}.",
                hint="Stop the process that uses it, or choose another port with --port.",
                code="port_in_use",
            ) from error
        return int(probe.getsockname()[1])
