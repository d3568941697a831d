"""An HTTP transport that connects to allowed addresses only: the URL of a client must not reach the server's
own networks."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

import httpx

from ragserve.errors import Forbidden

log = logging.getLogger(__name__)
Address = IPv4Address | IPv6Address
Allows = Callable[[Address], bool]

_INTERNET = IPv6Network("2000::/3")
_TUNNELS = (IPv6Network("2001::/23"), IPv6Network("2002::/16"))  # they hold IPv4 addresses, private ones too


def is_public(address: Address) -> bool:
    """Return whether an address is one of the internet: not private, local, shared, reserved or multicast."""
    if isinstance(address, IPv6Address) and (
        address not in _INTERNET or any(address in network for network in _TUNNELS)
    ):
        return False
    return address.is_global and not address.is_multicast


class GuardedTransport(httpx.HTTPTransport):
    """Resolves the host of each request, those of redirects too, and connects to the address that it checked.
    A name that is resolved twice may lead elsewhere the second time."""

    def __init__(self, allows: Allows) -> None:
        # a kept connection to an address would be used for another host without a look at its certificate
        super().__init__(limits=httpx.Limits(max_keepalive_connections=0))
        self._allows = allows

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Raises ``Forbidden`` if any address of the host is not allowed."""
        host = request.url.raw_host.decode("ascii")
        pinned = httpx.Request(
            request.method,
            request.url.copy_with(host=str(self._address(request))),
            headers=request.headers,  # with the name of the host
            stream=request.stream,
            extensions={**request.extensions, "sni_hostname": host},
        )
        return super().handle_request(pinned)

    def _address(self, request: httpx.Request) -> Address:
        host = request.url.host
        try:
            found = socket.getaddrinfo(host, request.url.port or 0, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise httpx.ConnectError(str(error), request=request) from error
        addresses = [ip_address(str(sockaddr[0]).partition("%")[0]) for *_, sockaddr in found]
        for address in addresses:
            if not self._allows(address):
                log.warning("%s is not fetched: it leads to %s, which is no public address", host, address)
                raise Forbidden(
                    f"{host} leads to no public address.",  # a client must not learn to which
                    hint="The server's owner may allow it: RAGSERVE_URL_INGESTION=any.",
                    code="private_address",
                )
        return addresses[0]
