"""Traces: a span for the request and for each of its stages, below the client's span and above the engine's.
And logs: a JSON object per line that names its request."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ragserve import logs, tracing
from ragserve.config import Settings
from ragserve.engine.base import EngineTimings, GenerateChunk, GenerateRequest
from ragserve.errors import InvalidRequest
from sglang_ext.wire.protocol import ContextReport
from tests.unit.api.scripted_server import DOCUMENTS, Live, ScriptedEngine, eventually, serving

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
REPORT = ContextReport("epic", 90, 60, 10, {"host": 60}, 0.2, 0.1, 0.3, extend_ms=0.4, select_ms=0.1)


@pytest.fixture(scope="module")
def spans() -> Iterator[Any]:
    """Where the spans of this process go."""
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    tracing.start(exporter)
    with pytest.MonkeyPatch.context() as patch:
        # As SGLang sets the process's provider: nothing of ours may use it.
        patch.setattr("opentelemetry.trace._TRACER_PROVIDER", tracing._provider)
        yield exporter
    tracing.stop()


@pytest.fixture(scope="module")
def traced(spans: Any, tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Iterator[Live]:
    with serving(tmp_path_factory.mktemp("traced"), model_path, strategy="prefix") as live:
        live.index("docs", DOCUMENTS)
        yield live


def of_trace(exporter: Any, trace: str, last: str) -> dict[str, Any]:
    """The finished spans of a trace by name, once ``last`` is among them."""
    found: dict[str, Any] = {}

    def complete() -> bool:
        tracing._provider.force_flush()
        ended = [span for span in exporter.get_finished_spans() if f"{span.context.trace_id:032x}" == trace]
        found.update({span.name: span for span in ended})
        return last in found

    eventually(complete, f"a span {last!r}: {sorted(found)}")
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_a_query_is_a_trace_of_its_stages(
    spans: Any, traced: Live, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, str]] = []
    original = ScriptedEngine.generate

    async def generate(self: ScriptedEngine, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        seen.append(tracing.headers())
        async for chunk in original(self, request):
            yield GenerateChunk(
                chunk.text, chunk.usage, EngineTimings(0.5, 1.0), chunk.finish_reason, context=REPORT
            )

    monkeypatch.setattr(ScriptedEngine, "generate", generate)
    trace = f"{TRACE[:-1]}{int(stream)}"
    headers = {"traceparent": f"00-{trace}-{PARENT}-01", "X-Request-Id": f"asked-{stream}"}
    with traced.client() as client:
        body = {"query": "Who built the lighthouse?", "namespace": "docs", "stream": stream}
        assert client.post("/rag/query", json=body, headers=headers).status_code == 200
    found = of_trace(spans, trace, "POST /rag/query")
    assert set(found) == {
        "POST /rag/query",
        *("spelling", "embed", "search", "prompt", "generate", "attribute"),
        *("queue", "prefill", "decode", "load", "select", "compose", "recompute", "extend"),
    }
    root, generated = found["POST /rag/query"], found["generate"]
    assert f"{root.parent.span_id:016x}" == PARENT
    assert root.attributes["http.response.status_code"] == 200
    assert root.attributes["ragserve.request_id"] == f"asked-{stream}"
    for name in ("embed", "search", "prompt", "generate"):
        assert found[name].parent.span_id == root.context.span_id, name
    for name in ("queue", "prefill", "decode", "load", "compose", "recompute"):
        assert found[name].parent.span_id == generated.context.span_id, name
    for name in ("queue", "select"):
        assert abs(found[name].end_time - found["prefill"].start_time) < 2000, name  # of floating point
    assert abs(found["recompute"].end_time - found["recompute"].start_time - 300_000) < 2000  # 0.3 ms
    # The engine gets the place of its own spans.
    assert seen == [{"traceparent": f"00-{trace}-{generated.context.span_id:016x}-01"}]


def test_sglangs_routes_continue_the_trace(spans: Any, traced: Live) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    with traced.client() as client:
        client.post("/generate", json={"text": "x"}, headers=headers)
    span = of_trace(spans, TRACE, "POST upstream")["POST upstream"]
    sent = dict(traced.seen_upstream[-1]["scope"]["headers"])
    assert sent[b"traceparent"].decode() == f"00-{TRACE}-{span.context.span_id:016x}-01"


def test_a_failure_is_in_its_span(spans: Any, traced: Live) -> None:
    trace = TRACE[::-1]
    traced.engine.error = RuntimeError("broken")
    with traced.client() as client:
        body = {"query": "Who built the lighthouse?", "namespace": "docs"}
        headers = {"traceparent": f"00-{trace}-{PARENT}-01"}
        assert client.post("/rag/query", json=body, headers=headers).status_code == 500
    traced.engine.reset()
    found = of_trace(spans, trace, "POST /rag/query")
    assert not found["generate"].status.is_ok
    assert found["POST /rag/query"].attributes["http.response.status_code"] == 500


def test_without_tracing_nothing_is_imported() -> None:
    code = """
import sys
from ragserve import tracing
import ragserve.logs
with tracing.span("x") as span:
    assert span is None and tracing.headers() == {} and tracing.trace_id() is None
assert tracing.span("x") is tracing.span("y", a=1)
sys.exit(any(name.startswith("opentelemetry") for name in sys.modules))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("endpoint", "protocol", "address"),
    [
        ("localhost:4317", "grpc", "localhost:4317"),
        ("http://localhost:4318", "http/protobuf", "http://localhost:4318/v1/traces"),
        ("https://otel.lan/", "http/protobuf", "https://otel.lan/v1/traces"),
        ("http://otel.lan/own/path", "http/protobuf", "http://otel.lan/own/path"),
    ],
)
def test_the_engine_sends_its_spans_to_the_same_place(
    endpoint: str, protocol: str, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ragserve.engine.server_args import _observed

    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", raising=False)
    monkeypatch.delenv("SGLANG_LOGGING_CONFIG_PATH", raising=False)
    assert _observed(Settings(data_dir=tmp_path), "warning") == {}
    settings = Settings(data_dir=tmp_path, otlp_endpoint=endpoint, log_format="json")
    assert _observed(settings, "warning") == {"enable_trace": True, "otlp_traces_endpoint": address}
    assert os.environ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] == protocol
    config = json.loads(Path(os.environ["SGLANG_LOGGING_CONFIG_PATH"]).read_text(encoding="utf-8"))
    assert config["root"]["level"] == "WARNING"


def test_tracing_without_its_packages_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("grpc", "http"):
        monkeypatch.setitem(sys.modules, f"opentelemetry.exporter.otlp.proto.{kind}.trace_exporter", None)
    with pytest.raises(InvalidRequest, match=r"ragserve\[otel\]"):
        tracing.exporter("http://localhost:4318")


@pytest.fixture
def log_as(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[logs.LogFormat], io.StringIO]]:
    """Log in a format, and return what is written."""
    logger = logging.getLogger("ragserve")
    before = (logger.handlers[:], logger.level, logger.propagate, logs.ACCESS.level)

    def configure(form: logs.LogFormat) -> io.StringIO:
        written = io.StringIO()
        monkeypatch.setattr(sys, "stderr", written)
        logs.configure("info", form)
        return written

    yield configure
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])
    logs.ACCESS.setLevel(before[3])


def test_json_lines_name_their_request(
    client: httpx.Client, live: Live, docs: str, log_as: Callable[[logs.LogFormat], io.StringIO]
) -> None:
    lines = log_as("json")
    live.engine.error = RuntimeError("broken")
    body = {"query": "Who built the lighthouse?", "namespace": docs}
    client.post("/rag/query", json=body, headers={"X-Request-Id": "mine"})
    client.get("/rag/namespaces", headers={"X-Request-Id": "other"})
    eventually(lambda: '"other"' in lines.getvalue(), "the line of the second request")
    records = [json.loads(line) for line in lines.getvalue().splitlines()]
    failed, asked, listed = [one for one in records if one["logger"].startswith("ragserve.a")]
    assert (failed["level"], failed["request_id"]) == ("error", "mine")
    assert "RuntimeError: broken" in failed["exception"]
    assert (asked["method"], asked["route"], asked["status"]) == ("POST", "/rag/query", 500)
    assert asked["request_id"] == "mine"
    assert asked["milliseconds"] > 0
    assert (listed["route"], listed["status"], listed["request_id"]) == ("/rag/namespaces", 200, "other")
    assert all(one["time"].endswith("+00:00") for one in records)


def test_text_logs_have_no_line_per_request(
    client: httpx.Client, live: Live, log_as: Callable[[logs.LogFormat], io.StringIO]
) -> None:
    lines = log_as("text")
    client.get("/rag/namespaces")
    logging.getLogger("ragserve.test").info("a line")
    assert lines.getvalue().endswith("INFO ragserve.test: a line\n")
    assert "namespaces" not in lines.getvalue()


def test_the_engines_processes_log_json(tmp_path: Path) -> None:
    place = logs.engine_file(tmp_path, "warning")
    code = (
        "import json, logging, logging.config, sys;"
        "logging.config.dictConfig(json.load(open(sys.argv[1])));"
        "logging.getLogger('sglang.srt').info('unseen');"
        "logging.getLogger('sglang.srt').warning('seen %d', 1)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(place)], check=True, capture_output=True, text=True
    )
    (line,) = map(json.loads, done.stderr.splitlines())
    assert (line["level"], line["logger"], line["message"]) == ("warning", "sglang.srt", "seen 1")
