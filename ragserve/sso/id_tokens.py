"""Tokens of the provider: signature, issuer, audience and times, and what of them counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ragserve.errors import Unauthorized
from ragserve.sso.provider import ALGORITHMS, Provider

_MOST_CHARS = 16_384
_LEEWAY_S = 30.0
_OF_ID_TOKENS = ("nonce", "at_hash", "c_hash")
_SUBJECT_CHARS = 255  # as OpenID Connect bounds it


def looks_like_token(secret: str) -> bool:
    """Return whether a bearer secret may be a provider's token: three parts, of which the first is JSON."""
    return secret.startswith("eyJ") and secret.count(".") == 2


async def access_claims(provider: Provider, token: str, audience: str) -> Mapping[str, Any]:
    """The claims of an access token for ``audience``. Raises ``Unauthorized``, and ``Unavailable`` while the
    provider's keys are not known."""
    claims = await _claims(provider, token, audience)
    if any(name in claims for name in _OF_ID_TOKENS):
        raise _refused("it is an ID token, which is for the client that signed somebody in")
    return claims


async def id_claims(provider: Provider, token: str, client: str, nonce: str) -> Mapping[str, Any]:
    """The claims of an ID token for ``client`` from the sign-in with this nonce. Raises as
    `access_claims`."""
    claims = await _claims(provider, token, client)
    if claims.get("nonce") != nonce or claims.get("azp", client) != client:
        raise _refused("it is of another sign-in")
    return claims


async def _claims(provider: Provider, token: str, audience: str) -> Mapping[str, Any]:
    import jwt

    if len(token) > _MOST_CHARS:
        raise _refused(f"it has more than {_MOST_CHARS:,} characters")
    try:
        header = jwt.get_unverified_header(token)
        algorithm, key_id = header.get("alg"), header.get("kid")
        if algorithm not in ALGORITHMS:
            raise _refused("its signature is of no kind that is taken")
        claims = jwt.decode(
            token,
            await provider.key(key_id, algorithm),
            algorithms=[algorithm],
            audience=audience,
            issuer=provider.issuer,
            leeway=_LEEWAY_S,
            options={"require": ["exp", "iss", "aud", "sub"]},
        )
    except jwt.ExpiredSignatureError:
        raise _refused("it has expired", code="token_expired") from None
    except (jwt.PyJWTError, ValueError, TypeError, RecursionError) as error:
        raise _refused(_why(error)) from None
    if not isinstance(claims["sub"], str) or not 0 < len(claims["sub"]) <= _SUBJECT_CHARS:
        raise _refused("it names nobody")
    return claims


def _why(error: Exception) -> str:
    import jwt

    for kind, why in (
        (jwt.InvalidAudienceError, "it is for another audience"),
        (jwt.InvalidIssuerError, "it is of another issuer"),
        (jwt.ImmatureSignatureError, "it is not valid yet"),
        (jwt.MissingRequiredClaimError, str(error)),
        (jwt.InvalidSignatureError, "its signature is wrong"),
    ):
        if isinstance(error, kind):
            return why
    return "it is malformed"


def _refused(why: str, code: str | None = None) -> Unauthorized:
    return Unauthorized(
        f"The access token is not accepted: {why}.", hint="Get a new one.", code=code or "invalid_token"
    )
