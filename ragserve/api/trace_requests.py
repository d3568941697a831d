"""Middleware that gives every request a span. The app has it only while tracing is on."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragserve import tracing

_PROBES = frozenset({"/health", "/ready", "/metrics"})


class TraceRequests:
    """Continues the client's trace, and hands on ``traceparent`` of its own span to SGLang's routes."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _PROBES:
            await self._app(scope, receive, send)
            return
        with tracing.server_span(scope["method"], Headers(scope=scope)) as span:
            own = [(name.encode(), value.encode()) for name, value in tracing.headers().items()]
            kept = [(k, v) for k, v in scope["headers"] if k.lower() not in (b"traceparent", b"tracestate")]
            inner = {**scope, "headers": [*kept, *own], "state": dict(scope.get("state", {}))}

            async def send_noting_status(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                await send(message)

            try:
                await self._app(inner, receive, send_noting_status)
            finally:
                route = getattr(inner.get("route"), "path", "upstream")
                span.update_name(f"{scope['method']} {route}")
                span.set_attribute("http.request.method", scope["method"])
                span.set_attribute("http.route", route)
                span.set_attribute("ragserve.request_id", inner["state"].get("request_id", ""))
