"""Origins of web addresses, as browsers send them."""

from __future__ import annotations


def origin_of(address: str) -> str:
    """The header Origin of pages at an address: lower case, the host in ASCII (IDNA), no default port.

    Raises ``ValueError`` for what is no web address."""
    import httpx

    try:
        url = httpx.URL(address.strip())
    except httpx.InvalidURL as error:
        raise ValueError(str(error)) from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"{address[:80]!r} is no web address")
    return f"{url.scheme}://{url.netloc.decode('ascii')}".lower()
