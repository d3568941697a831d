"""TCP ports, held from the moment they are chosen until a server listens on them.

A port that is looked up and let go may be anybody's by the time an engine has started, tens of seconds
later: the kernel hands free ports out to every outgoing connection. A socket that is bound and does not
listen prevents that, and another socket of the same address may still bind and listen beside it (both with
SO_REUSEADDR), in this process or in a child.
"""

from __future__ import annotations

import socket

from ragserve.errors import Conflict

LOOPBACK = "127.0.0.1"
KEEP_ALIVE_S = 75
"""Idle connections are kept longer than clients and proxies keep theirs (httpx 5 s, load balancers 60 s): a
request that arrives while the server closes its connection is reset."""


def hold_port(host: str = LOOPBACK, port: int = 0) -> socket.socket:
    """Return a socket bound to the address, or to a free port for 0, that does not listen yet.

    The port is held until the socket is closed. Raises Conflict if another program has it: better now than
    after the engine has started."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    held = socket.socket(family, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind((host, port))
    except OSError as error:
        held.close()
        raise Conflict(
            f"Cannot bind {address(host, port)}: {error.strerror}.",
            hint="Stop the process that uses it, or choose another port with --port.",
            code="port_in_use",
        ) from error
    return held


def port_of(held: socket.socket) -> int:
    """Return the number of a held port."""
    return int(held.getsockname()[1])


def address(host: str, port: int) -> str:
    """Return host and port as a URL has them: an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
