"""Single sign-on by OpenID Connect; off without an issuer."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, SecretStr

from ragserve.web_origin import origin_of

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class SignOnSettings(BaseModel):
    """Single sign-on; each field states its purpose and its unit."""

    oidc_issuer: str | None = Field(
        None,
        description="Single sign-on (extra `sso`): address of the OpenID Connect provider, its `issuer`.",
    )
    oidc_audience: str | None = Field(
        None, max_length=256, description="Access tokens for this audience are taken in place of API keys."
    )
    oidc_client_id: str | None = Field(
        None, max_length=256, description="Client id of the playground's sign-in. Needs oidc_public_url."
    )
    oidc_client_secret: SecretStr | None = Field(
        None, description="Its secret, if the provider gave one; PKCE is used in any case."
    )
    oidc_public_url: str | None = Field(
        None,
        description="Address of this server as browsers know it. Register ADDRESS/sso/callback with the "
        "provider.",
    )
    oidc_scopes: str = Field(
        "openid profile email",
        max_length=512,
        description="Scopes that the sign-in asks for, openid among them.",
    )
    oidc_groups_claim: str = Field(
        "groups",
        max_length=256,
        description="Claim with a user's groups, in ID and access tokens; a.b: field b of claim a.",
    )
    oidc_groups: dict[str, Any] = Field(
        default_factory=dict,
        description="What groups may do, by group: `namespaces`, `rights`, `labels` and `limits`, as of API "
        "keys.",
    )
    oidc_session_s: int = Field(
        28_800,
        ge=60,
        le=2_592_000,
        description="Seconds after which a sign-in ends. Groups are as of its time.",
    )


def sign_on_conflict(settings: SignOnSettings) -> str | None:
    """What is wrong with these settings together, and what to change; None if nothing is."""
    from ragserve.sso.group_grants import group_grants

    fields = SignOnSettings.model_fields.items()  # a worker is given all settings, the defaults among them
    given = [
        name
        for name, field in fields
        if getattr(settings, name) != field.get_default(call_default_factory=True)
    ]
    if settings.oidc_issuer is None:
        return f"{given[0]}: single sign-on needs oidc_issuer, the address of the provider" if given else None
    for name in ("oidc_issuer", "oidc_public_url"):
        address = getattr(settings, name)
        if address is not None and (problem := address_problem(address)):
            return f"{name}: {problem}"
    if settings.oidc_client_id is None and settings.oidc_audience is None:
        return (
            "oidc_issuer: set oidc_client_id for sign-in to the playground, oidc_audience for access tokens, "
            "or both"
        )
    if settings.oidc_client_id is not None and settings.oidc_public_url is None:
        return "oidc_client_id: the sign-in needs oidc_public_url, this server's address as browsers know it"
    if settings.oidc_client_id is not None and "openid" not in settings.oidc_scopes.split():
        return "oidc_scopes: the scope openid must be among them"
    if not settings.oidc_groups:
        return (
            "oidc_groups: nobody could do anything: say what groups may do, as "
            '{"staff": {"namespaces": ["*"], "rights": ["read"]}}'
        )
    try:
        group_grants(settings.oidc_groups)
    except ValueError as error:
        return f"oidc_groups: {error}"
    return None


def address_problem(address: str, *, query: bool = False) -> str | None:
    """What keeps an address from being used for sign-on; None if nothing does. ``query``: it may have one."""
    try:
        parts = urlsplit(address)
        host, _ = parts.hostname, parts.port
        if host and parts.scheme in ("http", "https"):
            origin_of(address)
    except ValueError:
        return f"{address[:80]!r} is no address"
    if (
        not host
        or (parts.query and not query)
        or parts.fragment
        or parts.username is not None
        or not address.isprintable()
    ):
        return f"{address[:80]!r} is no https address without user, query and fragment"
    if parts.scheme != "https" and not (parts.scheme == "http" and host in _LOOPBACK):
        return f"{address[:80]!r} must be https; http is for loopback only"
    return None
