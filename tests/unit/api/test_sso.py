"""Single sign-on against a real provider over HTTP: sign-in by code and PKCE, access tokens beside keys, what
groups may do, and attacks on each of these."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import jwt as pyjwt
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from joserfc.jwk import ECKey, RSAKey

from tests.unit.api.oidc_provider import AUDIENCE, CLIENT, SECRET, OidcProvider, oidc_provider
from tests.unit.api.scripted_server import DOCUMENTS, Live, Tenants, eventually, serving

NEXT_YEAR = int(time.time()) + 365 * 86400  # however long after the collection a test runs
PUBLIC = "http://127.0.0.1:7"  # as browsers know the server: its port is not known before it runs
GROUPS = {
    "staff": {"namespaces": ["handbook*"], "rights": ["read"], "labels": ["internal"]},
    "editors": {"namespaces": ["handbook"], "rights": ["ingest", "delete"], "limits": {"max_k": 3}},
    "archivists": {"namespaces": ["handbook-old"], "rights": ["read"]},
    "operators": {"rights": ["admin"]},
    "watchers": {"rights": ["metrics"]},
}


@dataclass
class Site:
    live: Live
    provider: OidcProvider
    tenants: Tenants

    def bearer(self, token: str) -> httpx.Client:
        return self.live.client(headers={"Authorization": f"Bearer {token}"})

    def names(self, token: str) -> list[str]:
        with self.bearer(token) as client:
            answer = client.get("/rag/namespaces")
            assert answer.status_code == 200, answer.text
            return [one["name"] for one in answer.json()["namespaces"]]

    def refused(self, token: str) -> tuple[int, str]:
        """Status and message of a refusal."""
        with self.bearer(token) as client:
            answer = client.get("/rag/namespaces")
            return answer.status_code, answer.json()["error"]["message"]


def settings_of(provider: OidcProvider) -> dict[str, Any]:
    """Settings of a server with this provider."""
    return {
        "oidc_issuer": provider.issuer,
        "oidc_audience": AUDIENCE,
        "oidc_client_id": CLIENT,
        "oidc_client_secret": SECRET,
        "oidc_public_url": PUBLIC,
        "oidc_groups": GROUPS,
    }


@pytest.fixture(scope="module")
def _site(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Iterator[Site]:
    with (
        oidc_provider() as provider,
        serving(tmp_path_factory.mktemp("sso"), model_path, **settings_of(provider)) as live,
    ):
        live.index("handbook", DOCUMENTS)
        live.index("handbook-old", {"bell": DOCUMENTS["bell"]})
        live.index("payroll", DOCUMENTS)
        yield Site(live, provider, Tenants(live))


@pytest.fixture
def site(_site: Site) -> Site:
    _site.provider.reset()
    _again(_site)
    return _site


def _again(site: Site) -> None:
    """Let the server ask the provider at once, as if it had not done so for a while."""
    known = site.live.app.state.sso._provider
    known._asked_at = dict.fromkeys(known._asked_at, float("-inf"))


@pytest.fixture
def browser(site: Site) -> Iterator[httpx.Client]:
    """A client with cookies and the headers that browsers send."""
    with site.live.client(follow_redirects=False) as client:
        yield client


def part(data: bytes) -> str:
    """A part of a token."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def sign_in(browser: httpx.Client) -> httpx.Response:
    """Go to the provider and back, as a browser does, and return the last answer."""
    there = browser.get("/sso/login")
    assert there.status_code == 303, there.text
    back = httpx.get(there.headers["location"]).headers["location"]
    return browser.get("/sso/callback?" + urlsplit(back).query)


def test_nobody_comes_in_without_a_key_a_token_or_a_session(site: Site, browser: httpx.Client) -> None:
    assert browser.get("/rag/namespaces").status_code == 401
    assert browser.get("/sso/session").json() == {"sign_in": True, "user": None}
    assert browser.get("/playground").status_code == 200


def test_a_browser_signs_in_asks_and_signs_out(site: Site, browser: httpx.Client) -> None:
    back = sign_in(browser)
    assert (back.status_code, back.headers["location"]) == (303, "../playground")
    cookies = {line.split("=")[0]: line for line in back.headers.get_list("set-cookie")}
    assert "HttpOnly" in cookies["ragserve"]
    assert "SameSite=strict" in cookies["ragserve"]
    assert "Max-Age=0" in cookies["ragserve-sign-in"]
    assert browser.get("/sso/session").json() == {"sign_in": True, "user": "ada"}
    names = [one["name"] for one in browser.get("/rag/namespaces").json()["namespaces"]]
    assert names == ["handbook", "handbook-old"]
    asked = {"query": "Who built it?", "namespace": "handbook"}
    assert browser.post("/rag/query", json=asked, headers={"Origin": PUBLIC}).status_code == 200
    assert browser.delete("/rag/namespaces/handbook").status_code == 403
    out = browser.post("/sso/logout", headers={"Origin": PUBLIC})
    there = urlsplit(out.json()["go_to"])
    assert there.path == "/bye"
    assert parse_qs(there.query)["post_logout_redirect_uri"] == [f"{PUBLIC}/playground"]
    assert browser.get("/rag/namespaces").status_code == 401


def test_the_request_to_the_provider_has_pkce_state_and_nonce(site: Site, browser: httpx.Client) -> None:
    first, second = (parse_qs(urlsplit(browser.get("/sso/login").headers["location"]).query) for _ in "12")
    assert first["redirect_uri"] == [f"{PUBLIC}/sso/callback"]
    assert first["code_challenge_method"] == ["S256"]
    for name in ("state", "nonce", "code_challenge"):
        assert len(first[name][0]) == 43
        assert first[name] != second[name]
    assert SECRET not in str(first)


def test_pages_of_others_cannot_use_a_session(site: Site, browser: httpx.Client) -> None:
    sign_in(browser)
    for headers in (
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:8"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ):
        assert browser.get("/rag/namespaces", headers=headers).status_code == 401, headers
        assert browser.post("/sso/logout", headers=headers).status_code == 403, headers
        assert browser.get("/sso/session", headers=headers).json()["user"] is None
    assert browser.get("/rag/namespaces", headers={"Sec-Fetch-Site": "same-origin"}).status_code == 200


def test_a_callback_counts_once_and_in_the_browser_that_began(site: Site, browser: httpx.Client) -> None:
    there = browser.get("/sso/login").headers["location"]
    back = "/sso/callback?" + urlsplit(httpx.get(there).headers["location"]).query
    with site.live.client() as other:
        assert other.get(back).status_code == 401, "no cookie"
        other.get("/sso/login", follow_redirects=False)
        assert other.get(back).status_code == 401, "another sign-in's state"
    assert browser.get(back + "x").status_code == 401
    assert browser.get(back).status_code == 303
    assert browser.get(back).status_code == 401, "the cookie of the sign-in is gone"
    for query in ("", "?error=access_denied", "?state=x&code=y", "?error=<script>"):
        for accepted in ("text/html,*/*;q=0.8", "*/*"):
            answer = browser.get("/sso/callback" + query, headers={"Accept": accepted})
            assert answer.status_code == 401
            assert answer.headers["content-type"].startswith("text/html") is (accepted != "*/*")
            assert "<script>" not in answer.text


@pytest.mark.parametrize(
    ("claims", "status"),
    [
        ({"nonce": "another"}, 401),
        ({"nonce": None}, 401),
        ({"aud": "another-client"}, 401),
        ({"aud": [CLIENT, "another"], "azp": "another"}, 401),
        ({"iss": "https://evil.example"}, 401),
        ({"exp": 1}, 401),
        ({"sub": None}, 401),
        ({"groups": ["unknown"]}, 403),
        ({"groups": None}, 403),
    ],
)
def test_a_wrong_id_token_signs_nobody_in(
    site: Site, browser: httpx.Client, claims: dict[str, Any], status: int
) -> None:
    site.provider.id_token = claims
    assert sign_in(browser).status_code == status
    assert "ragserve" not in browser.cookies
    assert browser.get("/rag/namespaces").status_code == 401


def test_a_session_that_is_changed_or_over_is_none(
    site: Site, browser: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    sign_in(browser)
    cookie = browser.cookies["ragserve"]
    head, body, signature = cookie.split(".")
    padded = json.loads(base64.urlsafe_b64decode(body + "=="))
    admin = part(json.dumps(padded | {"groups": ["operators"]}).encode())
    none = part(b'{"alg":"none","typ":"JWT"}')
    signed = site.live.app.state.sso._signer
    forged = [
        f"{head}.{admin}.{signature}",
        f"{none}.{admin}.",
        cookie[:-2],
        "x",
        signed.sign("ragserve-sign-in", 60, **{k: v for k, v in padded.items() if k not in ("aud", "exp")}),
        signed.sign("ragserve-session", -1, **{k: v for k, v in padded.items() if k not in ("aud", "exp")}),
        signed.sign("ragserve-session", 60, iss="https://other.example", sub="u", name="u", groups=["staff"]),
    ]
    for each, status in [*((each, 401) for each in forged), (cookie, 200)]:
        with site.live.client(cookies={"ragserve": each}) as client:
            assert client.get("/rag/namespaces").status_code == status, each
    with site.bearer(cookie) as client:
        assert client.get("/rag/namespaces").status_code == 401, "a session is no access token"


def test_access_tokens_have_their_groups_rights(site: Site) -> None:
    token = site.provider.token
    assert site.names(token()) == ["handbook", "handbook-old"]
    assert site.names(token(groups=["operators"])) == ["handbook", "handbook-old", "payroll"]
    assert site.names(token(groups="editors")) == ["handbook"]
    with site.bearer(token(groups=["staff", "editors"])) as client:
        assert client.get("/rag/documents", params={"namespace": "payroll"}).status_code == 404
        ingest = {"namespace": "handbook-old", "texts": [{"name": "a", "text": "b"}]}
        assert client.post("/rag/ingest", json=ingest).status_code == 403, "editors may in handbook alone"
        assert client.get("/metrics").status_code == 403
    with site.bearer(token(groups=["editors"])) as client:
        answer = client.post("/rag/retrieve", json={"query": "x", "namespace": "handbook", "k": 4})
        assert answer.status_code == 403, "no right to read"
    with site.bearer(token(groups=["watchers"])) as client:
        assert client.get("/metrics").status_code == 200
        assert client.get("/rag/namespaces").json()["namespaces"] == []
    assert site.refused(token(groups=["unknown"]))[0] == 403
    assert site.refused(token(groups=None))[0] == 403
    assert site.refused(token(groups={"staff": 1}))[0] == 403


def test_a_right_in_one_namespace_is_none_in_another(site: Site) -> None:
    store, jobs = site.live.services.store, site.live.services.ingestor.jobs
    old = store.find_source("handbook-old", "bell").doc_id
    job_id = jobs.create("handbook-old", {"kind": "stdin"}, ["a"]).job_id
    with site.bearer(site.provider.token(groups=["archivists", "editors"])) as client:
        shown = client.get(f"/rag/documents/{old}/chunks", params={"namespace": "handbook-old"}).json()
        assert shown["chunks"][0]["version"] is None, "for those who may change it"
        refused = client.delete(f"/rag/jobs/{job_id}")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "missing_right")
        found = client.post("/rag/retrieve", json={"query": "lighthouse", "namespaces": ["hand*"]}).json()
        assert found["namespace"] == "handbook-old", "editors may not read handbook"
    with site.bearer(site.provider.token(groups=["editors"])) as client:
        answer = client.post("/rag/retrieve", json={"query": "lighthouse", "namespaces": ["hand*"]})
        assert answer.status_code == 403
    jobs.request_cancel(job_id)


def test_a_reader_who_may_write_elsewhere_sees_no_disabled_chunk(site: Site) -> None:
    where = {"params": {"namespace": "handbook-old"}}
    old = site.live.services.store.find_source("handbook-old", "bell").doc_id
    chunks, token = f"/rag/documents/{old}/chunks", site.provider.token
    with (
        site.bearer(token(groups=["operators"])) as operator,
        site.bearer(token(groups=["archivists", "editors"])) as reader,
    ):
        for disabled, status, n in ((True, 404, 0), (False, 200, 1)):
            version = operator.get(f"{chunks}/0", **where).json()["version"]
            change = {"version": version, "disabled": disabled}
            assert operator.patch(f"{chunks}/0", json=change, **where).status_code == 200
            assert reader.get(f"{chunks}/0", **where).status_code == status
            assert len(reader.get(chunks, **where).json()["chunks"]) == n


def test_labels_of_groups_decide_what_is_seen(site: Site) -> None:
    store = site.live.services.store
    document = store.find_source("handbook", "soup")
    store.set_labels("handbook", [document.doc_id], only=("secret",))
    try:
        seen = {}
        for groups in (["staff"], ["operators"]):
            with site.bearer(site.provider.token(groups=groups)) as client:
                rows = client.get("/rag/documents", params={"namespace": "handbook"}).json()["documents"]
                seen[groups[0]] = sorted(row["source"] for row in rows)
        assert seen == {"staff": ["bell", "skerryvore"], "operators": sorted(DOCUMENTS)}
        store.set_labels("handbook", [document.doc_id], only=("internal",))
        with site.bearer(site.provider.token()) as client:
            assert (
                len(client.get("/rag/documents", params={"namespace": "handbook"}).json()["documents"]) == 3
            )
    finally:
        store.set_labels("handbook", [document.doc_id], only=())


@pytest.mark.parametrize(
    ("claims", "said"),
    [
        ({"aud": "another"}, "another audience"),
        ({"aud": None}, "aud"),
        ({"iss": "https://evil.example"}, "another issuer"),
        ({"iss": None}, "iss"),
        ({"exp": int(time.time()) - 60}, "expired"),
        ({"exp": None}, "exp"),
        ({"exp": "soon"}, "malformed"),
        ({"nbf": NEXT_YEAR}, "not valid yet"),
        ({"iat": NEXT_YEAR}, "not valid yet"),
        ({"sub": None}, "sub"),
        ({"sub": ""}, "names nobody"),
        ({"sub": "x" * 256}, "names nobody"),
        ({"nonce": "n"}, "an ID token"),
    ],
)
def test_a_wrong_access_token_says_why(site: Site, claims: dict[str, Any], said: str) -> None:
    status, message = site.refused(site.provider.token(**claims))
    assert (status, said in message) == (401, True), message


def test_a_signature_of_another_kind_is_none(site: Site) -> None:
    """No algorithm, the public key taken for a password, keys that the token brings itself, other keys."""
    key = site.provider.keys[-1]
    claims = pyjwt.decode(site.provider.token(), options={"verify_signature": False})
    public = key.public_key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)  # type: ignore[union-attr]
    # PyJWT itself refuses a PEM as a password, so the token is made by hand
    body = part(json.dumps(claims).encode())
    forged = []
    for algorithm, digest in (("HS256", hashlib.sha256), ("HS512", hashlib.sha512)):
        head = part(json.dumps({"alg": algorithm, "kid": key.kid, "typ": "JWT"}).encode())
        forged.append(f"{head}.{body}.{part(hmac.new(public, f'{head}.{body}'.encode(), digest).digest())}")
    for algorithm in ("none", "None", "", None, "RS1", "ES256K", ["RS256"]):
        head = part(json.dumps({"alg": algorithm, "kid": key.kid}).encode())
        forged += [f"{head}.{body}.", f"{head}.{body}.{site.provider.token().split('.')[2]}"]
    strange = RSAKey.generate_key(2048, {"kid": key.kid})
    own = {"jwk": strange.as_dict(private=False), "jku": f"{site.provider.issuer}/mine", "kid": key.kid}
    forged.append(site.provider.token(key=strange))
    forged.append(site.provider.token(key=strange, header={"jku": own["jku"]}))
    forged.append(site.provider.token(key=ECKey.generate_key("P-256", {"kid": key.kid})))
    forged.append(site.provider.token(key=strange, header={"kid": "unknown"}))
    forged.append(site.provider.token() + "x")
    forged += ["eyJ..", "eyJ.e30.x", "eyJhbGciOiJSUzI1NiJ9.e30.x", "eyJ" + "a" * 20_000 + ".b.c"]
    for token in forged:
        status, _ = site.refused(token)
        assert status == 401, token
    assert site.names(site.provider.token()) == ["handbook", "handbook-old"]


@pytest.mark.filterwarnings("ignore::joserfc.errors.SecurityWarning")  # of EdDSA, by its newer names
@pytest.mark.parametrize("kind", ["EC", "OKP", "RSA"])
def test_keys_rotate(site: Site, kind: str) -> None:
    old = site.provider.token()
    assert site.names(old)
    site.provider.rotate(kind)
    _again(site)
    assert site.names(site.provider.token()) == ["handbook", "handbook-old"]
    assert site.refused(old)[0] == 401, "the provider has dropped its key"


def test_keys_that_are_old_are_asked_for_while_nobody_waits(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.names(site.provider.token())
    known = site.live.app.state.sso._provider
    later = [700.0]
    monkeypatch.setattr(known, "_clock", lambda: time.monotonic() + later[0])
    site.provider.down = True
    site.provider.asked.clear()
    assert site.names(site.provider.token()), "old keys count while the provider is down"
    eventually(lambda: bool(site.provider.asked), "the provider is asked")
    later[0] = 3700.0
    assert site.refused(site.provider.token())[0] == 503, "but not for ever"
    site.provider.down = False
    later[0] = 3800.0
    assert site.names(site.provider.token())


def test_unknown_keys_do_not_have_the_provider_asked_each_time(site: Site) -> None:
    site.names(site.provider.token())
    site.provider.asked.clear()
    _again(site)
    strange = RSAKey.generate_key(2048, {"kid": "strange"})
    for n in range(20):
        assert site.refused(site.provider.token(key=strange, header={"kid": f"k{n}"}))[0] == 401
    assert site.provider.asked.count("/keys") == 1


def test_a_provider_that_is_down_fails_sign_ins_and_nothing_else(
    site: Site, browser: httpx.Client, tmp_path: Path, model_path: Path
) -> None:
    sign_in(browser)
    token = site.provider.token()
    site.provider.down = True
    assert browser.get("/rag/namespaces").status_code == 200, "a session goes on"
    assert site.names(token), "known keys count"
    settings: dict[str, Any] = {
        "oidc_issuer": "http://127.0.0.1:9",
        "oidc_audience": AUDIENCE,
        "oidc_client_id": CLIENT,
        "oidc_public_url": PUBLIC,
        "oidc_groups": GROUPS,
        "api_key": "master",
    }
    with serving(tmp_path, model_path, **settings) as live, live.client() as client:
        answer = client.get("/rag/namespaces", headers={"Authorization": f"Bearer {token}"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "sign_on_unavailable")
        assert client.get("/sso/login").status_code == 503
        assert client.get("/rag/namespaces", headers={"Authorization": "Bearer master"}).status_code == 200
        assert client.get("/health").status_code == 200
        assert client.post("/sso/logout").json() == {"go_to": f"{PUBLIC}/playground"}


def test_keys_work_beside_and_come_first(site: Site, browser: httpx.Client) -> None:
    sign_in(browser)
    with site.tenants.client("robot", "read", "payroll") as robot:
        assert [one["name"] for one in robot.get("/rag/namespaces").json()["namespaces"]] == ["payroll"]
        key = robot.headers["Authorization"]
    names = browser.get("/rag/namespaces", headers={"Authorization": key}).json()["namespaces"]
    assert [one["name"] for one in names] == ["payroll"], "what is sent counts, not what the browser keeps"
    assert browser.get("/rag/namespaces", headers={"Authorization": "Bearer wrong"}).status_code == 401


def test_two_users_are_two_and_the_audit_log_names_them(site: Site) -> None:
    for sub, name in (("u-1", "ada"), ("u-2", "grace\nfake line")):
        token = site.provider.token(sub=sub, preferred_username=name, groups=["editors"])
        with site.bearer(token) as client:
            ingest = {"namespace": "handbook", "texts": [{"name": f"n-{sub}", "text": "A note of mine."}]}
            assert client.post("/rag/ingest", json=ingest).status_code == 202
    last = [event for event in site.tenants.audited() if event["what"] == "POST /rag/ingest"][-2:]
    assert [event["who"] for event in last] == ["ada", "gracefake line"]
    assert len({event["key"] for event in last}) == 2
    assert all(event["key"].startswith("sso_") for event in last)
