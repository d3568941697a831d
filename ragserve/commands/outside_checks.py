"""The doctor's checks of what others serve: the provider of single sign-on, and the sources of documents."""

from __future__ import annotations

import asyncio
import shutil
from importlib.util import find_spec
from typing import Literal

from ragserve.config import Settings

Status = Literal["ok", "warn", "fail", "skip"]
Finding = tuple[Status, str] | tuple[Status, str, str]
"""Status, what was found, and advice unless the status is ok or skip."""


def sign_on(settings: Settings) -> Finding:
    """The packages, and the provider's addresses. One that does not answer now may later."""
    if settings.oidc_issuer is None:
        return "skip", "no oidc_issuer"
    from ragserve.errors import Unavailable
    from ragserve.sso.provider import Provider
    from ragserve.sso.single_sign_on import check_installed

    check_installed()
    provider = Provider(settings.oidc_issuer)

    async def ask() -> None:
        try:
            await provider.discovered()
        finally:
            await provider.close()

    try:
        asyncio.run(ask())
    except Unavailable as error:
        advice = "The server starts, and API keys work; sign-ins fail until it answers as it should."
        return "warn", error.message, advice
    groups = f"{len(settings.oidc_groups):,} groups"
    return "ok", f"{settings.oidc_issuer} answers; {groups} have rights"


def sources(settings: Settings) -> Finding:
    """What the sources need that `ragserve sync` and clients may name."""
    from ragserve.ingest.sync_list import SyncList

    named = [each.source for each in SyncList(settings.data_dir).all()]
    named += [address for addresses in settings.client_sources.values() for address in addresses]
    if not named:
        return "skip", "no source is listed"
    missing = []
    if any(each.startswith("s3://") for each in named) and find_spec("botocore") is None:
        missing.append("botocore for S3 folders: pip install 'ragserve[s3]'")
    if any(each.startswith("git+") for each in named) and shutil.which("git") is None:
        missing.append("the program git for repositories: e.g. apt-get install git")
    if missing:
        return "fail", "not installed: " + missing[0].partition(":")[0], "; ".join(missing)
    return "ok", f"{len(named):,} listed"
