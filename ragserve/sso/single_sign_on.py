"""Single sign-on of a server: bearer tokens, and sign-in of browsers by authorization code with PKCE."""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import secrets
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlencode, urlsplit

from ragserve.config import Settings
from ragserve.errors import Forbidden, NotFound, Unauthorized, Unavailable
from ragserve.sso.browser_sessions import MOST_CHARS, Signer
from ragserve.sso.group_grants import claimed_groups, group_grants, principal_of
from ragserve.sso.id_tokens import access_claims, id_claims, looks_like_token
from ragserve.sso.provider import Provider
from ragserve.tenants.principal import Principal
from ragserve.web_origin import origin_of

log = logging.getLogger(__name__)

SIGN_IN_S = 600
"""Seconds that a sign-in may take."""

_SESSION, _SIGN_IN = "ragserve-session", "ragserve-sign-in"  # kinds of cookies
_NO_GROUP = "None of this user's groups may use this server."


class SingleSignOn:
    """Off if no issuer is set. Coroutines of one event loop use it.

    Raises ``Unavailable`` if the extra is not installed."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.is_on = settings.oidc_issuer is not None
        self.signs_in = self.is_on and settings.oidc_client_id is not None
        if not self.is_on:
            return
        check_installed()
        self._provider = Provider(str(settings.oidc_issuer))
        self._groups = group_grants(settings.oidc_groups)
        self._signer = Signer(settings.data_dir)
        self._public = str(settings.oidc_public_url or "").rstrip("/")
        self._own_origin = origin_of(self._public) if self._public else ""
        self._callback = f"{self._public}/sso/callback"
        secure = self._public.startswith("https:")
        self.secure = secure
        # __Host-: no other host of the domain, and no plain connection, can set it
        self.session_cookie = "__Host-ragserve" if secure else "ragserve"
        self.sign_in_cookie = "__Host-ragserve-sign-in" if secure else "ragserve-sign-in"

    async def close(self) -> None:
        """Close the connections."""
        if self.is_on:
            await self._provider.close()

    def takes(self, secret: str) -> bool:
        """Return whether a bearer secret may be an access token."""
        return self.is_on and self._settings.oidc_audience is not None and looks_like_token(secret)

    async def bearer(self, token: str) -> Principal:
        """Who sends an access token. Raises ``Unauthorized``, ``Forbidden`` (no group), ``Unavailable``."""
        claims = await access_claims(self._provider, token, str(self._settings.oidc_audience))
        return self._principal(claims["sub"], _name(claims), self._claimed(claims))

    def signed_in(self, cookie: str, origin: str | None, site: str | None) -> Principal | None:
        """Who a browser's cookie says it is; None for a cookie that is over, or comes from another page.

        A cookie counts for requests of our own pages only (`own_page`), whatever SameSite made of it."""
        if not self.signs_in or not cookie or not self.own_page(origin, site):
            return None
        said = self._signer.read(_SESSION, cookie)
        if said is None or said.get("iss") != self._provider.issuer:
            return None
        try:
            return self._principal(str(said["sub"]), str(said["name"]), list(said["groups"]))
        except Forbidden:  # its groups were taken off the setting
            return None

    def own_page(self, origin: str | None, site: str | None) -> bool:
        """Return whether a browser's request comes from a page of this server, by its headers Origin and
        Sec-Fetch-Site."""
        return (origin is None or origin.lower() == self._own_origin) and site not in (
            "cross-site",
            "same-site",
        )

    async def begin(self) -> tuple[str, str]:
        """Begin a sign-in: the provider's address to go to, and what the browser keeps meanwhile. Raises
        ``Unavailable``, and ``NotFound`` if there is no sign-in here."""
        self.require()
        endpoints = await self._provider.endpoints()
        state, nonce, verifier = (secrets.token_urlsafe(32) for _ in range(3))
        challenge = base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).rstrip(b"=").decode()
        query = {
            "response_type": "code",
            "client_id": str(self._settings.oidc_client_id),
            "redirect_uri": self._callback,
            "scope": self._settings.oidc_scopes,
            "state": state,
            "nonce": nonce,
            "code_challenge": challenge,
            "code_challenge_method": "S256",
        }
        kept = self._signer.sign(_SIGN_IN, SIGN_IN_S, state=state, nonce=nonce, verifier=verifier)
        joint = "&" if urlsplit(endpoints.authorization).query else "?"
        return f"{endpoints.authorization}{joint}{urlencode(query)}", kept

    async def finish(self, state: str, code: str, kept: str) -> str:
        """End a sign-in and return the session's cookie. Raises ``Unauthorized``, ``Forbidden`` (no group),
        ``Unavailable``, ``NotFound``."""
        self.require()
        said = self._signer.read(_SIGN_IN, kept)
        if said is None or not state or not hmac.compare_digest(str(said["state"]).encode(), state.encode()):
            message = "This sign-in was not begun in this browser, or a while ago."
            raise Unauthorized(message, hint="Sign in again.", code="sign_in_failed")
        client, secret = str(self._settings.oidc_client_id), self._settings.oidc_client_secret
        token, access = await self._provider.exchange(
            code,
            said["verifier"],
            self._callback,
            client,
            None if secret is None else secret.get_secret_value(),
        )
        claims = await id_claims(self._provider, token, client, said["nonce"])
        claimed = self._claimed(claims)
        if not claimed:  # providers may say more of a user there than in the ID token
            more = await self._provider.userinfo(access, claims["sub"])
            claimed = self._claimed(more)  # not merged: an empty claim of the ID token would hide them
            claims = {**more, **claims}
        groups = [group for group in claimed if group in self._groups]
        who = self._principal(claims["sub"], _name(claims), groups)
        log.info("Signed in: %s", who.id)
        cookie = self._signer.sign(
            _SESSION,
            self._settings.oidc_session_s,
            iss=self._provider.issuer,
            sub=claims["sub"],
            name=who.name,
            groups=list(dict.fromkeys(groups)),
        )
        if len(cookie) > MOST_CHARS:
            raise Forbidden("This user is in more groups than a cookie can name.", code="too_many_groups")
        return cookie

    async def after_sign_out(self) -> str:
        """Where a browser goes once it is signed out: to the provider, to end its session, too, or here."""
        here = f"{self._public}/playground"
        try:
            there = (await self._provider.endpoints()).end_session
        except Unavailable:
            return here
        if not there:
            return here
        query = urlencode({"client_id": str(self._settings.oidc_client_id), "post_logout_redirect_uri": here})
        return f"{there}{'&' if urlsplit(there).query else '?'}{query}"

    def require(self) -> None:
        """Raises ``NotFound`` if there is no sign-in here."""
        if not self.signs_in:
            raise NotFound("This server has no sign-in.", hint="Set oidc_client_id.", code="no_sign_in")

    def _claimed(self, claims: Mapping[str, Any]) -> list[str]:
        return claimed_groups(claims, self._settings.oidc_groups_claim)

    def _principal(self, subject: str, name: str, groups: list[str]) -> Principal:
        who = principal_of(self._provider.issuer, subject, name, groups, self._groups)
        if who is None:
            raise Forbidden(_NO_GROUP, hint="Ask the server's operator (oidc_groups).", code="no_group")
        return who


def check_installed() -> None:
    """Raises ``Unavailable`` if what single sign-on needs is not installed."""
    missing = [name for name in ("jwt", "cryptography") if find_spec(name) is None]
    if missing:
        raise Unavailable(
            f"Single sign-on needs the packages PyJWT and cryptography; {missing[0]} is not installed.",
            hint="pip install 'ragserve[sso]', or leave oidc_issuer out.",
            code="no_sso",
        )


def _name(claims: Mapping[str, Any]) -> str:
    for name in ("preferred_username", "email", "name", "sub"):
        if isinstance(claims.get(name), str) and claims[name]:
            return str(claims[name])
    return ""
