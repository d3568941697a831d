"""Ask a running server every question about one's own documents, with each strategy, and judge the answers.

Every question is streamed, as a client would, so that the passages are those of the very answer and the times
are the client's. Rows are kept in a folder, from which a run that was stopped goes on."""

from __future__ import annotations

import hashlib
import math
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ragserve.answering.results import Answer, Passage, SearchResults
from ragserve.client import Client, MessageEvent
from ragserve.client.calls import Call
from ragserve.engine.running_server import RunningServer
from ragserve.errors import InvalidRequest, NotFound, RagserveError, Unavailable
from ragserve.eval.judging import gold_of, judged, missed, supports
from ragserve.eval.own_questions import OwnQuestion
from ragserve.eval.run import Options
from ragserve.ingest.sources import scan
from ragserve.verification import rows
from ragserve.verification.rows import Row

T = TypeVar("T")


class OwnClient(Client):
    """Of a server that this process started. Waits for no server that has ended."""

    def __init__(self, server: RunningServer, **options: Any) -> None:
        super().__init__(server.url, **options)
        self._server = server

    def send(self, call: Call[T]) -> T:
        """As that of `Client`. Raises Unavailable at once if the server's process has ended."""
        self._server.check()
        return super().send(call)


@dataclass(frozen=True, slots=True)
class ServedPlan:
    """Questions by the name of their set, and how to ask; ``namespace``: of questions that name none. ``k``:
    passages that a search of each namespace returns where the options name no number."""

    sets: Mapping[str, Sequence[OwnQuestion]]
    options: Sequence[Options]
    namespace: str
    k: Mapping[str, int]


def namespaces_of(sets: Mapping[Any, Sequence[OwnQuestion]], default: str) -> list[str]:
    """All that are asked; ``default``: of questions that name none."""
    every = (question.namespace for questions in sets.values() for question in questions)
    return sorted({name or default for name in every})


def ask_served(
    client: Client, plan: ServedPlan, folder: Path, identity: Mapping[str, Any], progress: Callable[[], None]
) -> list[Row]:
    """Return a row for each strategy and question, in this order. Failures are rows, too, and are asked again
    by the next run with the same ``folder``; ``identity`` says what its rows must have in common.

    Raises InvalidRequest for the folder of another run."""
    rows.claim(folder, identity)
    done = {key: row for key, row in rows.read(folder).items() if not row.get("error")}
    found: list[Row] = []
    with rows.appending(folder / "rows-0.jsonl") as write:
        for options in plan.options:

            def ask(asked: tuple[str, OwnQuestion], options: Options = options) -> Row:
                head = {"set": asked[0], "id": asked[1].id, "strategy": str(options.label)}
                row = done.get(rows.key(head)) or head | _asked(client, asked[1], options, plan)
                progress()
                return row

            every = [(name, question) for name, questions in plan.sets.items() for question in questions]
            with ThreadPoolExecutor(options.concurrency) as pool:
                for row in pool.map(ask, every):
                    if rows.key(row) not in done:
                        write(row)
                    found.append(row)
    return found


@contextmanager
def ingested_folder(
    client: Client, folder: Path, *, fresh: bool, warm: bool, progress: Callable[[int, int], None]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Ingest a folder's files, under their paths in it, into a namespace that is dropped at the end of the
    block. Yields its name and facts of the ingestion. ``fresh``: not what a run that was stopped left behind;
    ``warm``: compute the documents' KV, too.

    Raises InvalidRequest for a folder without files, RagserveError if none can be read."""
    files = [Path(source) for source in scan([str(folder)], recursive=True).sources]
    if not files:
        raise InvalidRequest(f"There are no files in {folder}.", hint="Give the folder of your documents.")
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\0".encode())
    namespace = f"eval-{uuid.uuid4().hex[:12] if fresh else digest.hexdigest()[:12]}"
    failures: list[str] = []
    root = folder.resolve() if folder.is_dir() else folder.resolve().parent
    size = client.info().limits["max_upload_files"]
    try:
        for first in range(0, len(files), size):
            named = [(file.relative_to(root).as_posix(), file) for file in files[first : first + size]]
            job = client.wait(client.ingest_files(named, namespace=namespace), timeout_s=math.inf)
            failed = client.job_items(job.job_id, state="failed")
            failures += [f"{item.source}: {item.reason}" for item in failed]
            progress(min(len(files), first + size), len(files))
        if len(failures) == len(files):
            raise RagserveError(f"None of the {len(files)} files could be read: {failures[0]}")
        if warm:
            client.wait(client.warm(namespace), timeout_s=math.inf)
        facts = {"documents": len(files) - len(failures), "unreadable": failures}
        yield namespace, facts | {"digest": digest.hexdigest()[:16]}
    finally:
        with suppress(NotFound):  # if nothing was indexed
            client.drop_namespace(namespace)


def _asked(client: Client, question: OwnQuestion, options: Options, plan: ServedPlan) -> Row:
    namespace = question.namespace or plan.namespace
    try:
        found, answer, times = _streamed(client, question, options, namespace)
    except RagserveError as error:
        failure = {"answer": "", "passages": [], "error": f"{error.code}: {error.message}"}
        return _labels(question) | missed(question) | failure
    cited = {citation.index: citation.basis for citation in answer.citations}
    return (
        _labels(question)
        | judged(question, found.results, answer, options.k or plan.k[namespace])
        | times
        | {
            "answer": answer.answer,
            "passages": [_passage(p, question, found, cited.get(p.index)) for p in found.results],
            "strategy_used": answer.context.strategy,
            "choice": answer.context.choice,
            "prompt_tokens": answer.usage.prompt,
            "cached_tokens": answer.usage.cached,
            "computed_tokens": answer.context.tokens_by_tier.get("computed", 0),
            "completion_tokens": answer.usage.completion,
            "request_id": answer.request_id,
            "error": None,
        }
    )


def _streamed(
    client: Client, question: OwnQuestion, options: Options, namespace: str
) -> tuple[SearchResults, Answer, dict[str, float | None]]:
    """The passages, the answer, and the client's milliseconds to the first token and to the end."""
    fields = options.fields | {"namespace": namespace, "k": options.k}
    found, answer, first_ms = None, None, None
    started = time.perf_counter()
    for event in client.stream(question.question, **fields):
        if isinstance(event, SearchResults):
            found = event
        elif isinstance(event, MessageEvent) and first_ms is None:
            first_ms = (time.perf_counter() - started) * 1e3
        elif isinstance(event, Answer):
            answer = event
    if found is None or answer is None:
        raise Unavailable("The server's stream had no passages or no answer.")
    total_ms = (time.perf_counter() - started) * 1e3
    return found, answer, {"ttft_ms": first_ms and round(first_ms, 3), "total_ms": round(total_ms, 3)}


def _passage(
    passage: Passage, question: OwnQuestion, found: SearchResults, basis: str | None
) -> dict[str, Any]:
    shown = ("index", "source", "title", "page", "start", "end", "score", "text")
    return passage.model_dump(include=set(shown)) | {
        "in_prompt": passage.index <= found.documents_kept,
        "gold": bool(gold_of(passage, question)),
        "supports": supports(passage, question, found.results),
        "cited": basis,
    }


def _labels(question: OwnQuestion) -> dict[str, Any]:
    return question.model_dump(include={"question", "answers", "namespace"}) | {
        "gold_documents": list(question.documents),
        "gold_passages": list(question.passages),
    }
