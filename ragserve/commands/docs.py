"""`ragserve docs`: list, show and remove the documents of a namespace."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragserve.commands.ingest import load_settings, signals_stop
from ragserve.commands.options import with_settings
from ragserve.config import Settings
from ragserve.errors import NotFound

if TYPE_CHECKING:
    from ragserve_index import IndexStore
    from ragserve_index.types import Document

__all__ = ["register"]

_ENGINE_SETTINGS = (
    "data_dir",
    "model",
    "tokenizer",
    "dtype",
    "max_total_tokens",
    "mem_fraction_static",
    "tp_size",
    "engine_args",
    "kv_host_bytes",
    "kv_disk_bytes",
    "kv_storage",
    "api_key",
)
_WARM_HELP = (
    "Compute documents' KV ahead of queries, into every tier down to the disk. A server on the data folder does it, or the one at --url; "
    "where none runs, an engine started for it does, and a server started later finds them. What is cached is skipped. Exit status: 0 all "
    "are cached; 3 some are not, each listed with its reason; 130 interrupted."
)

_NamespaceOption = Annotated[str, typer.Option("--namespace", "-n", help="Of the documents.")]
_DataDirOption = Annotated[Path | None, typer.Option(help="Folder of registry and indexes.")]
_ModelOption = Annotated[
    str | None, typer.Option(help="Serving model, if no server has used the folder yet.")
]
_TokenizerOption = Annotated[str | None, typer.Option(help="Tokenizer where it differs from the model's.")]
_JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout, nothing else.")]


def register(app: typer.Typer) -> None:
    docs = typer.Typer(help="List, show and remove documents.", no_args_is_help=True)
    docs.command("ls")(ls)
    docs.command("show")(show)
    docs.command("rm")(rm)
    docs.command("drop")(drop)
    docs.command("warm", help=_WARM_HELP)(with_settings(warm, _ENGINE_SETTINGS))
    app.add_typer(docs, name="docs")


def ls(
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", help="Only this one; all without it.")
    ] = None,
    prefix: Annotated[str | None, typer.Option(help="Only sources that start with this.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Documents listed at most.")] = 10_000,
    as_json: _JsonOption = False,
    data_dir: _DataDirOption = None,
) -> None:
    """List documents."""
    from ragserve.ingest.prune import every_document

    with _store(data_dir) as store:
        names = [namespace] if namespace else [info.name for info in store.namespaces()]
        found = (document for name in names for document in every_document(store, name, source_prefix=prefix))
        documents = list(islice(found, limit))
    if as_json:
        typer.echo(json.dumps([_plain(document) for document in documents], indent=1, ensure_ascii=False))
        return
    _print(documents)


def show(
    document: Annotated[str, typer.Argument(metavar="DOC_ID|SOURCE")],
    namespace: _NamespaceOption = "default",
    text: Annotated[
        bool, typer.Option("--text", help="Print the document's text, put together from its chunks.")
    ] = False,
    as_json: _JsonOption = False,
    data_dir: _DataDirOption = None,
) -> None:
    """Show a document and its chunks."""
    with _store(data_dir) as store:
        found = _resolve(store, namespace, document)
        chunks = store.document_chunks(namespace, found.doc_id)
    if as_json:
        own = ("chunk_id", "ordinal", "start", "end", "page", "n_tokens", "text")
        body = {**_plain(found), "chunks": [{name: getattr(chunk, name) for name in own} for chunk in chunks]}
        typer.echo(json.dumps(body, indent=1, ensure_ascii=False))
        return
    if text:
        typer.echo("".join(chunk.text for chunk in chunks))
        return
    for name, value in _plain(found).items():
        typer.echo(f"{name}: {value}")
    for chunk in chunks:
        page = f", page {chunk.page}" if chunk.page is not None else ""
        typer.echo(
            f"\n--- chunk {chunk.chunk_id} [{chunk.start}:{chunk.end}], {chunk.n_tokens} tokens{page}\n{chunk.text}"
        )


def rm(
    documents: Annotated[list[str], typer.Argument(metavar="DOC_ID|SOURCE...")],
    namespace: _NamespaceOption = "default",
    as_json: _JsonOption = False,
    data_dir: _DataDirOption = None,
    model: _ModelOption = None,
    tokenizer: _TokenizerOption = None,
) -> None:
    """Remove documents, and what is cached of them. Exits with 1 if one is not there; the others are removed
    all the same.
    """
    from ragserve.cache.evictions import clean_files

    removed: list[Document] = []
    missing: list[str] = []
    with _store(data_dir) as store:
        for name in documents:
            try:
                removed.append(store.remove_document(namespace, _resolve(store, namespace, name).doc_id))
            except NotFound as error:
                if error.code == "namespace_not_found":
                    raise
                missing.append(name)
        clean_files(load_settings(data_dir=data_dir, model=model, tokenizer=tokenizer), store)
    if as_json:
        typer.echo(
            json.dumps(
                {"removed": [_plain(document) for document in removed], "missing": missing},
                indent=1,
                ensure_ascii=False,
            )
        )
    else:
        for document in removed:
            typer.echo(f"removed {document.doc_id} {document.source} ({document.n_chunks} chunks)")
        for name in missing:
            typer.secho(f"not in namespace {namespace}: {name}", err=True, fg=typer.colors.RED)
    if missing:
        raise typer.Exit(1)


def drop(
    namespace: Annotated[str, typer.Argument(help="Which one.")],
    as_json: _JsonOption = False,
    data_dir: _DataDirOption = None,
) -> None:
    """Remove a namespace with all its documents, and what is cached of them."""
    from ragserve.cache.evictions import clean_files

    with _store(data_dir) as store:
        dropped = store.drop_namespace(namespace)
        clean_files(load_settings(data_dir=data_dir), store)
    if as_json:
        typer.echo(json.dumps(asdict(dropped), indent=1, ensure_ascii=False))
    else:
        typer.echo(f"dropped {dropped.name} ({dropped.n_documents:,} documents, {dropped.n_chunks:,} chunks)")


def warm(
    settings: Settings,
    namespace: Annotated[str, typer.Argument(help="Of the documents.")] = "default",
    doc: Annotated[
        list[str] | None, typer.Option(metavar="DOC_ID|SOURCE", help="Only this one. Repeatable.")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(envvar="RAGSERVE_URL", help="Ask this server instead of using the data folder."),
    ] = None,
    as_json: _JsonOption = False,
) -> None:
    """See _WARM_HELP."""
    from ragserve.cache.warm import submit_warm
    from ragserve.commands.warm import show_warm

    if url:
        _warm_by(url, settings, namespace, doc, as_json)
        return
    with signals_stop() as signals, _store(settings.data_dir) as store:
        doc_ids = None if doc is None else [_resolve(store, namespace, name).doc_id for name in doc]
        report = show_warm(
            settings, store, submit_warm(store, namespace, doc_ids).job_id, signals.stop, quiet=as_json
        )
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=1, ensure_ascii=False))
    if signals.received:
        raise typer.Exit(128 + signals.received)
    if report.state != "done":
        raise typer.Exit(1)
    if report.failures:
        raise typer.Exit(3)


def _warm_by(url: str, settings: Settings, namespace: str, doc: list[str] | None, as_json: bool) -> None:
    from ragserve.client import Client

    key = settings.api_key
    with Client(url, api_key=key.get_secret_value() if key else None) as client:
        job = client.call("POST", "/rag/cache/warm", json={"namespace": namespace, "documents": doc})
        job = client.wait(job["job_id"])
    counts = {state: n for state, n in job["counts"].items() if n}
    if as_json:
        typer.echo(json.dumps(job, indent=1, ensure_ascii=False))
    else:
        said = ", ".join(f"{n:,} {state}" for state, n in counts.items())
        typer.echo(f"{said}; {job['chunks']:,} chunks, {job['tokens']:,} tokens computed ({job['job_id']})")
    if counts.get("failed") or counts.get("skipped"):
        raise typer.Exit(3)


@contextmanager
def _store(data_dir: Path | None) -> Iterator[IndexStore]:
    from ragserve_index import IndexStore

    settings = load_settings(data_dir=data_dir)
    if not settings.data_dir.is_dir():
        raise NotFound(
            f"There is no data in {settings.data_dir}.", hint="Ingest something first, or give --data-dir."
        )
    store = IndexStore(settings.data_dir, index_type=settings.index_type, device=settings.index_device)
    try:
        yield store
    finally:
        store.close()


def _resolve(store: IndexStore, namespace: str, name: str) -> Document:
    """By doc_id, by source, or by a path that leads to the source."""
    try:
        return store.document(namespace, name)
    except NotFound as error:
        if error.code == "namespace_not_found":
            raise
    for source in (name, os.path.realpath(os.path.expanduser(name))):
        found = store.find_source(namespace, source)
        if found is not None:
            return found
    raise NotFound(
        f"No document {name!r} in namespace {namespace!r}.",
        hint="See `ragserve docs ls`.",
        code="document_not_found",
    )


def _plain(document: Document) -> dict[str, Any]:
    return {**asdict(document), "metadata": dict(document.metadata)}


def _print(documents: list[Document]) -> None:
    """Two lines a document: sources are long, and terminals are not."""
    for document in documents:
        facts = f"{document.n_chunks:,} chunks, {document.n_tokens:,} tokens, namespace {document.namespace}"
        typer.echo(f"{document.doc_id}  {document.title}  ({facts})\n    {document.source}")
    typer.echo(f"{len(documents):,} documents")
