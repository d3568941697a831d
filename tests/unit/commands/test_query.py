"""`ragserve query` against a running server."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from ragserve.commands import query
from ragserve.errors import EngineError, InvalidRequest, NotFound, RagserveError, Unavailable
from tests.unit.api.scripted_server import DOCUMENTS, Live

QUESTION = "Who built the lighthouse of Skerryvore?"


def run(live: Live, *arguments: str, question: str = QUESTION) -> str:
    app = typer.Typer()
    query.register(app)
    result = CliRunner().invoke(app, [question, "--url", live.url, *arguments])
    if result.exception is not None:
        raise result.exception
    return result.output


@pytest.mark.parametrize("stream", [[], ["--stream"]], ids=["whole", "streamed"])
def test_answer_citations_and_timings_are_printed(live: Live, docs: str, stream: list[str]) -> None:
    output = run(live, "--namespace", docs, "-n", docs, *stream)
    lines = output.splitlines()
    assert lines[0] == "Alan Stevenson [1]."
    assert lines[2].startswith("[1] Skerryvore, skerryvore (")
    assert lines[3].strip() == DOCUMENTS["skerryvore"]
    assert "ms: embed " in output
    assert "total " in output


def test_what_was_corrected_is_printed(live: Live, docs: str) -> None:
    output = run(live, "-n", docs, question="Which was built at Skeryvore?")
    assert 'read "Skeryvore" as "Skerryvore"' in output
    assert 'read "' not in run(live, "-n", docs)


def test_json_is_the_servers(live: Live, docs: str) -> None:
    answer = json.loads(run(live, "-n", docs, "--json", "--k", "2"))
    assert answer["answer"] == "Alan Stevenson [1]."
    assert answer["context"]["documents_retrieved"] == 2


def test_streamed_json_is_an_event_a_line(live: Live, docs: str) -> None:
    events = [json.loads(line) for line in run(live, "-n", docs, "--json", "--stream").splitlines()]
    assert [event["event"] for event in events][-2:] == ["final_answer", "done"]


def test_a_streamed_text_may_hold_any_character(live: Live) -> None:
    """U+2028 and its like end lines for Python, and for nobody else."""
    live.index("aside", {"aside": "Leeks\u2028potatoes\u0085cream."})
    lines = run(live, "-n", "aside", "--json", "--stream").rstrip("\n").split("\n")
    found = next(event["data"] for event in map(json.loads, lines) if event["event"] == "search_results")
    assert found["results"][0]["text"] == "Leeks\u2028potatoes\u0085cream."


def test_several_namespaces_are_asked_by_their_names_and_by_a_pattern(live: Live, docs: str) -> None:
    live.index("docs-too", {"glass": "The lighthouse of glass was built by nobody."})
    for names in (f"{docs}+docs-too", "docs*"):
        assert json.loads(run(live, "-n", names, "--json"))["namespace"] == "docs+docs-too"
    assert "[1] docs, Skerryvore, skerryvore (" in run(live, "-n", "docs*")


def test_options_arrive(live: Live, docs: str) -> None:
    chosen = '{"op":"eq","field":"name","value":"soup"}'
    by_words = json.loads(run(live, "-n", docs, "--json", "--retrieval", "lexical"))
    assert by_words["retrieval"] == "lexical"
    run(
        live,
        "-n",
        docs,
        "--filter",
        chosen,
        "--strategy",
        "full",
        "--max-new-tokens",
        "5",
        "--temperature",
        "0.5",
    )
    request = live.engine.requests[-1]
    assert (request.strategy, request.sampling.max_new_tokens, request.sampling.temperature) == (
        "full",
        5,
        0.5,
    )
    run(live, "-n", docs, "--strategy", "epic:first=16,force=true")
    assert (live.engine.requests[-1].strategy, live.engine.requests[-1].options) == ("epic", {"first": 16})


@pytest.mark.parametrize("stream", [[], ["--stream"]], ids=["whole", "streamed"])
def test_what_the_server_refuses_is_said(live: Live, stream: list[str]) -> None:
    with pytest.raises(RagserveError, match="nowhere") as caught:
        run(live, "-n", "nowhere", *stream)
    assert caught.value.code == "namespace_not_found"
    assert isinstance(caught.value, NotFound)


def test_an_error_in_the_stream_is_said(live: Live, docs: str) -> None:
    live.engine.error, live.engine.error_after = EngineError("The engine failed.", hint="Look at it."), 1
    with pytest.raises(RagserveError) as caught:
        run(live, "-n", docs, "--stream")
    assert (caught.value.message, caught.value.hint, caught.value.code) == (
        "The engine failed.",
        "Look at it.",
        "engine_error",
    )


@pytest.mark.parametrize("stream", [[], ["--stream"]], ids=["whole", "streamed"])
def test_no_server(live: Live, stream: list[str]) -> None:
    with pytest.raises(Unavailable, match="ragserve serve"):
        run(live, "--url", "http://127.0.0.1:9", *stream)


@pytest.mark.parametrize("text", ["lang=en", "1" * 5000, "[" * 100_000], ids=lambda text: text[:2])
def test_a_filter_that_is_no_json(live: Live, text: str) -> None:
    with pytest.raises(InvalidRequest, match="--filter is not JSON"):
        run(live, "--filter", text)
