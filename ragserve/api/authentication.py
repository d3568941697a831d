"""Middleware that gives every request its `Access`: the API key, the key's rates, the audit log."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, cookie_parser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragserve.api.access import OPEN, Access
from ragserve.errors import InvalidRequest, RagserveError, Unauthorized
from ragserve.sso.single_sign_on import SingleSignOn
from ragserve.tenants.audit_log import AuditLog
from ragserve.tenants.key_file import TenantKey
from ragserve.tenants.keyring import Keyring
from ragserve.tenants.principal import NOBODY, Principal
from ragserve.tenants.rate_limits import RateLimits

_LEFT = 499  # the client did not wait for the answer
_PATH_CHARS = 512


class Authentication:
    """Answers 401 without a key, except on /health, on / and on /docs and /playground, which ask
    for it, and 429 over a key's limits. Records what the audit log is for, before the answer is sent.

    With single sign-on, an access token of the provider stands in for a key, and so does a browser's session
    where no key is sent."""

    def __init__(
        self, app: ASGIApp, keyring: Keyring, audit: AuditLog, sso: SingleSignOn | None = None
    ) -> None:
        self._app = app
        self._sso = sso
        self._keyring = keyring
        self._audit = audit
        self._rates = RateLimits()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        address = str((scope.get("client") or ("",))[0])
        state = scope.setdefault("state", {})
        if scope["path"] in OPEN:
            state["access"] = Access(NOBODY, address, self._rates)
            await self._app(scope, receive, send)
            return
        try:
            who = await self._who(scope)
            with self._rates.admit(who):
                state["access"] = access = Access(who, address, self._rates)
                await self._recorded(access, scope, receive, send)
        except RagserveError as error:
            if scope["type"] != "websocket":
                raise
            reason = "wrong or missing API key" if error.status == 401 else error.message
            await send({"type": "websocket.close", "code": 1008, "reason": reason[:120]})

    async def _who(self, scope: Scope) -> Principal:
        """Whom a request comes from. Raises Unauthorized, Forbidden, and Unavailable."""
        authorization = b"".join(_values(scope, "authorization")[:1])
        if not authorization and scope["type"] == "http" and (user := self._user(scope)) is not None:
            return user
        try:
            return _of_key(self._keyring.admit(authorization), scope)
        except Unauthorized:
            scheme, _, secret = authorization.decode("latin-1").partition(" ")
            sso = self._sso
            if sso is None or scheme.lower() != "bearer" or not sso.takes(secret.strip()):
                raise
        return await sso.bearer(secret.strip())

    def _user(self, scope: Scope) -> Principal | None:
        """Who is signed in at the browser that sent a request."""
        if self._sso is None or not self._sso.signs_in:
            return None
        headers = Headers(scope=scope)
        cookie = cookie_parser(headers.get("cookie", "")).get(self._sso.session_cookie, "")
        return self._sso.signed_in(cookie, headers.get("origin"), headers.get("sec-fetch-site"))

    async def _recorded(self, access: Access, scope: Scope, receive: Receive, send: Send) -> None:
        recorded = False

        def record(status: int) -> None:
            nonlocal recorded
            recorded = True
            self._audit.write(
                who=access.who.name,
                key=access.who.id,
                address=access.address,
                what=f"{scope.get('method', 'WEBSOCKET')} {scope['path'][:_PATH_CHARS]}",
                namespace=access.namespace,
                result=status,
                request_id=scope["state"].get("request_id"),
                **access.details,
            )

        async def send_recorded(message: Message) -> None:
            if message["type"] == "http.response.start" and access.audited:
                await asyncio.to_thread(record, message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_recorded)
        except (asyncio.CancelledError, ClientDisconnect):
            if access.audited and not recorded:
                await asyncio.shield(asyncio.to_thread(record, _LEFT))
            raise
        except Exception as error:
            if access.audited and not recorded:
                await asyncio.to_thread(record, getattr(error, "status", 500))
            raise


def _of_key(key: TenantKey, scope: Scope) -> Principal:
    """Whom a request with this key comes from. Raises InvalidRequest for labels that are sent twice: a user
    may have added to those of the gateway."""
    if key.labels_header is None:
        return Principal.of_key(key)
    given = _values(scope, key.labels_header)
    if len(given) > 1:
        raise InvalidRequest(
            f"The header {key.labels_header} came {len(given)} times.",
            hint="The gateway must replace what its users send.",
            code="invalid_labels",
        )
    return Principal.of_key(key, given[0].decode("latin-1") if given else None)


def _values(scope: Scope, name: str) -> list[bytes]:
    """The values of a header, as often as it was sent."""
    wanted = name.lower().encode()
    return [value for key, value in scope["headers"] if key.lower() == wanted]
