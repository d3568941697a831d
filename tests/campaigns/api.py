"""schemathesis over the whole OpenAPI description: examples, generated requests, and sequences of requests
that follow from each other's answers (its stateful phase, with links that it infers).

An operation is one request. A server error is a violation, and so is an answer whose status, media type,
headers or body the description does not have, or one from a document after its removal.

A round takes all the time that is left. schemathesis shares it out: a third goes to the examples and to the
requests that cover each field's limits, a route's share of it to each route, and more where those that a
route's share was enough to make take longer to send; generated requests and sequences take turns in the rest.
A round that ends early is followed by one with another seed."""

from __future__ import annotations

import contextlib
import functools
import shlex
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import requests
from requests.exceptions import ChunkedEncodingError

from tests.campaigns.progress import Progress
from tests.campaigns.site import Site

TARGET = 50_000
MINUTES = 60.0
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
FLAGS: dict[str, Any] = {
    "force_strategies": "true",
    "sparse_attention": "on",
    "context_length": 512,  # a generated request may ask for 32,768 tokens
    "max_new_tokens": 4,
    "session_ttl_s": 60,  # half of the valid queries begin one
}
MANY = 1_000  # requests, among which each phase must have some
EXAMPLES = 25  # generated requests of a route, in a round
_LINKED = "stateful, by a link"
_NO_HTTP = b"Invalid HTTP request received."
_LONGEST = 2**16 - 2**13  # of what uvicorn reads, less headers
_TIMEOUT_S = 120


class Asked(NamedTuple):
    """The requests of a route or of a sequence. ``links``: those that follow from an earlier answer.
    ``wrong``: what was wrong."""

    phase: str
    route: str
    requests: int
    links: int
    wrong: list[str]


def failures(
    url: str,
    seed: int,
    phases: tuple[str, ...] = PHASES,
    examples: int = EXAMPLES,
    seconds: float | None = None,
    refill: Callable[[], None] = lambda: None,
) -> Generator[Asked, None, None]:
    """Run a round of at most ``seconds``, as it comes. ``refill``: called before each phase, because
    sequences remove what the next ones begin with."""
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
    if seconds is not None:
        settings["max-time"] = max(1, round(seconds))
    config = SchemathesisConfig.from_dict(settings)
    description = schemathesis.openapi.from_url(f"{url}/openapi.json", config=config)
    for event in from_schema(description).execute():
        if isinstance(event, events.PhaseStarted) and event.phase.name.value in phases:
            refill()
        elif isinstance(event, events.ScenarioFinished):
            recorder = event.recorder
            wrong = [
                _told(check.name, check.failure_info.failure, recorder.interactions.get(case))
                for case, checks in recorder.checks.items()
                for check in checks
                if check.status == Status.FAILURE
                and not _is_known(check.name, check.failure_info.failure, recorder.interactions.get(case))
            ]
            links = sum(
                case.is_transition_applied
                for id, case in recorder.cases.items()
                if id in recorder.interactions
            )
            yield Asked(event.phase.value, recorder.label, len(recorder.interactions), links, wrong)
        elif isinstance(event, events.NonFatalError):
            sample = event.info.code_sample or ""
            said = f"schemathesis could not go on: {event.value!r}; {sample[:600]}"
            phase = "none" if event.phase is None else event.phase.value
            yield Asked(phase, event.label, 0, 0, [] if _is_cut_off(event.value, sample) else [said])
        elif isinstance(event, events.FatalError):
            yield Asked("none", "", 0, 0, [f"schemathesis ended: {event.exception!r}"])


def _is_known(check: str, failure: Any, interaction: Any) -> bool:
    """Return whether a failure is none of the server's.

    Event streams have tests of their own: schemathesis reads their ``schema``, a string in OpenAPI 3.1, as
    that of a list, as in OpenAPI 3.2. DELETE of a job cancels it, and the job can still be looked at. A
    request whose line is over 64 KiB is answered by uvicorn's parser, as any that is no HTTP."""
    if str(failure.title).startswith("SSE ") or interaction is None:
        return str(failure.title).startswith("SSE ")
    answer, uri = interaction.response, str(interaction.request.uri)
    too_long = answer is not None and answer.content == _NO_HTTP and len(uri) > _LONGEST
    return too_long or (check == "use_after_free" and "/rag/jobs/" in uri)


def _is_cut_off(error: Exception, sample: str) -> bool:
    """Return whether uvicorn's parser has answered and closed while the rest of a request's line was on its
    way, so that the answer may not be readable. ``sample``: the request as a command."""
    lines = (word for word in shlex.split(sample) if word.startswith("http"))
    return isinstance(error, requests.ConnectionError | ChunkedEncodingError) and any(
        len(line) > _LONGEST for line in lines
    )


def _told(check: str, failure: Any, interaction: Any) -> str:
    said = f"{check}: {failure.title}: {' '.join(failure.message.split())[:300]}"
    if interaction is None:
        return said
    request, answer = interaction.request, interaction.response
    body = (request.body or b"")[:300]
    came = "no answer" if answer is None else f"{answer.status_code} {answer.content[:200]!r}"
    return f"{said}; {request.method} {request.uri[:300]} {body!r} answered {came}"


def run(
    progress: Progress, url: str | None = None, refill: Callable[[], None] = lambda: None, **options: Any
) -> None:
    """Rounds against ``url``, or a server of our own. ``options`` are those of `failures`."""
    with contextlib.ExitStack() as stack:
        site = None
        if url is None:
            site = stack.enter_context(Site(folder=progress.folder / "data", **FLAGS))
            refill = functools.partial(_refill, site)
        while progress.goes_on():
            if site is not None:
                site.ensure_up()
            seed = progress.random().randrange(2**31)
            left = None if progress.minutes is None else 60 * progress.minutes - progress.seconds
            found = failures(url or site.url, seed, seconds=left, refill=refill, **options)  # type: ignore[union-attr]
            with contextlib.closing(found):
                for asked in found:
                    with progress.operation(asked.phase, asked.requests):
                        for each in asked.wrong:
                            progress.violation(f"{asked.phase} {asked.route}, seed {seed}: {each}")
                    progress.counts[_LINKED] += asked.links
                    if not progress.goes_on():
                        break
    missing = [kind for kind in (*PHASES, _LINKED) if not progress.counts[kind]]
    if missing and progress.operations >= MANY:
        progress.violation(f"there was no request of {', '.join(missing)}")


def _refill(site: Site) -> None:
    """Put what the description's examples name, and begin a session if there is none."""
    for space in ("default", "docs"):
        site.put(space, TEXTS)
    if not site.call("GET", "/rag/sessions")["sessions"]:
        site.ask(query="Who built Skerryvore?", namespace="docs", session="new", max_new_tokens=4)
