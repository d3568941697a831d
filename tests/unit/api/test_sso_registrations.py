"""Single sign-on at providers that want a client's secret elsewhere, or say of groups elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.unit.api.oidc_provider import OidcProvider, oidc_provider
from tests.unit.api.scripted_server import serving
from tests.unit.api.test_sso import settings_of, sign_in


@pytest.fixture
def provider() -> Iterator[OidcProvider]:
    with oidc_provider() as provider:
        yield provider


@contextmanager
def browser_at(
    provider: OidcProvider, data_dir: Path, model_path: Path, **options: Any
) -> Iterator[httpx.Client]:
    """A browser at a server that has not asked this provider yet."""
    with (
        serving(data_dir, model_path, **settings_of(provider), **options) as live,
        live.client(follow_redirects=False) as browser,
    ):
        yield browser


@pytest.mark.parametrize(
    ("registered", "listed", "asked"),
    [
        ("header", None, 1),
        ("header", ["client_secret_post"], 2),
        ("form", ["private_key_jwt", "client_secret_post"], 1),
        ("form", ["client_secret_basic", "client_secret_post"], 2),
    ],
)
def test_a_secret_is_sent_as_the_client_is_registered(
    provider: OidcProvider,
    tmp_path: Path,
    model_path: Path,
    registered: str,
    listed: list[str] | None,
    asked: int,
) -> None:
    provider.secret_in = registered
    provider.discovery = {} if listed is None else {"token_endpoint_auth_methods_supported": listed}
    with browser_at(provider, tmp_path, model_path) as browser:
        for times in (asked, 1):  # what was right is tried first from then on
            provider.asked.clear()
            assert sign_in(browser).status_code == 303
            assert provider.asked.count("/token") == times


def test_groups_that_only_userinfo_has_count(
    provider: OidcProvider, tmp_path: Path, model_path: Path
) -> None:
    provider.id_token, provider.userinfo = {"groups": None}, {"groups": ["staff"]}
    with browser_at(provider, tmp_path, model_path) as browser:
        for groups, said, status in (
            (None, {"groups": ["staff"]}, 303),
            ([], {"groups": ["staff"]}, 303),
            (None, {"groups": ["unknown"]}, 403),
            (None, {"groups": ["staff"], "sub": "another"}, 403),
            (["unknown"], {"groups": ["staff"]}, 403),
            (["archivists"], {"groups": ["operators"]}, 303),
        ):
            provider.id_token, provider.userinfo = {"groups": groups}, said
            assert sign_in(browser).status_code == status, said
        assert browser.get("/sso/session").json()["user"] == "ada"
        assert browser.get("/metrics").status_code == 403, "what an ID token says comes first"


def test_an_empty_object_of_the_id_token_hides_no_group_of_userinfo(
    provider: OidcProvider, tmp_path: Path, model_path: Path
) -> None:
    provider.id_token = {"groups": None, "realm_access": {}}
    provider.userinfo = {"realm_access": {"roles": ["staff"]}}
    with browser_at(provider, tmp_path, model_path, oidc_groups_claim="realm_access.roles") as browser:
        assert sign_in(browser).status_code == 303
