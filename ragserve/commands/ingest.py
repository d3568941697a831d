"""`ragserve ingest`: files, directories, URLs or standard input into a namespace."""

from __future__ import annotations

import io
import json
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from ragserve.commands.warm import check_warm, show_warm
from ragserve.config import Settings, load
from ragserve.errors import InvalidRequest, TooLarge

__all__ = ["register"]

_EPILOG = (
    "Exit status: 0 all files are indexed or unchanged; 3 some files failed (each is listed with its reason); 1 nothing could run, or "
    "an error such as a full disk ended the run; 2 wrong options; 130 interrupted by Ctrl-C, 143 by SIGTERM. After an interruption, a "
    "crash or a kill, the same command continues where it was: what is indexed already is skipped."
)


def register(app: typer.Typer) -> None:
    app.command("ingest", epilog=_EPILOG)(ingest)


def ingest(
    inputs: Annotated[
        list[str] | None,
        typer.Argument(metavar="PATH|URL|-...", help="Files, directories, http(s) URLs, or - for stdin."),
    ] = None,
    namespace: Annotated[
        str, typer.Option("--namespace", "-n", help="Where documents go; made if it does not exist.")
    ] = "default",
    recursive: Annotated[
        bool, typer.Option("--recursive", "-r", help="Descend into directories. Hidden ones are left out.")
    ] = False,
    globs: Annotated[
        list[str] | None,
        typer.Option(
            "--glob",
            help="Take only these of a directory: by name, or by path within it if the pattern has a /. Repeatable.",
        ),
    ] = None,
    follow_changes: Annotated[
        bool, typer.Option("--follow-changes", help="Keep running and ingest what changes, until Ctrl-C.")
    ] = False,
    metadata: Annotated[
        list[str] | None, typer.Option(help="key=value for every document, for filters. Repeatable.")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="Name of the document from stdin; its extension is a hint at the format."),
    ] = None,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove documents whose file vanished from a directory given.")
    ] = False,
    warm: Annotated[
        bool,
        typer.Option(
            "--warm",
            help="Then compute their KV into the document cache: by the server on this folder, or an engine here.",
        ),
    ] = False,
    resume: Annotated[str | None, typer.Option(metavar="JOB", help="Finish this job instead.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON report on stdout, nothing else.")] = False,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of registry and indexes.")] = None,
    model: Annotated[str | None, typer.Option(help="Serving model: its tokenizer cuts the chunks.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Tokenizer where it differs from the model's.")
    ] = None,
    embedder: Annotated[str | None, typer.Option(help="Embedding model of the namespace.")] = None,
    embed_device: Annotated[str | None, typer.Option(help="torch device of the embedder.")] = None,
    chunk_tokens: Annotated[
        int | None, typer.Option(help="Largest chunk, in tokens of the serving model.")
    ] = None,
    index_type: Annotated[
        str | None, typer.Option(help="flat, sq8, ivf or hnsw, for a new namespace.")
    ] = None,
) -> None:
    """Parse, chunk, embed and index documents. Unchanged files cost a hash; changed ones are replaced whole."""
    settings = load_settings(
        data_dir=data_dir,
        model=model,
        tokenizer=tokenizer,
        embedder=embedder,
        embed_device=embed_device,
        chunk_tokens=chunk_tokens,
        index_type=index_type,
    )
    given = list(inputs or [])
    if bool(given) == bool(resume):
        raise InvalidRequest("Say what to ingest: paths, URLs, - for stdin, or --resume JOB.")
    if "-" in given and (len(given) > 1 or not name or follow_changes):
        raise InvalidRequest(
            "Standard input is ingested alone and needs a name: ragserve ingest - --name notes.md"
        )

    from ragserve.ingest.ingestor import PathOptions
    from ragserve.ingest.sources import parse_metadata

    if warm:
        check_warm(settings, again_and_again=follow_changes)
    options = PathOptions(recursive, tuple(globs or ()), prune, parse_metadata(metadata or []), warm)
    with signals_stop() as signals, _Session(settings, signals.stop, as_json) as session:
        if resume:
            failed, ran = session.run(resume, wait=True)
        elif given == ["-"]:
            failed, ran = session.run(session.submit_stdin(namespace, name or "", options))
        elif follow_changes:
            failed, ran = session.follow(namespace, given, options)
        else:
            failed, ran = session.run(
                session.ingestor.submit_paths(namespace, given, options).job_id, pruned=prune
            )
    if signals.received:
        raise typer.Exit(128 + signals.received)
    if not ran:
        raise typer.Exit(1)
    raise typer.Exit(3 if failed else 0)


class _Session:
    """The store and the ingestor for one command."""

    def __init__(self, settings: Settings, stop: threading.Event, as_json: bool) -> None:
        from rich.console import Console

        self._settings = settings
        self._stop = stop
        self._as_json = as_json
        self._console = Console(quiet=as_json)

    def __enter__(self) -> _Session:
        from ragserve.cache.evictions import clean_files
        from ragserve.ingest.ingestor import Ingestor
        from ragserve.retrieval.embedder import Embedder
        from ragserve_index import IndexStore

        settings = self._settings
        self._store = IndexStore(
            settings.data_dir, index_type=settings.index_type, device=settings.index_device
        )
        self.ingestor = Ingestor(
            settings,
            self._store,
            lambda: Embedder(
                settings.embedder, device=settings.embed_device, batch_size=settings.embed_batch
            ),
            evict=lambda: clean_files(settings, self._store),
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._store.close()

    def run(
        self, job_id: str, *, wait: bool = False, pruned: bool = False, compact: bool = False
    ) -> tuple[int, int]:
        """(files that failed, files that were looked at)."""
        from ragserve.commands.job_console import print_report, progress_bar

        with progress_bar(self._console, enabled=not self._as_json) as show:
            report = self.ingestor.run(job_id, on_progress=show, stop=self._stop, wait=wait)
        if not self._as_json:
            print_report(self._console, report, pruned=pruned)
            if report.state == "interrupted":
                self._console.print(
                    f"Interrupted. Run the same command again, or: ragserve ingest --resume {job_id}"
                )
        warmed = None
        if report.warm_job is not None:
            warmed = show_warm(self._settings, self._store, report.warm_job, self._stop, quiet=self._as_json)
        if self._as_json:
            sys.stdout.write(
                json.dumps(
                    report.as_json() | {"warm": warmed and warmed.as_json()},
                    indent=None if compact else 1,
                    ensure_ascii=False,
                )
                + "\n"
            )
            sys.stdout.flush()
        counts = report.progress
        failed = counts.failed + (len(warmed.failures) if warmed is not None else 0)
        return failed, counts.done + len(report.vanished) + (report.state != "done")

    def follow(self, namespace: str, inputs: list[str], options: Any) -> tuple[int, int]:
        from ragserve.ingest.watch import Watch

        total = [0, 0]
        exclude = self._settings.data_dir
        with Watch(
            inputs, recursive=options.recursive, globs=options.globs, exclude=exclude, stop=self._stop
        ) as watch:
            job = self.ingestor.submit_paths(namespace, inputs, options)
            total = [
                a + b
                for a, b in zip(total, self.run(job.job_id, pruned=options.prune, compact=True), strict=True)
            ]
            self._console.print("Following changes; Ctrl-C ends it.")
            roots = job.spec["roots"]
            for changed, vanished in watch:
                job = self.ingestor.submit_paths(namespace, changed, options, roots=roots if vanished else ())
                total = [
                    a + b
                    for a, b in zip(
                        total, self.run(job.job_id, pruned=options.prune, compact=True), strict=True
                    )
                ]
        return total[0], total[1]

    def submit_stdin(self, namespace: str, name: str, options: Any) -> str:
        from ragserve.ingest.ingestor import Upload

        limit = self._settings.max_upload_bytes
        data = sys.stdin.buffer.read(limit + 1)
        if len(data) > limit:
            raise TooLarge(
                f"Standard input has more than {limit:,} bytes.",
                hint="Raise RAGSERVE_MAX_UPLOAD_BYTES or split it.",
            )
        upload = Upload(name, io.BytesIO(data))
        return self.ingestor.submit_files(
            namespace, [upload], options.metadata, kind="stdin", warm=options.warm
        ).job_id


class _Signals:
    """The first Ctrl-C or SIGTERM stops between batches, the second at once."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.received = 0

    def handle(self, number: int, _frame: object) -> None:
        if self.received:
            raise KeyboardInterrupt
        self.received = number
        self.stop.set()


@contextmanager
def signals_stop() -> Iterator[_Signals]:
    """While the block lasts, Ctrl-C and SIGTERM set ``stop``."""
    signals = _Signals()
    before = {number: signal.signal(number, signals.handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def load_settings(**flags: Any) -> Settings:
    """Settings with CLI flags; a wrong value is a known error instead of a traceback."""
    from pydantic import ValidationError

    try:
        return load(**flags)
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(map(str, e['loc'])) or 'settings'}: {e['msg']}"
            for e in error.errors(include_url=False)
        )
        raise InvalidRequest(
            f"Wrong settings: {wrong}.", hint="Correct the flag, the RAGSERVE_ variable or ragserve.toml."
        ) from None
