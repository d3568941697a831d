"""An OpenID Connect provider on loopback: discovery, keys that rotate, codes with PKCE, tokens. It signs with
joserfc, another library than the server checks with."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from joserfc import jwt
from joserfc.jwk import ECKey, KeySet, OKPKey, RSAKey

from tests.http_server import QuietHandler, served

CLIENT, SECRET, AUDIENCE = "playground", "client-secret", "ragserve-api"
Key = RSAKey | ECKey | OKPKey


@dataclass
class OidcProvider:
    """``user``: claims of whoever signs in. ``asked``: paths, in order. ``down``: every answer is 500.
    ``discovery``: fields that differ from the right ones. ``wait_s``: before an answer. ``secret_in``: where
    the client is registered to send its secret, "header" or "form". ``userinfo``: claims that are there and
    not in ID tokens."""

    issuer: str = ""
    user: dict[str, Any] = field(default_factory=dict)
    id_token: dict[str, Any] = field(default_factory=dict)
    discovery: dict[str, Any] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    userinfo: dict[str, Any] = field(default_factory=dict)
    secret_in: str = "header"
    down: bool = False
    wait_s: float = 0.0
    keys: list[Key] = field(default_factory=list)
    codes: dict[str, dict[str, str]] = field(default_factory=dict)

    def reset(self) -> None:
        self.user = {"sub": "u-1", "preferred_username": "ada", "groups": ["staff", "unknown"]}
        self.id_token, self.discovery, self.down, self.wait_s = {}, {}, False, 0.0
        self.userinfo, self.secret_in = {}, "header"
        self.asked.clear()

    def rotate(self, kind: str = "RSA") -> Key:
        """Sign with a new key from now on; the older ones are forgotten."""
        options = {"kid": secrets.token_hex(4), "use": "sig"}
        key: Key
        if kind == "RSA":
            key = RSAKey.generate_key(2048, options)
        elif kind == "EC":
            key = ECKey.generate_key("P-256", options)
        else:
            key = OKPKey.generate_key("Ed25519", options)
        self.keys = [key]
        return key

    def token(self, *, key: Key | None = None, header: dict[str, Any] | None = None, **claims: Any) -> str:
        """An access token; claims that are None are left out."""
        key = key or self.keys[-1]
        algorithm = {"RSA": "RS256", "EC": "ES256", "OKP": "EdDSA"}[key.key_type]
        now = int(time.time())
        all_ = {"iss": self.issuer, "aud": AUDIENCE, "iat": now, "exp": now + 300, **self.user, **claims}
        head = {"alg": algorithm, "kid": key.kid, "typ": "at+jwt", **(header or {})}
        kept = {name: value for name, value in all_.items() if value is not None}
        return jwt.encode(head, kept, key, algorithms=[head["alg"]])

    def answer(
        self, method: str, path: str, form: dict[str, str], authorization: str = ""
    ) -> tuple[int, Any, str]:
        """Status, JSON and Location of an answer."""
        url = urlsplit(path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        self.asked.append(url.path)
        time.sleep(self.wait_s)
        if self.down:
            return 500, {"error": "down"}, ""
        if url.path == "/.well-known/openid-configuration":
            return 200, self._configuration() | self.discovery, ""
        if url.path == "/keys":
            return 200, KeySet(list(self.keys)).as_dict(private=False), ""
        if url.path == "/authorize":
            return 302, None, self._authorize(query)
        if url.path == "/token" and method == "POST":
            return *self._exchange(form, authorization), ""
        if url.path == "/userinfo" and authorization == "Bearer opaque":
            return 200, {"sub": self.user["sub"], **self.userinfo}, ""
        return 404, {}, ""

    def _configuration(self) -> dict[str, Any]:
        names = {"authorization_endpoint": "authorize", "token_endpoint": "token", "jwks_uri": "keys"}
        names |= {"userinfo_endpoint": "userinfo"} if self.userinfo else {}
        ends = {"end_session_endpoint": f"{self.issuer}/bye"}
        return {"issuer": self.issuer, **{n: f"{self.issuer}/{p}" for n, p in names.items()}, **ends}

    def _authorize(self, query: dict[str, str]) -> str:
        asked = query["response_type"], query["client_id"], query["code_challenge_method"]
        if asked != ("code", CLIENT, "S256"):
            wrong = urlencode({"error": "invalid_request", "state": query["state"]})
            return f"{query['redirect_uri']}?{wrong}"
        code = secrets.token_urlsafe(16)
        self.codes[code] = query
        return f"{query['redirect_uri']}?{urlencode({'code': code, 'state': query['state']})}"

    def _exchange(self, form: dict[str, str], authorization: str) -> tuple[int, dict[str, Any]]:
        basic = base64.b64encode(f"{CLIENT}:{SECRET}".encode()).decode()
        given = {
            "header": authorization == f"Basic {basic}" and "client_secret" not in form,
            "form": (form.get("client_id"), form.get("client_secret")) == (CLIENT, SECRET),
        }
        if not given[self.secret_in]:
            return 401, {"error": "invalid_client"}
        asked = self.codes.pop(form.get("code", ""), None)
        digest = hashlib.sha256(form.get("code_verifier", "").encode()).digest()
        challenge = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        right = (
            asked is not None
            and challenge == asked["code_challenge"]
            and form.get("redirect_uri") == asked["redirect_uri"]
        )
        if asked is None or not right:
            return 400, {"error": "invalid_grant"}
        claims = {"aud": CLIENT, "nonce": asked["nonce"], **self.id_token}
        return 200, {"token_type": "Bearer", "access_token": "opaque", "id_token": self.token(**claims)}


@contextmanager
def oidc_provider() -> Iterator[OidcProvider]:
    """Serve until the block ends."""
    provider = OidcProvider()

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self._send("GET", {})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            self._send("POST", {name: values[0] for name, values in parse_qs(body).items()})

        def _send(self, method: str, form: dict[str, str]) -> None:
            authorization = self.headers.get("Authorization", "")
            status, body, location = provider.answer(method, self.path, form, authorization)
            self.send_response(status)
            if location:
                self.send_header("Location", location)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

    with served(Handler) as port:
        provider.issuer = f"http://127.0.0.1:{port}"
        provider.reset()
        provider.rotate()
        yield provider
