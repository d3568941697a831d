"""`ragserve sync`: a list of sources, and what brings their documents up to date, once or on a schedule."""

from __future__ import annotations

import os
import re
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from ragserve.commands.data_folder import open_data
from ragserve.commands.ingest import INGEST_SETTINGS, IngestSession, signals_stop
from ragserve.commands.job_console import print_json, shown
from ragserve.commands.options import AsJson, Namespace, say, with_settings
from ragserve.config import Settings
from ragserve.errors import Conflict, InvalidRequest, NotFound, RagserveError, StorageFull
from ragserve.files import temporary_folder
from ragserve.tenants.audit_log import record_command

if TYPE_CHECKING:
    from ragserve.ingest.sync_list import SyncSource
    from ragserve_index import IndexStore
    from ragserve_index.types import Job

_HELP = (
    "Keep documents as their sources are: folders, S3 folders, git repositories, web pages. Changed files "
    "are ingested again, and documents whose file vanished are removed."
)
_EPILOG = (
    "Exit status: 0 if all files are indexed or unchanged; 3 if some failed, or a job was cancelled; 1 if no "
    "source could be synced, or another `ragserve sync run` works on the data folder; 130 after Ctrl-C, 143 "
    "after SIGTERM. A run that was interrupted or killed goes on with the next one, which skips what is "
    "indexed."
)
_EVERY = re.compile(r"(\d{1,6})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_BUSY_S = 20.0  # a killed run's job is free after its lease
_Sources = Annotated[list[str] | None, typer.Argument(metavar="SOURCE...", help="Only these of the list.")]
_OneNamespace = Annotated[str | None, typer.Option("--namespace", "-n", help="Only of this namespace.")]


def register(app: typer.Typer) -> None:
    sync = typer.Typer(help=_HELP, no_args_is_help=True)
    sync.command("add")(with_settings(add, ["data_dir"]))
    sync.command("ls")(with_settings(ls, ["data_dir", "registry_url"]))
    sync.command("rm")(with_settings(rm, ["data_dir"]))
    sync.command("run", epilog=_EPILOG)(with_settings(run, INGEST_SETTINGS))
    app.add_typer(sync, name="sync")


def add(
    settings: Settings,
    source: Annotated[
        str,
        typer.Argument(
            help="A directory, a file, an http(s) URL, s3://BUCKET/FOLDER, or "
            "git+https://HOST/REPOSITORY#BRANCH:FOLDER."
        ),
    ],
    namespace: Namespace = "default",
    recursive: Annotated[
        bool, typer.Option("--recursive", "-r", help="Descend into directories; S3 and git always do.")
    ] = False,
    globs: Annotated[
        list[str] | None,
        typer.Option("--glob", help="Take only matching files, as `ragserve ingest`. Repeatable."),
    ] = None,
    metadata: Annotated[
        list[str] | None, typer.Option(help="key=value for every document, for filters. Repeatable.")
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option("--label", help="Label of every document, as with `ragserve ingest`. Repeatable."),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep documents whose file vanished; a run lists them.")
    ] = False,
    sitemap: Annotated[
        bool, typer.Option("--sitemap", help="Take the pages that the sitemaps of a URL's site name.")
    ] = False,
) -> None:
    """Add a source to the list, or change its options. The next run syncs it."""
    from ragserve.ingest.sources import parse_metadata
    from ragserve.ingest.submissions import PathOptions
    from ragserve.ingest.sync_list import MOST, SyncList, SyncSource
    from ragserve_index.viewers import checked_labels
    from sglang_ext.wire.protocol import NAMESPACE

    if not NAMESPACE.fullmatch(namespace):
        rule = "1 to 64 letters, digits, _, . or -, starting with a letter or digit"
        raise InvalidRequest(f"The namespace {namespace!r} must be {rule}.")
    options = PathOptions(
        recursive,
        tuple(globs or ()),
        not keep,
        parse_metadata(metadata or []),
        sitemap=sitemap,
        labels=None if label is None else checked_labels(each for each in label if each),
    )
    added = SyncSource(namespace, _normal(source), options)
    known = False

    def change(sources: list[SyncSource]) -> list[SyncSource]:
        nonlocal known
        others = [each for each in sources if _key(each) != _key(added)]
        known = len(others) < len(sources)
        if len(others) >= MOST:
            raise InvalidRequest(f"The list has {MOST:,} sources already.")
        return [*others, added]

    SyncList(settings.data_dir).change(change)
    record_command(settings, "sync add", namespace=namespace, source=added.source, result="done")
    typer.echo(f"{'changed' if known else 'added'}: {shown(added.source)} in namespace {namespace}")


def ls(settings: Settings, namespace: _OneNamespace = None, as_json: AsJson = False) -> None:
    """List the sources, and what became of the last run of each."""
    from ragserve.ingest.sync_list import SyncList

    sources = [each for each in SyncList(settings.data_dir).all() if namespace in (None, each.namespace)]
    jobs = _last_jobs(settings, {each.namespace for each in sources})
    if as_json:
        print_json([each.as_json() | {"last": _seen(jobs.get(_key(each)))} for each in sources])
        return
    for each in sources:
        typer.echo(f"{each.namespace}  {shown(each.source)}\n    {_told(jobs.get(_key(each)))}")
    typer.echo(f"{len(sources):,} sources")


def rm(
    settings: Settings,
    source: Annotated[str, typer.Argument(help="As the list has it.")],
    namespace: Namespace = "default",
) -> None:
    """Take a source off the list. Its documents stay: `ragserve docs rm` removes them."""
    from ragserve.ingest.sync_list import SyncList

    gone = (namespace, _normal(source, exists=False))

    def change(sources: list[SyncSource]) -> list[SyncSource]:
        left = [each for each in sources if _key(each) not in (gone, (namespace, source))]
        if len(left) == len(sources):
            raise NotFound(
                f"{source!r} is not on the list of namespace {namespace!r}.", hint="See ragserve sync ls."
            )
        return left

    SyncList(settings.data_dir).change(change)
    record_command(settings, "sync rm", namespace=namespace, source=source, result="done")
    typer.echo(f"removed from the list: {shown(source)}")


@temporary_folder(sockets=False)  # which the next command removes if this one is killed
def run(
    settings: Settings,
    sources: _Sources = None,
    namespace: _OneNamespace = None,
    every: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Sync again and again, that often, until Ctrl-C: as 90s, 15m, 6h or 1d."
        ),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="With --every: serve /metrics at this port of 127.0.0.1."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON report a line and nothing else.")
    ] = False,
) -> None:
    """Bring the documents of all sources of the list up to date. Unchanged files are not read again."""
    from ragserve.ingest.sync_list import SyncList
    from ragserve.retrieval.document_store import open_store

    seconds = _interval(every)
    if metrics_port is not None and seconds is None:
        raise InvalidRequest("--metrics-port needs --every: a single run is over before anybody asks.")
    listed = SyncList(settings.data_dir)
    _chosen(listed.all(), sources, namespace)
    with signals_stop() as signals, listed.running(), open_store(settings) as store:
        session = IngestSession(settings, store, signals.stop, as_json, None)
        rounds = _Rounds(session, store, signals.stop)
        if metrics_port is not None:
            _serve_metrics(metrics_port)
        while True:
            began = time.monotonic()
            rounds.sync(_chosen(listed.all(), sources, namespace, must=seconds is None))
            if seconds is None or signals.stop.wait(max(0.0, began + seconds - time.monotonic())):
                break
    if signals.received:
        raise typer.Exit(128 + signals.received)
    if not rounds.done:
        raise typer.Exit(1)
    raise typer.Exit(3 if session.failed or rounds.errors else 0)


class _Rounds:
    """Syncs sources one after the other. ``done`` and ``errors`` count those that ran, and did not."""

    def __init__(self, session: IngestSession, store: IndexStore, stop: threading.Event) -> None:
        self._session = session
        self._store = store
        self._stop = stop
        self.done = self.errors = 0

    def sync(self, sources: list[SyncSource]) -> None:
        """Sync each source. One that fails leaves the others alone; a full disk ends them all."""
        from ragserve.metrics import metrics

        with suppress(RagserveError):  # of the registry, which the sources meet and tell
            self._store.forget_dropped()  # else their indexes would stay in memory
        for each in sources:
            if self._stop.is_set():
                return
            failed = self._session.failed
            try:
                self._session.run(self._submit(each), pruned=each.options.prune, compact=True)
                self.done += 1
            except StorageFull:
                raise
            except RagserveError as error:
                self.errors += 1
                typer.secho(f"error: {shown(each.source)}: {error}", err=True, fg=typer.colors.RED)
                metrics().synced.labels("failed").inc()
                continue
            if self._stop.is_set():
                return
            whole = self._session.failed == failed
            metrics().synced.labels("done" if whole else "partly").inc()
            if whole:
                metrics().synced_at.labels(each.namespace, each.source).set_to_current_time()

    def _submit(self, source: SyncSource) -> str:
        """Create the job, as soon as that of a run that was killed is free. Raises ``Conflict`` while another
        machine's runs."""
        ends = time.monotonic() + _BUSY_S
        while True:
            try:
                ingestor, place = self._session.ingestor, source.namespace
                return ingestor.submit_paths(place, [source.source], source.options, sync=True).job_id
            except Conflict as error:
                if error.code != "job_busy" or time.monotonic() > ends or self._stop.wait(1.0):
                    raise


def _key(source: SyncSource) -> tuple[str, str]:
    return source.namespace, source.source


def _normal(source: str, *, exists: bool = True) -> str:
    """The source as the list has it. Raises ``InvalidRequest`` for a wrong address and a missing path."""
    from ragserve.ingest.connectors.source_addresses import is_elsewhere, parse_address
    from ragserve.ingest.sources import is_url, printable

    if is_elsewhere(source):
        return str(parse_address(source))
    if is_url(source):
        return source
    path = os.path.realpath(os.path.expanduser(source))
    if exists and not os.path.exists(path):
        raise InvalidRequest(f"There is no file or directory {printable(path)}.")
    if printable(path) != path:
        raise InvalidRequest(f"The name {printable(path)} is not UTF-8.", hint="Rename it.")
    return path


def _interval(every: str | None) -> float | None:
    if every is None:
        return None
    found = _EVERY.fullmatch(every)
    if found is None or not int(found[1]):
        raise InvalidRequest(f"--every {every!r} is no time.", hint="As 90s, 15m, 6h or 1d.")
    return float(int(found[1]) * _SECONDS[found[2]])


def _chosen(
    listed: list[SyncSource], sources: list[str] | None, namespace: str | None, *, must: bool = True
) -> list[SyncSource]:
    """The sources to sync. Raises ``NotFound`` if there ``must`` be some and are none."""
    wanted = None if not sources else {_normal(each, exists=False) for each in sources}
    found = [
        each
        for each in listed
        if namespace in (None, each.namespace) and (wanted is None or each.source in wanted)
    ]
    missing = (wanted or set()) - {each.source for each in found}
    if must and (missing or not found):
        what = f"{min(missing)} is not on the list" if missing else "No source is on the list"
        raise NotFound(f"{what}.", hint="Add one: ragserve sync add SOURCE --namespace NAME.")
    return found


def _serve_metrics(port: int) -> None:
    from prometheus_client import start_http_server

    from ragserve.metrics import metrics

    metrics()
    try:
        start_http_server(port, "127.0.0.1")
    except OSError as error:
        raise InvalidRequest(f"Port {port} cannot be used: {error.strerror}.") from error
    say(f"metrics at http://127.0.0.1:{port}/metrics")


def _last_jobs(settings: Settings, namespaces: set[str]) -> dict[tuple[str, str], Job]:
    """The newest job of each source."""
    from ragserve_index import JobStore

    if not namespaces:
        return {}
    found: dict[tuple[str, str], Job] = {}
    with open_data(settings) as store:
        jobs = JobStore(store)
        for namespace in sorted(namespaces):
            for job in jobs.list(namespace, limit=1000):
                if job.spec.get("sync"):
                    found.setdefault((namespace, job.spec["inputs"][0]), job)
    return found


def _seen(job: Job | None) -> dict[str, object] | None:
    if job is None:
        return None
    counts = {state: n for state, n in job.counts.items() if n}
    return {"job": job.job_id, "state": job.state, "at": job.updated_at, "files": counts, "error": job.error}


def _told(job: Job | None) -> str:
    if job is None:
        return "never synced"
    when = datetime.fromtimestamp(job.updated_at, UTC).strftime("%Y-%m-%d %H:%M UTC")
    counts = ", ".join(
        f"{job.counts[state]:,} {state}" for state in ("indexed", "removed", "failed") if job.counts[state]
    )
    return f"{job.state} {when}: {counts or 'no change'}" + (f" ({shown(job.error)})" if job.error else "")
