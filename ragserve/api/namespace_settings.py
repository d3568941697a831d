"""`/rag/namespaces/{name}/settings`: the defaults of a namespace's queries."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Body

from ragserve.api import namespace_examples as examples
from ragserve.api.access import Caller
from ragserve.api.documents import NamespaceName
from ragserve.api.json_route import JsonRoute
from ragserve.api.openapi import documented
from ragserve.api.services import Svc
from ragserve.setting_groups.per_namespace import NamespaceSettings

router = APIRouter(tags=["documents"], route_class=JsonRoute)
PATH = "/rag/namespaces/{name}/settings"


@router.get(
    PATH,
    summary="Show a namespace's settings",
    responses=documented(examples.NAMESPACE_SETTINGS, (400, 404, 503), description="Its own settings"),
)
async def settings(name: NamespaceName, svc: Svc, caller: Caller) -> NamespaceSettings:
    """Show the defaults of the namespace's queries; null: the server's, which `/info` has."""
    caller.require_visible(name)
    await asyncio.to_thread(svc.store.namespace, name)
    return await svc.own_settings(name)


@router.put(
    PATH,
    summary="Change a namespace's settings",
    responses=documented(
        examples.NAMESPACE_SETTINGS,
        (400, 404, 413, 415, 503, 507),
        description="The settings from now on",
    ),
)
async def change(
    name: NamespaceName,
    body: Annotated[NamespaceSettings, Body(openapi_examples=examples.NAMESPACE_SETTINGS_REQUESTS)],
    svc: Svc,
    caller: Caller,
) -> NamespaceSettings:
    """Replace the defaults of the namespace's queries. What is left out is the server's again.

    Queries that begin after the answer have them, where they say nothing themselves."""
    caller.require_visible(name)
    caller.require("ingest", name)
    await asyncio.to_thread(svc.store.set_settings, name, body.given())
    return body
