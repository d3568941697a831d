"""`ragserve docs`: namespaces, and the documents in them: list, show, remove, check and warm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain, islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragserve.commands import docs_chunks, docs_settings
from ragserve.commands.data_folder import open_data, resolve
from ragserve.commands.ingest import signals_stop
from ragserve.commands.job_console import place, print_json, shown
from ragserve.commands.options import ENGINE_SETTINGS, AsJson, Namespace, with_settings
from ragserve.config import Settings
from ragserve.errors import InvalidRequest, NotFound, RagserveError, Unavailable
from ragserve.tenants.audit_log import record_command

if TYPE_CHECKING:
    from ragserve.api.views import DocumentView, JobDetail
    from ragserve.client import Client
    from ragserve_index.types import Chunk, Document

_WARM_SETTINGS = ("data_dir", "model", *ENGINE_SETTINGS, "kv_disk_bytes", "kv_storage", "api_key")
_WARM_HELP = (
    "Compute documents' KV ahead of queries, into every cache tier down to the disk. The server at --url, or "
    "the one that uses the data folder, computes it; if none runs, an engine started for it does, and a "
    "later server finds the result. Cached documents are skipped. Exit status: 0 if all are cached; 3 if "
    "some are not, each listed with its reason, or the job was cancelled; 130 after Ctrl-C."
)

_REEMBED_HELP = (
    "Embed documents again, from their stored text: the passages, and the sentences in them. For documents "
    "that were ingested by a version which embedded less. Searches go on meanwhile, and the document cache "
    "stays. Exit status: 0 if all are embedded; 3 if some were replaced meanwhile, each listed, or the job "
    "was cancelled; 130 after Ctrl-C. After an interruption or a kill, run the same command again: it goes "
    "on."
)


OtherServer = Annotated[
    str | None,
    typer.Option(envvar="RAGSERVE_URL", help="Address of a server to use instead of the data folder."),
]


def register(app: typer.Typer) -> None:
    docs = typer.Typer(
        help="List, show, label, correct, remove, check and warm documents; list and drop namespaces.",
        no_args_is_help=True,
    )
    docs.command("ls")(with_settings(ls, ["data_dir", "registry_url", "api_key"]))
    docs.command("namespaces")(with_settings(namespaces, ["data_dir", "registry_url"]))
    docs.command("show")(with_settings(show, ["data_dir", "registry_url"]))
    docs.command("label")(with_settings(label, ["data_dir", "registry_url"]))
    docs.command("rm")(with_settings(rm, ["data_dir", "registry_url", "model", "tokenizer"]))
    docs.command("drop")(with_settings(drop, ["data_dir", "registry_url"]))
    docs.command("check")(with_settings(check, ["data_dir", "registry_url"]))
    docs.command("reembed", help=_REEMBED_HELP)(
        with_settings(reembed, ["data_dir", "registry_url", "embedder", "embed_device"])
    )
    docs.command("warm", help=_WARM_HELP)(with_settings(warm, _WARM_SETTINGS))
    docs_settings.register(docs)
    docs_chunks.register(docs)
    app.add_typer(docs, name="docs")


def ls(
    settings: Settings,
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", help="List this namespace only. Default: all.")
    ] = None,
    prefix: Annotated[str | None, typer.Option(help="List only sources that start with this.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="List at most this many documents.")] = 10_000,
    url: OtherServer = None,
    as_json: AsJson = False,
) -> None:
    """List documents."""
    documents: Sequence[Document | DocumentView]
    if url:
        documents = _listed_by_server(url, settings, namespace, prefix, limit)
        plain = [document.model_dump() for document in documents]
    else:
        from ragserve.ingest.prune import every_document

        with open_data(settings) as store:
            names = [namespace] if namespace else [info.name for info in store.namespaces()]
            pages = (every_document(store, name, source_prefix=prefix) for name in names)
            here = list(islice(chain.from_iterable(pages), limit))
        documents, plain = here, [_plain(document) for document in here]
    if as_json:
        print_json(plain)
        return
    for document in documents:  # two lines each: sources are long, and terminals are not
        facts = f"{document.n_chunks:,} chunks, {document.n_tokens:,} tokens, namespace {document.namespace}"
        facts += f", labels {', '.join(document.labels)}" if document.labels else ""
        typer.echo(f"{document.doc_id}  {shown(document.title)}  ({facts})\n    {shown(document.source)}")
    typer.echo(f"{len(documents):,} {'document' if len(documents) == 1 else 'documents'}")


def namespaces(settings: Settings, as_json: AsJson = False) -> None:
    """List namespaces with their documents, chunks and tokens."""
    with open_data(settings) as store:
        found = store.namespaces()
    if as_json:
        print_json([asdict(namespace) for namespace in found])
        return
    for each in found:
        counts = f"{each.n_documents:,} documents, {each.n_chunks:,} chunks, {each.n_tokens:,} tokens"
        typer.echo(f"{each.name}: {counts} (embedder {each.embedder}, index {each.index_type})")
    typer.echo(f"{len(found):,} {'namespace' if len(found) == 1 else 'namespaces'}")


def show(
    settings: Settings,
    document: Annotated[str, typer.Argument(metavar="DOC_ID|SOURCE")],
    namespace: Namespace = "default",
    text: Annotated[
        bool, typer.Option("--text", help="Print only the text, joined from its chunks.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show a document and its chunks."""
    with open_data(settings) as store:
        found = resolve(store, namespace, document)
        chunks = store.document_chunks(namespace, found.doc_id)
    if as_json:
        names = (
            *("chunk_id", "ordinal", "start", "end", "header_chars", "edited"),
            *("page", "first_page", "page_kind", "page_name", "n_tokens", "text"),
        )
        own = [{name: getattr(chunk, name) for name in names} for chunk in chunks]
        print_json({**_plain(found), "chunks": own})
        return
    if text:
        typer.echo(_joined(chunks))
        return
    for name, value in _plain(found).items():
        typer.echo(f"{name}: {shown(str(value))}")
    for chunk in chunks:
        page = f", {place(chunk)}" if chunk.page is not None else ""
        edited = ", edited" if chunk.edited else ""
        head = f"chunk {chunk.chunk_id} [{chunk.start}:{chunk.end}], {chunk.n_tokens} tokens{page}{edited}"
        typer.echo(f"\n--- {head}\n{chunk.text}")


def label(
    settings: Settings,
    documents: Annotated[list[str], typer.Argument(metavar="DOC_ID|SOURCE...")],
    namespace: Namespace = "default",
    add: Annotated[list[str] | None, typer.Option(help="Give this label. Repeatable.")] = None,
    remove: Annotated[list[str] | None, typer.Option(help="Take this label away. Repeatable.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Have these labels and no others. Repeatable; '' is none.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Change who sees documents: API keys that hold one of a document's labels, or all if it has none.

    A running server goes by it from its next request on, also in sessions. All documents are changed, or
    none."""
    if not (add or remove or only):
        raise InvalidRequest("Say what to change: --add, --remove or --only.")
    chosen = None if only is None else [each for each in only if each]
    with open_data(settings) as store:
        ids = [resolve(store, namespace, name).doc_id for name in documents]
        changed = store.set_labels(namespace, ids, add=add or (), remove=remove or (), only=chosen)
    now = {document.doc_id: list(document.labels) for document in changed}
    record_command(settings, "docs label", namespace=namespace, documents=now, result="labelled")
    if as_json:
        print_json([_plain(document) for document in changed])
        return
    for document in changed:
        typer.echo(f"{document.doc_id} {shown(document.source)}: {_seen_by(document)}")


def rm(
    settings: Settings,
    documents: Annotated[list[str], typer.Argument(metavar="DOC_ID|SOURCE...")],
    namespace: Namespace = "default",
    as_json: AsJson = False,
) -> None:
    """Remove documents and their cached KV. Exits with 1 if any does not exist, after removing the others."""
    from ragserve.cache.evictions import clean_files

    removed: list[Document] = []
    missing: list[str] = []
    with open_data(settings) as store:
        store.namespace(namespace)  # must exist
        try:
            for name in documents:
                try:
                    removed.append(store.remove_document(namespace, resolve(store, namespace, name).doc_id))
                except NotFound:
                    missing.append(name)
        finally:  # an error leaves those before it removed
            clean_files(settings, store)
            ids = [document.doc_id for document in removed]
            record_command(settings, "docs rm", namespace=namespace, documents=ids, result="removed")
    if as_json:
        print_json({"removed": [_plain(document) for document in removed], "missing": missing})
    else:
        for document in removed:
            typer.echo(f"removed {document.doc_id} {shown(document.source)} ({document.n_chunks} chunks)")
        for name in missing:
            typer.secho(f"not in namespace {namespace}: {shown(name)}", err=True, fg=typer.colors.RED)
    if missing:
        raise typer.Exit(1)


def drop(
    settings: Settings,
    namespace: Annotated[str, typer.Argument(help="Namespace to remove.")],
    as_json: AsJson = False,
) -> None:
    """Remove a namespace with all its documents and their cached KV, and cancel its jobs."""
    from ragserve.answering.namespace_log import forget_dropped
    from ragserve.cache.evictions import clean_files
    from ragserve.verification.dropped import forget_or_log

    with open_data(settings) as store:
        dropped = store.drop_namespace(namespace)
        clean_files(settings, store)
        try:
            forget_dropped(settings.data_dir, store)
        except (OSError, RagserveError) as error:  # must not fail the removal, which is done
            later = f"its logged questions are still on disk, the next server removes them: {error}"
            typer.secho(later, err=True, fg=typer.colors.YELLOW)
        forget_or_log(settings.data_dir, namespace)
    record_command(
        settings, "docs drop", namespace=namespace, documents=dropped.n_documents, result="dropped"
    )
    if as_json:
        print_json(asdict(dropped))
    else:
        typer.echo(f"dropped {dropped.name} ({dropped.n_documents:,} documents, {dropped.n_chunks:,} chunks)")


def check(
    settings: Settings,
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", help="Check this namespace only. Default: all.")
    ] = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Build indexes with a problem again from the registry.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check registry, vector index and lexical index against each other. Exits with 1 if a problem is left.

    Documents cannot be ingested while the lexical index is checked."""
    with open_data(settings) as store:
        reports = store.check(namespace)
        broken = [report.namespace for report in reports if not report.ok]
        if repair and broken:
            for name in broken:
                store.rebuild_lexical(name)
                store.rebuild(name)
            reports = store.check(namespace)
    if as_json:
        print_json([asdict(report) for report in reports])
    else:
        for report in reports:
            state = "; ".join(report.problems) or ("repaired" if report.namespace in broken else "ok")
            typer.echo(
                f"{report.namespace}: {report.n_documents:,} documents, {report.n_chunks:,} chunks: {state}"
            )
    if not all(report.ok for report in reports):
        if not repair:
            typer.secho("`ragserve docs check --repair` builds the indexes again.", err=True)
        raise typer.Exit(1)


def reembed(
    settings: Settings,
    namespace: Annotated[str, typer.Argument(help="Namespace of the documents.")] = "default",
    doc: Annotated[
        list[str] | None,
        typer.Option(metavar="DOC_ID|SOURCE", help="Embed only this document. Repeatable."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Embed documents again; the help text is ``_REEMBED_HELP``."""
    from rich.console import Console

    from ragserve.commands.job_console import print_report, progress_bar
    from ragserve.ingest.jobs.job_report import progress_of
    from ragserve.ingest.reembed import reembed as run_reembed
    from ragserve.ingest.reembed import submit_reembed
    from ragserve.retrieval.embedder import Embedder
    from ragserve_index import JobStore

    console = Console(quiet=as_json)
    with signals_stop() as signals, open_data(settings) as store:
        sources = None if doc is None else [resolve(store, namespace, name).source for name in doc]
        job_id = submit_reembed(store, namespace, settings.sentence_bytes, sources).job_id
        state = "failed"
        try:
            with progress_bar(console, enabled=not as_json, phase="embedding") as show:
                embedder, stop = Embedder.of(settings), signals.stop
                report = run_reembed(store, embedder, job_id, on_progress=show, stop=stop)
            state = report.state
        finally:  # an error leaves those before it embedded
            done = progress_of(JobStore(store).get(job_id)).done
            record_command(
                settings, "docs reembed", namespace=namespace, job=job_id, documents=done, result=state
            )
    if as_json:
        print_json(report.as_json())
    else:
        print_report(console, report, pruned=False)
    if signals.received:
        raise typer.Exit(128 + signals.received)
    if report.failures or report.state != "done":
        raise typer.Exit(3)


def warm(
    settings: Settings,
    namespace: Annotated[str, typer.Argument(help="Namespace of the documents.")] = "default",
    doc: Annotated[
        list[str] | None, typer.Option(metavar="DOC_ID|SOURCE", help="Warm only this document. Repeatable.")
    ] = None,
    url: OtherServer = None,
    as_json: AsJson = False,
) -> None:
    """Compute documents' KV ahead of queries; the help text is ``_WARM_HELP``."""
    from ragserve.cache.warm import submit_warm
    from ragserve.commands.warm import show_warm

    if url:
        _warm_by_server(url, settings, namespace, doc, as_json)
        return
    with signals_stop() as signals, open_data(settings) as store:
        doc_ids = None if doc is None else [resolve(store, namespace, name).doc_id for name in doc]
        job_id = submit_warm(store, namespace, doc_ids).job_id
        report = show_warm(settings, store, job_id, signals.stop, quiet=as_json)
    if as_json:
        print_json(report.as_json())
    if signals.received:
        raise typer.Exit(128 + signals.received)
    if report.failures or report.state != "done":
        raise typer.Exit(3)


def _client(url: str, settings: Settings) -> Client:
    from ragserve.client import Client

    key = settings.api_key
    return Client(url, api_key=key.get_secret_value() if key else None)


def _listed_by_server(
    url: str, settings: Settings, namespace: str | None, prefix: str | None, limit: int
) -> list[DocumentView]:
    with _client(url, settings) as client:
        names = [namespace] if namespace else [each.name for each in client.namespaces()]
        pages = (client.documents(name, source_prefix=prefix) for name in names)
        return list(islice(chain.from_iterable(pages), limit))


def _warm_by_server(
    url: str, settings: Settings, namespace: str, doc: list[str] | None, as_json: bool
) -> None:
    from ragserve.progress_lines import progress_lines

    seen: list[JobDetail] = []
    with _client(url, settings) as client, progress_lines() as now:

        def say(job: JobDetail) -> None:
            seen[:] = [job]
            if not as_json:
                now("warming", f"{job.chunks:,} chunks, {job.tokens:,} tokens computed")

        submitted = client.warm(namespace, doc)
        try:
            job = client.wait(submitted, timeout_s=math.inf, on_progress=say)
        except (KeyboardInterrupt, SystemExit) as signalled:  # SystemExit: of `ended_by_signals`
            state = client.cancel_job(submitted.job_id).state
            ended = f"{submitted.job_id} had ended: {state}"
            said = ended if state in ("done", "failed") else f"cancelled {submitted.job_id}"
            typer.echo(said, err=True)
            raise typer.Exit(int(getattr(signalled, "code", None) or 130)) from None
        except Unavailable:
            if not seen or seen[0].state != "cancelled":
                raise
            job = seen[0]
    counts = {state: n for state, n in job.counts.items() if n}
    if as_json:
        print_json(job.model_dump())
    else:
        summary = ", ".join(f"{n:,} {state}" for state, n in counts.items())
        ended = "" if job.state == "done" else f"{job.state}: "
        computed = f"{job.chunks:,} chunks, {job.tokens:,} tokens computed"
        typer.echo(f"{ended}{summary}; {computed} ({job.job_id})")
    if counts.get("failed") or counts.get("skipped") or job.state != "done":
        raise typer.Exit(3)


def _joined(chunks: Sequence[Chunk]) -> str:
    """The text of a document, with a line break where something of it is in no chunk."""
    parts, until = [], 0
    for chunk in chunks:
        parts.append("\n" if chunk.start > until else "")
        parts.append(chunk.own_text)
        until = chunk.end
    return "".join(parts)


def _seen_by(document: Document) -> str:
    return f"labels {', '.join(document.labels)}" if document.labels else "no labels: every key sees it"


def _plain(document: Document) -> dict[str, Any]:
    return {**asdict(document), "metadata": dict(document.metadata)}
