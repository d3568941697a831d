"""The OpenID Connect provider: its addresses, its keys, and what it gives for a code. All of it is asked for
when it is first needed, within limits on time and size; a provider that does not answer fails sign-ins and
new tokens, never the server."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote_plus, urlsplit

import httpx

from ragserve.errors import Unauthorized, Unavailable
from ragserve.setting_groups.sign_on import address_problem

log = logging.getLogger(__name__)

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Signatures that are taken: of public keys, so that nobody who knows a key can sign, and never ``none``."""

_TIMEOUT_S, _MOST_BYTES = 5.0, 1 << 20
_FRESH_S = 600.0  # after which the addresses and the keys are asked for again
_STALE_S = 3600.0  # until which old keys count while the provider cannot be reached
_AGAIN_S = 10.0  # between two attempts, so that nobody can have the provider asked for each request
_MOST_KEYS, _RSA_BITS = 100, 2048
_AT_ONCE = 8  # codes that are exchanged


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The provider's addresses. ``by_header``: it takes a client's secret in a header, as is the default."""

    authorization: str
    token: str
    keys: str
    end_session: str = ""
    userinfo: str = ""
    by_header: bool = True


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A public key of the provider. ``algorithm``: the only one that it is for, if the provider says so."""

    key_id: str | None
    kind: str
    algorithm: str | None
    key: Any

    def makes(self, algorithm: str) -> bool:
        """Return whether it may have made a signature of this algorithm."""
        kind = "OKP" if algorithm == "EdDSA" else "EC" if algorithm.startswith("ES") else "RSA"
        weak = self.kind == "RSA" and self.key.key_size < _RSA_BITS
        return self.kind == kind and self.algorithm in (None, algorithm) and not weak


class Provider:
    """What is known of a provider. Coroutines of one event loop use it. Close it.

    Args:
        issuer: Its address, which its tokens name.
        clock: Seconds, as `time.monotonic`.
    """

    def __init__(self, issuer: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.issuer = issuer
        self._clock = clock
        self._endpoints: Endpoints | None = None
        self._found_at = self._keys_at = float("-inf")
        self._asked_at = {"endpoints": float("-inf"), "keys": float("-inf")}
        self._keys: list[SigningKey] = []
        self._refresh: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self._exchanges = asyncio.Semaphore(_AT_ONCE)
        self._by_header: bool | None = None  # once a code was exchanged: how this client is registered
        self._client: httpx.AsyncClient | None = None

    async def close(self) -> None:
        """Close the connections."""
        if self._refresh is not None:
            self._refresh.cancel()
        if self._client is not None:
            await self._client.aclose()

    async def endpoints(self) -> Endpoints:
        """The provider's addresses. Raises ``Unavailable``."""
        if self._endpoints is None or self._clock() - self._found_at > _FRESH_S:
            async with self._lock:
                await self._discover()
        if self._endpoints is None:
            raise _unreachable("its addresses are not known")
        return self._endpoints

    async def key(self, key_id: str | None, algorithm: str) -> Any:
        """The key that a token was signed with. An unknown one has the keys asked for again, now and then,
        because providers change them. Raises ``Unauthorized``, and ``Unavailable`` without any keys."""
        found, age = self._find(key_id, algorithm), self._clock() - self._keys_at
        if found is not None and age <= _STALE_S:
            if age > _FRESH_S and (self._refresh is None or self._refresh.done()):
                self._refresh = asyncio.create_task(self._refreshed())  # nobody waits for it
            return found.key
        await self._refreshed()
        if self._clock() - self._keys_at > _STALE_S:
            raise _unreachable("its keys are not known")
        found = self._find(key_id, algorithm)
        if found is None:
            raise Unauthorized("The token is signed with a key that its provider does not have.")
        return found.key

    async def _refreshed(self) -> None:
        """Ask for the keys. Failures are logged."""
        try:
            address = (await self.endpoints()).keys
        except Unavailable:  # logged
            return
        async with self._lock:
            await self._read_keys(address)

    async def exchange(
        self, code: str, verifier: str, redirect: str, client: str, secret: str | None
    ) -> tuple[str, str]:
        """The ID token and the access token, which may be empty, for an authorization code. Raises
        ``Unauthorized`` for a code that the provider refuses, and ``Unavailable``."""
        endpoints = await self.endpoints()
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": redirect,
            "code_verifier": verifier,
        }
        first = endpoints.by_header if self._by_header is None else self._by_header
        async with self._exchanges:
            for by_header in (first, not first):  # clients are registered for one of the two
                who = _authenticated(form, client, secret, by_header)
                status, body = await self._ask("POST", endpoints.token, **who)
                said = body if isinstance(body, Mapping) else {}
                if secret is None or said.get("error") != "invalid_client":
                    break
        token, access = said.get("id_token"), said.get("access_token")
        if status != 200 or not isinstance(token, str):
            log.warning("The provider refused a sign-in: HTTP %d, %r", status, str(said.get("error"))[:100])
            raise Unauthorized(
                "The provider refused this sign-in.", hint="Sign in again.", code="sign_in_failed"
            )
        self._by_header = by_header
        return token, access if isinstance(access, str) else ""

    async def userinfo(self, access_token: str, subject: str) -> Mapping[str, Any]:
        """What the provider says of a user beside the ID token; nothing where it says nothing. Raises
        ``Unavailable``."""
        address = (await self.endpoints()).userinfo
        if not address or not access_token:
            return {}
        async with self._exchanges:
            status, body = await self._ask("GET", address, bearer=access_token)
        if status != 200 or not isinstance(body, Mapping) or body.get("sub") != subject:
            log.warning("The provider's userinfo cannot be used: HTTP %d", status)
            return {}
        return body

    def _find(self, key_id: str | None, algorithm: str) -> SigningKey | None:
        """The key of this id; without an id the only one that fits."""
        fitting = [each for each in self._keys if key_id in (None, each.key_id) and each.makes(algorithm)]
        return fitting[0] if len(fitting) == 1 or (fitting and key_id is not None) else None

    def _may_ask(self, what: str) -> bool:
        now = self._clock()
        if now - self._asked_at[what] < _AGAIN_S:
            return False
        self._asked_at[what] = now
        return True

    async def _discover(self) -> None:
        """Ask for the addresses, unless that was tried a moment ago. Failures are logged."""
        if self._clock() - self._found_at <= _FRESH_S or not self._may_ask("endpoints"):
            return
        try:
            self._endpoints = await self.discovered()
            self._found_at = self._clock()
        except Unavailable as error:
            log.warning("%s", error.message)

    async def discovered(self) -> Endpoints:
        """Ask for the addresses now. Raises ``Unavailable`` with what is wrong."""
        address = self.issuer.rstrip("/") + "/.well-known/openid-configuration"
        status, body = await self._ask("GET", address)
        if status != 200 or not isinstance(body, Mapping):
            raise _unreachable(f"{address} answers HTTP {status}, or no JSON object")
        if body.get("issuer") != self.issuer:
            raise _unreachable(
                f"{address} is of the issuer {str(body.get('issuer'))[:200]!r}: set oidc_issuer so"
            )
        found = {}
        for name, needed in (
            ("authorization_endpoint", True),
            ("token_endpoint", True),
            ("jwks_uri", True),
            ("end_session_endpoint", False),
            ("userinfo_endpoint", False),
        ):
            value = body.get(name)
            if not isinstance(value, str) or address_problem(value, query=True):
                if needed:
                    raise _unreachable(f"{address} has no usable {name}")
                value = ""
            found[name] = value
        ways = body.get("token_endpoint_auth_methods_supported")
        by_header = not isinstance(ways, list) or "client_secret_basic" in ways
        authorization, token, keys, end_session, userinfo = found.values()
        return Endpoints(authorization, token, keys, end_session, userinfo, by_header)

    async def _read_keys(self, address: str) -> None:
        """Ask for the keys, unless that was tried a moment ago. Failures are logged, and old keys stay."""
        from jwt import PyJWK
        from jwt.exceptions import PyJWTError

        if not self._may_ask("keys"):
            return
        try:
            status, body = await self._ask("GET", address)
            listed = body.get("keys") if isinstance(body, Mapping) else None
            if status != 200 or not isinstance(listed, list):
                raise _unreachable(f"{address} answers HTTP {status}, or no keys")
        except Unavailable as error:
            log.warning("%s", error.message)
            return
        keys = []
        for each in listed[:_MOST_KEYS]:
            try:
                if each.get("kty") in ("RSA", "EC", "OKP") and each.get("use", "sig") == "sig":
                    keys.append(SigningKey(each.get("kid"), each["kty"], each.get("alg"), PyJWK(each).key))
            except (PyJWTError, AttributeError, TypeError, ValueError) as error:
                log.warning("A key of the provider is left out: %s", type(error).__name__)
        self._keys, self._keys_at = keys, self._clock()

    async def _ask(self, method: str, address: str, bearer: str = "", **options: Any) -> tuple[int, Any]:
        """Status and JSON of an answer; None if it is no JSON. Redirects are not followed."""
        self._client = self._client or httpx.AsyncClient(timeout=_TIMEOUT_S, follow_redirects=False)
        body = bytearray()
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        if bearer:
            headers["Authorization"] = f"Bearer {bearer}"
        try:
            async with (
                asyncio.timeout(2 * _TIMEOUT_S),
                self._client.stream(method, address, headers=headers, **options) as answer,
            ):
                async for block in answer.aiter_raw():
                    body += block
                    if len(body) > _MOST_BYTES:
                        raise _unreachable(f"{_host(address)} answers more than {_MOST_BYTES:,} bytes")
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            raise _unreachable(f"{_host(address)}: {type(error).__name__} {error}".strip()[:300]) from error
        try:
            return answer.status_code, json.loads(body)
        except (ValueError, RecursionError):
            return answer.status_code, None


def _authenticated(
    form: Mapping[str, str], client: str, secret: str | None, by_header: bool
) -> dict[str, Any]:
    """A request's form and header of a client (RFC 6749, section 2.3.1)."""
    if secret is not None and by_header:
        return {"data": form, "auth": (quote_plus(client), quote_plus(secret))}
    own = {"client_id": client} | ({} if secret is None else {"client_secret": secret})
    return {"data": {**form, **own}}


def _host(address: str) -> str:
    return urlsplit(address).netloc[:200]


def _unreachable(why: str) -> Unavailable:
    return Unavailable(
        f"The sign-on provider cannot be used: {why}.",
        hint="API keys work. See `ragserve doctor`.",
        code="sign_on_unavailable",
    )
