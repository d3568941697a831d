"""schemathesis over the whole OpenAPI description: examples, generated requests, and sequences of requests
that follow from each other's answers (its stateful phase, with links that it infers).

An operation is one request. A server error is a violation, and so is an answer whose status, media type,
headers or body the description does not have, or one from a document after its removal. Every round has a
seed of its own, so that rounds differ and each can be repeated."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

from tests.campaigns.progress import Progress
from tests.campaigns.site import Site

TARGET = 50_000
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "use_after_free",
)
PHASES = ("examples", "coverage", "fuzzing", "stateful")
TEXTS = {  # in the namespaces of the description's examples
    "skerryvore": "The lighthouse of Skerryvore was built by Alan Stevenson.",
    "bell rock": "The lighthouse of Bell Rock was built by Robert Stevenson.",
}
EXAMPLES = 25  # generated requests of a route, in a round
_TIMEOUT_S = 120


def failures(
    url: str, seed: int, phases: tuple[str, ...] = PHASES, examples: int = EXAMPLES
) -> Generator[tuple[str, int, list[str]], None, None]:
    """Run a round: yield each route or scenario, its number of requests, and what was wrong, as it comes."""
    import schemathesis
    from schemathesis.config import SchemathesisConfig
    from schemathesis.engine import Status, events, from_schema

    settings = {
        "seed": seed,
        "continue-on-failure": True,
        "request-timeout": _TIMEOUT_S,
        "generation": {"max-examples": examples, "database": "none"},
        "phases": {phase: {"enabled": phase in phases} for phase in PHASES},
        "checks": {"enabled": False} | {name: {"enabled": True} for name in CHECKS},
    }
    config = SchemathesisConfig.from_dict(settings)
    description = schemathesis.openapi.from_url(f"{url}/openapi.json", config=config)
    for event in from_schema(description).execute():
        if isinstance(event, events.ScenarioFinished):
            recorder = event.recorder
            wrong = [
                _told(check.name, check.failure_info.failure, recorder.interactions.get(case))
                for case, checks in recorder.checks.items()
                for check in checks
                if check.status == Status.FAILURE and not _of_stream(check.failure_info.failure)
            ]
            yield f"{event.phase.value} {recorder.label}", len(recorder.interactions), wrong
        elif isinstance(event, events.NonFatalError):
            yield event.label, 0, [f"schemathesis could not go on: {event.value!r}"]
        elif isinstance(event, events.FatalError):
            yield "", 0, [f"schemathesis ended: {event.exception!r}"]


def _of_stream(failure: Any) -> bool:
    """Event streams have tests of their own. schemathesis reads their ``schema``, a string in OpenAPI 3.1, as
    that of a list, as in OpenAPI 3.2."""
    return str(failure.title).startswith("SSE ")


def _told(check: str, failure: Any, interaction: Any) -> str:
    said = f"{check}: {failure.title}: {' '.join(failure.message.split())[:300]}"
    if interaction is None:
        return said
    request, answer = interaction.request, interaction.response
    body = (request.body or b"")[:300]
    came = "no answer" if answer is None else f"{answer.status_code} {answer.content[:200]!r}"
    return f"{said}; {request.method} {request.uri[:300]} {body!r} answered {came}"


def run(progress: Progress, url: str | None = None, **options: Any) -> None:
    """Rounds against ``url``, or a server of our own. ``options`` are those of `failures`."""
    with contextlib.ExitStack() as stack:
        site = None
        if url is None:
            # short contexts: a generated request may ask for 32,768 tokens
            flags = {"force_strategies": "true", "sparse_attention": "on", "context_length": 512}
            site = stack.enter_context(Site(folder=progress.folder / "data", **flags))
        while progress.goes_on():
            if site is not None:
                site.ensure_up()
                for space in ("default", "docs"):
                    site.put(space, TEXTS)
            seed = progress.random().randrange(2**31)
            for label, requests, wrong in failures(url or site.url, seed, **options):  # type: ignore[union-attr]
                with progress.operation(label.split()[0] if label else "none", requests):
                    for each in wrong:
                        progress.violation(f"{label}, seed {seed}: {each}")
                if not progress.goes_on():
                    break
