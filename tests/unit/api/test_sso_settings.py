"""A server without single sign-on, and settings of it that do not fit together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ragserve.config import Settings, load
from ragserve.sso.single_sign_on import SingleSignOn
from tests.unit.api.scripted_server import Live


def test_without_an_issuer_there_is_no_sign_on(live: Live) -> None:
    with live.client() as client:
        assert client.get("/sso/session").json() == {"sign_in": False, "user": None}
        assert client.get("/sso/login").status_code == 404
        assert client.get("/sso/callback?state=x&code=y").status_code == 404
        assert client.post("/sso/logout").status_code == 404


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"oidc_client_id": "x"}, "needs oidc_issuer"),
        ({"oidc_issuer": "idp.example", "oidc_audience": "a"}, "no https address"),
        ({"oidc_issuer": "https://\N{SNOWMAN}\u200b.example", "oidc_audience": "a"}, "is no address"),
        ({"oidc_issuer": "http://idp.example", "oidc_audience": "a"}, "must be https"),
        ({"oidc_issuer": "https://u:p@idp.example", "oidc_audience": "a"}, "without user"),
        ({"oidc_issuer": "https://idp.example"}, "set oidc_client_id"),
        ({"oidc_issuer": "https://idp.example", "oidc_client_id": "a"}, "needs oidc_public_url"),
        ({"oidc_issuer": "https://idp.example", "oidc_audience": "a"}, "nobody could do anything"),
        ({"oidc_groups": {"a": {"rights": ["read"]}}}, "name its namespaces"),
        ({"oidc_groups": {"a": {"rights": ["reed"], "namespaces": ["*"]}}}, "a.rights.0"),
        ({"oidc_groups": {"a": {"rights": ["admin"], "namespaces": ["x"]}}}, "covers the whole server"),
        ({"oidc_groups": {"a": {"rights": ["admin"], "labels": ["no label"]}}}, "is no label"),
        ({"oidc_groups": {"a": 1}}, "oidc_groups: a"),
    ],
)
def test_wrong_settings_get_one_error(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    if list(settings) == ["oidc_groups"]:
        settings = {"oidc_issuer": "https://idp.example", "oidc_audience": "a", **settings}
    with pytest.raises(ValueError, match="oidc_") as wrong:
        load(data_dir=tmp_path, **settings)
    assert said in str(wrong.value)
    assert wrong.value.error_count() == 1  # type: ignore[attr-defined]


def test_settings_with_all_defaults_given_need_no_issuer() -> None:
    given = load().model_dump()
    assert Settings(**given) == load()


@pytest.mark.parametrize(
    ("public", "own"),
    [
        ("https://rag.example.com:443", "https://rag.example.com"),
        ("http://localhost:80/", "http://localhost"),
        ("https://Bücher.example/rag", "https://xn--bcher-kva.example"),
        ("http://[::1]:30000", "http://[::1]:30000"),
    ],
)
def test_the_own_page_is_known_by_the_origin_that_browsers_send(
    public: str, own: str, tmp_path: Path
) -> None:
    groups = {"staff": {"namespaces": ["*"], "rights": ["read"]}}
    settings = {"oidc_issuer": "https://idp.example", "oidc_client_id": "a", "oidc_groups": groups}
    sign_on = SingleSignOn(load(data_dir=tmp_path, oidc_public_url=public, **settings))
    assert sign_on.own_page(own, "same-origin")
    assert not sign_on.own_page(f"{own.removesuffix(':30000')}:8443", "same-origin")
