"""Keep web pages out of a server without an API key.

A page that its user opens runs on the user's machine and reaches loopback. Its requests carry its Origin; by
DNS rebinding it has the same origin as the server, and then the Host is a name of the page's choosing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ragserve.errors import Forbidden
from ragserve.web_origin import origin_of

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def names(listed: str) -> list[str]:
    """The entries of a setting that is a list separated by commas."""
    return [name.strip() for name in listed.split(",") if name.strip()]


def named_origins(listed: str) -> list[str]:
    """The origins of such a setting, as browsers send them; what is none as it was written."""
    found = []
    for name in names(listed):
        try:
            found.append(origin_of(name))
        except ValueError:
            found.append(name)
    return found


class RefuseForeignPages:
    """Answers 403 to another Host than ``hosts`` and loopback's names, and to an Origin that is neither the
    server's own nor one of ``origins``, as long as ``applies``."""

    def __init__(
        self, app: ASGIApp, *, hosts: Iterable[str], origins: Iterable[str], applies: Callable[[], bool]
    ) -> None:
        self._app = app
        self._applies = applies
        self._hosts = {_named_host(host) for host in (*_LOOPBACK, *hosts)}
        self._origins = {origin.lower() for origin in origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        checked = scope["type"] in ("http", "websocket") and self._applies()
        reason = self._reason(Headers(scope=scope)) if checked else None
        if reason is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "another web page"})
        else:
            raise reason

    def _reason(self, headers: Headers) -> Forbidden | None:
        host = headers.get("host", "").lower()
        if host and _host_name(f"//{host}") not in self._hosts:
            return Forbidden(
                f"This server is not known as {host[:128]!r}.",
                hint="Use localhost, name the host with --allowed-hosts, or set an API key.",
                code="host_not_allowed",
            )
        origin = headers.get("origin")
        if origin is None or origin.lower() in self._origins or _authority(origin) == host:
            return None
        return Forbidden(
            f"Pages of {origin[:128]!r} may not call this server.",
            hint="Name the origin with --cors-origins.",
            code="origin_not_allowed",
        )


def _named_host(name: str) -> str:
    """A host of a setting as `_host_name` gives it: without port and brackets, in ASCII."""
    bare_ipv6 = name.count(":") > 1 and not name.startswith("[")
    try:
        return _host_name(origin_of(f"http://[{name}]" if bare_ipv6 else f"http://{name}")) or name.lower()
    except ValueError:
        return name.lower()


def _host_name(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def _authority(origin: str) -> str | None:
    """``host:port`` of an origin, as a Host header has it; None for ``null`` and for what is no origin."""
    try:
        parts = urlsplit(origin.lower())
    except ValueError:
        return None
    return parts.netloc or None
