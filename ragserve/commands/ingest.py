"""`ragserve ingest`: files, directories, URLs or standard input into a namespace."""

from __future__ import annotations

import io
import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ragserve.children import ENDING
from ragserve.commands.options import with_settings
from ragserve.commands.warm import check_warm, show_warm
from ragserve.config import Settings
from ragserve.errors import InvalidRequest, ModelUnavailable, RagserveError, TooLarge
from ragserve.files import temporary_folder
from ragserve.tenants.audit_log import record_command

if TYPE_CHECKING:
    from ragserve.ingest.ingestor import PathOptions
    from ragserve.ingest.jobs.job_report import JobReport, Progress
    from ragserve_index import IndexStore

INGEST_SETTINGS = (
    *(
        "data_dir",
        "registry_url",
        "model",
        "tokenizer",
        "embedder",
        "embed_device",
        "chunk_tokens",
        "index_type",
    ),
    *("ocr", "ingest_hidden", "ingest_comments", "robots", "sitemap_urls", "source_files", "source_bytes"),
)
_EPILOG = (
    "Exit status: 0 if all files are indexed or unchanged; 3 if some files failed (each is listed with its "
    "reason), or the job was cancelled; 1 if nothing could run, or an error such as a full disk ended the "
    "run; 2 for wrong options; 130 after Ctrl-C, 143 after SIGTERM, 129 for a closed terminal. After an "
    "interruption, a crash or a kill, run the same command again: it skips what is already indexed."
)


def register(app: typer.Typer) -> None:
    app.command("ingest", epilog=_EPILOG)(with_settings(ingest, INGEST_SETTINGS))


@temporary_folder(sockets=False)  # which the next command removes if this one is killed
def ingest(
    settings: Settings,
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PATH|URL|-...",
            help="Files, directories, http(s) URLs, s3://BUCKET/FOLDER, "
            "git+https://HOST/REPOSITORY#BRANCH:FOLDER, or - for stdin.",
        ),
    ] = None,
    namespace: Annotated[
        str, typer.Option("--namespace", "-n", help="Destination; created if it does not exist.")
    ] = "default",
    recursive: Annotated[
        bool, typer.Option("--recursive", "-r", help="Descend into directories, except hidden ones.")
    ] = False,
    globs: Annotated[
        list[str] | None,
        typer.Option(
            "--glob",
            help="Take only matching files from directories: matched against the name, or against the path "
            "within the directory if the pattern has a /. Repeatable.",
        ),
    ] = None,
    follow_changes: Annotated[
        bool, typer.Option("--follow-changes", help="Keep running and ingest changes, until Ctrl-C.")
    ] = False,
    follow_symlinks: Annotated[
        bool,
        typer.Option(
            "--follow-symlinks",
            help="Also take files that symbolic links in a directory lead to outside of it.",
        ),
    ] = False,
    sitemap: Annotated[
        bool,
        typer.Option(
            "--sitemap",
            help="Take the pages that the sitemaps of each URL's site name. A URL of a sitemap.xml needs no "
            "flag.",
        ),
    ] = False,
    other_hosts: Annotated[
        bool, typer.Option("--other-hosts", help="Also take pages of a sitemap that are on other hosts.")
    ] = False,
    metadata: Annotated[
        list[str] | None, typer.Option(help="key=value for every document, for filters. Repeatable.")
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(
            help="Label of every document: only API keys that hold one of its labels see it. Repeatable; '' "
            "takes all away. Default: documents keep those that they have."
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Document name for stdin; its extension hints at the format.")
    ] = None,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove documents whose file vanished from a given folder.")
    ] = False,
    warm: Annotated[
        bool,
        typer.Option(
            "--warm",
            help="Then compute the documents' KV into the document cache: on the server that uses this "
            "folder, else on an engine started for it.",
        ),
    ] = False,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Parse and embed files on this Ray cluster, whose nodes see them at the same paths: "
            "HOST:PORT, auto, or local, which starts one on this machine.",
        ),
    ] = None,
    prechunked: Annotated[
        bool,
        typer.Option(
            "--prechunked",
            help="The files are JSON lines of chunks, taken as they are: text, and where wanted document "
            "(its name), title, page, section, order, metadata.",
        ),
    ] = False,
    preview: Annotated[
        bool,
        typer.Option("--preview", help="Show how files would be cut, and what is left out; store nothing."),
    ] = False,
    resume: Annotated[str | None, typer.Option(metavar="JOB", help="Finish this job instead.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON report and nothing else.")] = False,
) -> None:
    """Parse, chunk, embed and index documents. Unchanged files cost a hash; changed ones are replaced."""
    given = inputs or []
    if bool(given) == bool(resume):
        raise InvalidRequest("Say what to ingest: paths, URLs, - for stdin, or --resume JOB.")
    if "-" in given and (len(given) > 1 or not name or follow_changes):
        message = "Standard input is ingested alone and needs a name: ragserve ingest - --name notes.md"
        raise InvalidRequest(message)

    if preview:
        from ragserve.commands.preview import show_preview

        if prechunked or resume:
            raise InvalidRequest("--preview is for files that ragserve cuts: leave --prechunked out.")
        show_preview(settings, given, as_json)
        return
    from ragserve.ingest.connectors.source_addresses import is_elsewhere
    from ragserve.ingest.ingestor import PathOptions
    from ragserve.ingest.sources import is_path, parse_metadata, why_nothing
    from ragserve.retrieval.document_store import open_store

    if prechunked and (ray or follow_changes or prune or not all(map(is_path, given))):
        raise InvalidRequest("--prechunked takes files or -: no URLs, --ray, --prune, --follow-changes.")
    if ray is not None and (follow_changes or any(one == "-" or not is_path(one) for one in given)):
        raise InvalidRequest("--ray takes files and directories, once: no URLs, no -, no --follow-changes.")
    if follow_changes and any(map(is_elsewhere, given)):
        raise InvalidRequest(
            "--follow-changes takes files and directories.",
            hint="For S3 and git: ragserve sync run --every 15m.",
        )
    if warm:
        check_warm(settings, repeated=follow_changes)
    options = PathOptions(
        recursive,
        tuple(globs or ()),
        prune,
        parse_metadata(metadata or []),
        warm,
        follow_symlinks,
        sitemap,
        other_hosts,
        None if label is None else tuple(each for each in label if each),
    )
    _note_model(settings)
    with (
        signals_stop() as signals,
        open_store(settings) as store,
    ):
        session = IngestSession(settings, store, signals.stop, as_json, ray)
        if resume:
            session.run(resume, wait=True)
        elif given == ["-"]:
            session.run(session.submit_stdin(namespace, name or "", options, prechunked))
        elif prechunked:
            session.run(session.submit_chunk_files(namespace, given, options))
        elif follow_changes:
            session.follow(namespace, given, options)
        else:
            session.run(session.ingestor.submit_paths(namespace, given, options).job_id, pruned=prune)
    if signals.received:
        raise typer.Exit(128 + signals.received)
    if not session.files:
        if given:
            why = why_nothing(given, recursive=recursive, globs=globs or ())
            typer.secho(why, err=True, fg=typer.colors.YELLOW)
        raise typer.Exit(1)
    raise typer.Exit(3 if session.failed else 0)


def _note_model(settings: Settings) -> None:
    """Say what keeps the model from being served on this machine; another one may serve it."""
    from ragserve.commands.model_checks import problem_at_ingestion

    if problem := problem_at_ingestion(settings):
        found, advice = problem
        line = f"note: `ragserve serve --model {settings.model}` would not start: {found}. {advice}"
        typer.secho(line, err=True, fg=typer.colors.YELLOW)


def _server_runs(settings: Settings) -> bool:
    """Return True if a server with an engine of its own uses the data folder."""
    from ragserve.cache import lock

    with lock.alone(settings.data_dir) as nobody_else:
        return not nobody_else


class IngestSession:
    """The ingestor of one command; counts ``files`` looked at, and files and jobs that ``failed``, those that
    were cancelled among them."""

    def __init__(
        self,
        settings: Settings,
        store: IndexStore,
        stop: threading.Event,
        as_json: bool,
        ray: str | None,
    ) -> None:
        from rich.console import Console

        from ragserve.cache.evictions import clean_files
        from ragserve.ingest.ingestor import Ingestor
        from ragserve.retrieval.embedder import Embedder

        self._settings = settings
        self._store = store
        self._stop = stop
        self._as_json = as_json
        self._console = Console(quiet=as_json)
        self.files = self.failed = 0
        self._mark: int | None = None  # of commits
        self.ingestor = Ingestor(
            settings,
            store,
            lambda: Embedder.of(settings),
            evict=lambda: clean_files(settings, store),
            warms=lambda: _server_runs(settings),
            ray=ray,
        )

    def run(self, job_id: str, *, wait: bool = False, pruned: bool = False, compact: bool = False) -> None:
        """Run a job and the warm-up that may follow it, and report both."""
        from ragserve.commands.job_console import print_report, progress_bar

        last: list[Progress] = []
        ended: RagserveError | None = None
        started = time.monotonic()
        with progress_bar(self._console, enabled=not self._as_json, phase="ingesting") as show:

            def note(progress: Progress) -> None:
                last[:] = [progress]
                show(progress)

            try:
                report = self.ingestor.run(job_id, on_progress=note, stop=self._stop, wait=wait)
            except RagserveError as error:
                if not last:  # nothing was done
                    raise
                report, ended = self._failed(job_id, time.monotonic() - started, last[0], error), error
        record_command(
            self._settings,
            "ingest",
            namespace=report.namespace,
            job=job_id,
            documents=report.progress.done,
            removed=report.progress.removed,
            result=report.state,
        )
        if not self._as_json:
            print_report(self._console, report, pruned=pruned)
            if report.state == "interrupted":
                advice = f"Run the same command again, or: ragserve ingest --resume {job_id}"
                self._console.print(f"Interrupted. {advice}")
        warmed = None
        if report.warm_job is not None:
            warmed = show_warm(self._settings, self._store, report.warm_job, self._stop, quiet=self._as_json)
        if self._as_json:
            body = report.as_json() | {"warm": warmed and warmed.as_json()}
            print(json.dumps(body, indent=None if compact else 1, ensure_ascii=False), flush=True)
        self.failed += report.progress.failed + (report.state != "done")
        if warmed is not None:
            self.failed += len(warmed.failures) + (warmed.state != "done")
        self.files += report.progress.done + len(report.vanished) + (report.state != "done")
        if ended is not None:
            raise ended

    def _failed(self, job_id: str, seconds: float, progress: Progress, error: RagserveError) -> JobReport:
        """Report on a run that ``error`` ended: what was done until then is kept."""
        from ragserve.ingest.jobs.job_report import JobReport, failures_of

        jobs = self.ingestor.jobs
        return JobReport(
            job_id,
            jobs.get(job_id).namespace,
            "interrupted" if isinstance(error, ModelUnavailable) else "failed",
            seconds,
            progress,
            failures_of(jobs, job_id, "failed"),
            error=str(error),
        )

    def follow(self, namespace: str, inputs: list[str], options: PathOptions) -> None:
        """Ingest ``inputs``, then what changes in them, until the command is stopped."""
        from ragserve.ingest.watch import Watch

        with Watch(
            inputs,
            options.recursive,
            options.globs,
            self._settings.data_dir,
            self._stop,
            follow_symlinks=options.follow_symlinks,
        ) as watch:
            job = self.ingestor.submit_paths(namespace, inputs, options)
            roots = job.spec["roots"]
            self.run(job.job_id, pruned=options.prune, compact=True)
            self._console.print("Following changes; press Ctrl-C to stop.")
            for changed, vanished in watch:
                self._forget_dropped()
                if not changed and not vanished:
                    continue
                job = self.ingestor.submit_paths(
                    namespace, changed, options, roots=roots if vanished else (), within=watch.roots
                )
                self.run(job.job_id, pruned=options.prune, compact=True)

    def _forget_dropped(self) -> None:
        """Let go of indexes of namespaces that other processes have dropped, where there was a commit since
        the last call."""
        from ragserve_index import EvictionLog

        with suppress(RagserveError):  # of the registry, which the next job meets and tells
            mark = EvictionLog(self._store.database).mark()
            if mark is None or mark != self._mark:
                self._store.forget_dropped()
                self._mark = mark

    def submit_chunk_files(self, namespace: str, paths: list[str], options: PathOptions) -> str:
        """Read files of chunks into a job and return its id."""
        from ragserve.ingest.ingestor import Upload

        with ExitStack() as stack:
            files = []
            for given in paths:
                path = Path(given).expanduser()
                if not path.is_file():
                    raise InvalidRequest(f"--prechunked takes files, and {given!r} is none.")
                stream = stack.enter_context(path.open("rb"))
                files.append(Upload(path.name, stream, labels=options.labels))
            submit = self.ingestor.submit_chunks
            return submit(namespace, files, options.metadata, kind="stdin", warm=options.warm).job_id

    def submit_stdin(self, namespace: str, name: str, options: PathOptions, prechunked: bool) -> str:
        """Read standard input into a job and return its id. Raises ``TooLarge``."""
        from ragserve.ingest.ingestor import Upload

        limit = self._settings.max_upload_bytes
        data = sys.stdin.buffer.read(limit + 1)
        if len(data) > limit:
            raise TooLarge(
                f"Standard input has more than {limit:,} bytes.",
                hint="Raise RAGSERVE_MAX_UPLOAD_BYTES or split it.",
            )
        uploads = [Upload(name, io.BytesIO(data), labels=options.labels)]
        submit = self.ingestor.submit_chunks if prechunked else self.ingestor.submit_files
        return submit(namespace, uploads, options.metadata, kind="stdin", warm=options.warm).job_id


class _Signals:
    """The first Ctrl-C, SIGTERM or SIGHUP stops between batches, the second at once."""

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
    """While the block lasts, the signals of `ENDING` set ``stop``; an ignored one (nohup) stays ignored."""
    signals = _Signals()
    before = {
        number: signal.signal(number, signals.handle)
        for number in ENDING
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
