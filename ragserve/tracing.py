"""Spans of OpenTelemetry: for each request, for each stage of an answer, and for jobs. While tracing is off,
nothing of OpenTelemetry is imported and `span` returns a shared object that does nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from urllib.parse import urlsplit

from ragserve.errors import InvalidRequest

HTTP_PATH = "/v1/traces"
_NOTHING: AbstractContextManager[Any] = nullcontext()
_tracer: Any = None
_provider: Any = None


def otlp(endpoint: str) -> tuple[str, str]:
    """The protocol and the address of a collector: ``http://HOST:4318`` is OTLP over HTTP, ``HOST:4317`` over
    gRPC."""
    if not endpoint.startswith(("http://", "https://")):
        return "grpc", endpoint
    has_path = urlsplit(endpoint).path.strip("/")
    return "http/protobuf", endpoint if has_path else endpoint.rstrip("/") + HTTP_PATH


def exporter(endpoint: str) -> Any:
    """What sends spans to a collector. Raises InvalidRequest without the extra `otel`."""
    protocol, address = otlp(endpoint)
    try:
        # SGLang needs both, whichever it uses.
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http
    except ImportError as error:
        raise InvalidRequest(
            f"otlp_endpoint needs packages that are not installed: {error}.",
            hint="pip install 'ragserve[otel]', or omit otlp_endpoint.",
        ) from None
    return Grpc(endpoint=address, insecure=True) if protocol == "grpc" else Http(endpoint=address)


def start(exporter: Any) -> None:
    """Begin to trace, in this process. OpenTelemetry's own variables (OTEL_TRACES_SAMPLER, ...) apply."""
    global _tracer, _provider
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # Not the process's own provider: that one is SGLang's.
    name = os.environ.get("OTEL_SERVICE_NAME", "ragserve")
    _provider = TracerProvider(resource=Resource.create({SERVICE_NAME: name}))
    _provider.add_span_processor(BatchSpanProcessor(exporter))
    _tracer = _provider.get_tracer("ragserve")


def stop() -> None:
    """Send what is left, and trace no more."""
    global _tracer, _provider
    if _provider is not None:
        _provider.shutdown()
    _tracer = _provider = None


def is_on() -> bool:
    """Whether spans are recorded."""
    return _tracer is not None


def span(name: str, **attributes: Any) -> AbstractContextManager[Any]:
    """A span for the block, below the one around it. Yields None while tracing is off."""
    return _NOTHING if _tracer is None else _tracer.start_as_current_span(name, attributes=attributes)


def server_span(name: str, headers: Mapping[str, str]) -> AbstractContextManager[Any]:
    """A span for a request, below the client's if ``headers`` have its ``traceparent``. Only while on."""
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    context = TraceContextTextMapPropagator().extract(dict(headers))
    return _tracer.start_as_current_span(name, context=context, kind=SpanKind.SERVER)


def add(stages: Iterable[tuple[str, int, int]]) -> None:
    """Add spans that have ended, (name, start, end) in Unix nanoseconds, below the current one."""
    for name, start_ns, end_ns in stages:
        _tracer.start_span(name, start_time=start_ns).end(end_time=end_ns)


def headers() -> dict[str, str]:
    """``traceparent`` and ``tracestate`` of the current span; empty while tracing is off."""
    if _tracer is None:
        return {}
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier


def trace_id() -> str | None:
    """Hexadecimal id of the current trace; None outside of one, and while tracing is off."""
    if _tracer is None:
        return None
    from opentelemetry.trace import get_current_span

    context = get_current_span().get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid else None
