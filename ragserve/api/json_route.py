"""Routes that check what their caller may do before they read its body."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from ragserve.api.access import check_route
from ragserve.api.body import MAX_NAMES, media_type, parse_json
from ragserve.api.errors import UnsupportedMediaType


class CheckedRoute(APIRoute):
    """Calls `check_route` first: FastAPI reads and parses a body before its dependencies run."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def checked(request: Request) -> Response:
            await check_route(request)
            return await handler(request)

        return checked


class JsonRoute(CheckedRoute):
    """Also parses the body with `parse_json` before FastAPI validates it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = APIRoute.get_route_handler(self)

        async def parsed(request: Request) -> Response:
            await check_route(request)
            if request.method in ("POST", "PUT", "PATCH"):
                if (kind := media_type(request)) != "application/json":
                    raise UnsupportedMediaType(
                        f"This route takes JSON, not {kind or 'a body without Content-Type'}.",
                        hint="Set Content-Type: application/json.",
                    )
                # Request.json() returns this, so the body is parsed once
                request._json = await parse_json(await request.body(), MAX_NAMES)
            return await handler(request)

        return parsed
