"""Cost of the product on top of the engine: milliseconds a query and queries a second, beside plain SGLang on
the same prompts.

The rival gets ready-made prompts: token ids built from /rag/retrieve before the clock runs, sent to SGLang's
own /generate on the same server, taking turns with ours. Both sides have asked everything once before, so
both find their prompts in the prefix cache."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from ragserve.answering.prompt import PromptBuilder, PromptDocument
from ragserve.client import Client
from ragserve.engine.running_server import running_server
from ragserve.errors import InvalidRequest, RagserveError
from ragserve.verification import report

CORPUS = Path(__file__).resolve().parents[2] / "examples" / "corpus" / "files"
_K = 5
_MAX_NEW_TOKENS = 16
_CLIENTS = (1, 4, 16)
_EACH = 8  # least questions of each client under load
# Each prompt is cached twice, for ours and for the rival: all must fit the 65,536 tokens of a CPU machine's
# KV pool.
_QUESTIONS = 24
_TEMPLATES = ("What is the capital of {}?", "Which languages are spoken in {}?", "What does {} export?")


@dataclass(frozen=True, slots=True)
class OverheadSample:
    """A question asked both ways, in milliseconds."""

    ours: float
    embed: float
    search: float
    engine: float
    plain: float
    same_answer: bool

    @property
    def overhead(self) -> float:
        """Our total without embedding, search and engine."""
        return self.ours - self.embed - self.search - self.engine

    @property
    def beyond_plain(self) -> float:
        """Our total without embedding, search and the rival's total."""
        return self.ours - self.embed - self.search - self.plain


@dataclass(frozen=True, slots=True)
class BenchQuestion:
    """Both request bodies of one question; the model gets the same tokens."""

    ours: dict[str, Any]
    plain: dict[str, Any]


def run(
    out_dir: Path | None = None,
    *,
    quick: bool = False,
    url: str | None = None,
    clients: Sequence[int] = _CLIENTS,
    **flags: Any,
) -> dict[str, Any]:
    """Measure a server started for it with the settings ``flags`` over the example corpus, or the one at
    ``url`` (with RAGSERVE_API_KEY, if needed), also with many ``clients`` at a time.

    Raises RagserveError if an answer fails or the two sides did not see the same prompt."""
    rounds, load = (1, 16) if quick else (5, 240)
    with contextlib.ExitStack() as stack:
        if url is None:
            url = stack.enter_context(running_server(warm_ingested=False, **flags)).url
        key = os.environ.get("RAGSERVE_API_KEY")
        headers = {"Cache-Control": "no-store"}  # nobody's questions: not for the server's query log
        if key:
            headers["Authorization"] = f"Bearer {key}"
        http = stack.enter_context(httpx.Client(base_url=url, headers=headers, timeout=300))
        api = stack.enter_context(Client(url, api_key=key))
        namespace = stack.enter_context(example_corpus(api, 8 if quick else None))
        questions = _questions(http, api, namespace, quick=quick)
        for question in questions:
            _sample(http, question, ours_first=True)
        samples = [
            _sample(http, question, ours_first=i % 2 == 0)
            for _ in range(rounds)
            for i, question in enumerate(questions)
        ]
        rows = _latency_rows(samples)
        for at_once in clients:
            for name, route, bodies in (
                ("/rag/query", "/rag/query", [question.ours for question in questions]),
                ("plain SGLang /generate", "/generate", [question.plain for question in questions]),
            ):
                n = max(load, (1 if quick else _EACH) * at_once)
                seconds, answers = _under_load(url, headers, route, bodies, at_once, n)
                rows.append({"what": name, "clients": at_once, "n": n, "queries_s": n / seconds})
                rows += _server_rows(answers, at_once)
        info = api.info()
    workload = {
        "model": Path(info.model).name,
        "device": info.engine["device"],
        "questions": len(questions),
        "k": _K,
        "max_new_tokens": _MAX_NEW_TOKENS,
        "same answers": f"{sum(s.same_answer for s in samples)} of {len(samples)}",
    }
    note = (
        "Milliseconds as the client sees them; one client, both ways in turns, prompts in the prefix cache "
        "of both. Our overhead is the total without embedding, search and engine time; it includes the "
        "client's own. /rag/query embeds and searches; plain SGLang does not. By the server: from the "
        "request's arrival there on, without the client."
    )
    return report.write("api", workload, rows, out=out_dir / "api.json" if out_dir else None, note=note)


@contextlib.contextmanager
def example_corpus(api: Client, most: int | None) -> Iterator[str]:
    """Ingest the example corpus, or ``most`` of its files, into a new namespace, dropped at the end of the
    block."""
    files = sorted(path for path in CORPUS.glob("*") if path.is_file())[:most]
    if not files:
        raise InvalidRequest(
            f"There is no example corpus at {CORPUS}.", hint="Run from a checkout of the repository."
        )
    namespace = f"bench-api-{uuid.uuid4().hex[:8]}"
    job = api.wait(api.ingest_files(files, namespace=namespace))
    if (indexed := job.counts.get("indexed", 0)) != len(files):
        raise RagserveError(f"Only {indexed} of {len(files)} files of the example corpus could be ingested.")
    try:
        yield namespace
    finally:
        api.drop_namespace(namespace)


def _questions(http: httpx.Client, api: Client, namespace: str, *, quick: bool) -> list[BenchQuestion]:
    """Make questions over every document, with the prompts that the server builds for them."""
    info = api.info()
    prompts = PromptBuilder.load(info.tokenizer, info.system_prompt)
    texts = example_questions(api, namespace, 1 if quick else None)
    texts = texts[:: -(-len(texts) // _QUESTIONS)]
    questions = []
    for text in texts:
        body = {"query": text, "namespace": namespace, "k": _K}
        found = _checked(http.post("/rag/retrieve", json=body))["results"]
        documents = [PromptDocument("", passage["title"], passage["text"]) for passage in found]
        room = info.limits["max_context_tokens"] - _MAX_NEW_TOKENS - 64
        prompt = prompts.build(text, documents, max_prompt_tokens=room)
        if prompt.documents_kept != len(documents):
            raise InvalidRequest(
                "The model's context is too small for the benchmark's prompts.",
                hint="Serve with a longer context.",
            )
        sampling = {"temperature": 0.0, "max_new_tokens": _MAX_NEW_TOKENS, "stop": list(prompt.stop)}
        plain = {"input_ids": prompt.input_ids, "sampling_params": sampling}
        questions.append(BenchQuestion({**body, "max_new_tokens": _MAX_NEW_TOKENS}, plain))
    return questions


def example_questions(api: Client, namespace: str, kinds: int | None = None) -> list[str]:
    """Questions about every document of `example_corpus`, of ``kinds`` kinds each."""
    sources = [document.source for document in api.documents(namespace)]
    subjects = [Path(source).stem.replace("-", " ").title() for source in sources]
    return [template.format(subject) for template in _TEMPLATES[:kinds] for subject in subjects]


def _sample(http: httpx.Client, question: BenchQuestion, *, ours_first: bool) -> OverheadSample:
    sides = [("/rag/query", question.ours), ("/generate", question.plain)]
    results = {route: _timed(http, route, body) for route, body in (sides if ours_first else sides[::-1])}
    (our_ms, answer), (plain_ms, generated) = results["/rag/query"], results["/generate"]
    if answer["usage"]["prompt"] != len(question.plain["input_ids"]):
        raise RagserveError("The server's prompt and the rival's differ: the comparison would mean nothing.")
    timings = answer["timings"]
    same = answer["answer"] == generated["text"].strip()
    parts = (timings["embed_ms"], timings["search_ms"], timings["engine_ms"])
    return OverheadSample(our_ms, *parts, plain_ms, same)


def _timed(http: httpx.Client, route: str, body: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    start = time.perf_counter()
    response = http.post(route, json=body)
    elapsed = (time.perf_counter() - start) * 1e3
    return elapsed, _checked(response)


def _latency_rows(samples: Sequence[OverheadSample]) -> list[dict[str, Any]]:
    measured = {
        "/rag/query, total": "ours",
        "  embedding": "embed",
        "  search": "search",
        "  engine": "engine",
        "  our overhead, the client's own and HTTP included": "overhead",
        "plain SGLang /generate, total": "plain",
        "/rag/query beyond embedding, search and plain SGLang, per question": "beyond_plain",
    }
    rows = []
    for what, field in measured.items():
        values = [getattr(sample, field) for sample in samples]
        percentiles = {f"p{q}_ms": report.percentile(values, q) for q in (50, 99)}
        rows.append({"what": what, "clients": 1, "n": len(values), **percentiles})
    return rows


def _server_rows(answers: Sequence[dict[str, Any]], clients: int) -> Iterator[dict[str, Any]]:
    """Make rows of what the server says of its answers; none for answers without timings."""
    all_timings = [answer["timings"] for answer in answers if "timings" in answer]
    stages = {"total": "total_ms", "embedding": "embed_ms", "search": "search_ms", "engine": "engine_ms"}
    values = {name: [each[field] for each in all_timings] for name, field in stages.items()}
    total, *parts = values.values()
    values["our overhead"] = [whole - sum(own) for whole, *own in zip(total, *parts, strict=True)]
    for name, times in values.items():
        if times:
            percentiles = {f"p{q}_ms": report.percentile(times, q) for q in (50, 99)}
            yield {"what": f"  {name}, by the server", "clients": clients, "n": len(times), **percentiles}


def _under_load(
    url: str, headers: dict[str, str], route: str, bodies: Sequence[dict[str, Any]], clients: int, total: int
) -> tuple[float, list[dict[str, Any]]]:
    """Seconds until ``clients``, each with its own connection, have ``total`` answers, and these."""
    answers: list[dict[str, Any]] = []
    numbers = iter(range(total))
    lock = threading.Lock()
    ready = threading.Barrier(clients + 1)

    def work() -> None:
        with httpx.Client(base_url=url, headers=headers, timeout=300) as http:
            http.get("/health")  # connect before the clock runs
            ready.wait(60)
            while True:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                answers.append(_checked(http.post(route, json=bodies[number % len(bodies)])))

    with ThreadPoolExecutor(clients) as pool:
        working = [pool.submit(work) for _ in range(clients)]
        ready.wait(60)
        start = time.perf_counter()
        for one in working:
            one.result()
        return time.perf_counter() - start, answers


def _checked(response: httpx.Response) -> dict[str, Any]:
    if response.is_error:
        request = response.request
        raise RagserveError(
            f"{request.method} {request.url} answered {response.status_code}: {response.text[:300]}"
        )
    return dict(response.json())
