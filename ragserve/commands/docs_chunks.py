"""`ragserve docs chunks`: list, show, edit, disable and enable the chunks of a document."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragserve.commands.data_folder import open_data, resolve
from ragserve.commands.job_console import place, print_json, shown
from ragserve.commands.options import AsJson, Namespace, with_settings
from ragserve.config import Settings
from ragserve.errors import InvalidRequest
from ragserve.tenants.audit_log import record_command

if TYPE_CHECKING:
    from ragserve_index import IndexStore
    from ragserve_index.chunk_changes import ChunkState, LostCorrection
    from ragserve_index.types import Document

_SETTINGS = ["data_dir", "registry_url", "model", "tokenizer", "embedder", "embed_device", "chunk_tokens"]
_EXCERPT_CHARS = 90


def register(docs: typer.Typer) -> None:
    """Add the command to `ragserve docs`."""
    docs.command("chunks")(with_settings(chunks, _SETTINGS))


def chunks(
    settings: Settings,
    document: Annotated[str, typer.Argument(metavar="DOC_ID|SOURCE")],
    chunk: Annotated[
        int | None, typer.Argument(min=0, help="Number of one chunk, from 0. Default: list all.")
    ] = None,
    namespace: Namespace = "default",
    text: Annotated[
        str | None, typer.Option(help="Give the chunk this text; - reads it from standard input.")
    ] = None,
    disable: Annotated[bool, typer.Option("--disable", help="Take it out of every search.")] = False,
    enable: Annotated[bool, typer.Option("--enable", help="Search it again.")] = False,
    restore: Annotated[bool, typer.Option("--restore", help="Give it the text of the file again.")] = False,
    version: Annotated[
        str | None,
        typer.Option(help="Change it only if it still has this version. Default: as it is now."),
    ] = None,
    lost: Annotated[
        bool, typer.Option("--lost", help="List changes whose text the file no longer has.")
    ] = False,
    forget_lost: Annotated[bool, typer.Option("--forget-lost", help="Remove these for good.")] = False,
    as_json: AsJson = False,
) -> None:
    """List a document's chunks, or show, edit, disable or enable one. A change stays when the file is
    ingested again, as long as the chunk has the same text there; `ragserve ingest` reports what is lost."""
    asked = [text is not None, disable, enable, restore]
    if (disable and enable) or (text is not None and restore):
        raise InvalidRequest("Give --disable or --enable, and --text or --restore.")
    if (any(asked) or version) and chunk is None:
        raise InvalidRequest("Say which chunk: ragserve docs chunks DOCUMENT NUMBER ...", param="chunk")
    if version and not any(asked):
        raise InvalidRequest("--version goes with a change: --text, --restore, --disable or --enable.")
    if (lost or forget_lost) and chunk is not None:
        raise InvalidRequest("--lost and --forget-lost are for the whole document: give no number.")
    with open_data(settings) as store:
        found = resolve(store, namespace, document)
        if lost or forget_lost:
            _lost(store, settings, found, forget_lost, as_json)
            return
        if chunk is None:
            _list(store, found, as_json)
            return
        state = store.chunk_changes.state(namespace, found.doc_id, chunk)
        if any(asked):
            new = state.original or state.chunk.text if restore else text
            if new == "-":
                new = sys.stdin.read().removesuffix("\n")
            flag = True if disable else False if enable else None
            state = _change(store, settings, found, state, version or state.version, new, flag)
    _show(state, as_json)


def _change(
    store: IndexStore,
    settings: Settings,
    document: Document,
    state: ChunkState,
    version: str,
    text: str | None,
    disabled: bool | None,
) -> ChunkState:
    from ragserve.cache.evictions import clean_files
    from ragserve.ingest.chunk_editor import ChunkEditor
    from ragserve.retrieval.embedder import Embedder

    name = settings.tokenizer or settings.model
    editor = ChunkEditor(settings, store, lambda: Embedder.of(settings), name)
    place = (document.namespace, document.doc_id, state.chunk.ordinal)
    changed = editor.change(*place, version, text=text, disabled=disabled)
    clean_files(settings, store)
    record_command(
        settings,
        "docs chunks",
        namespace=document.namespace,
        document=document.doc_id,
        chunk=state.chunk.ordinal,
        result="changed",
    )
    return changed


def _lost(store: IndexStore, settings: Settings, document: Document, forget: bool, as_json: bool) -> None:
    changes = store.chunk_changes
    found = changes.lost(document.namespace, [document.doc_id]).get(document.doc_id, [])
    if forget:
        changes.forget_lost(document.namespace, document.doc_id)
        record_command(
            settings,
            "docs chunks",
            namespace=document.namespace,
            document=document.doc_id,
            lost=len(found),
            result="forgotten",
        )
    if as_json:
        print_json([asdict(each) for each in found])
        return
    for each in found:
        typer.echo(f"chunk {each.ordinal}: {_excerpt(each.original)}\n    {_becomes(each)}")
    what = "lost correction" if len(found) == 1 else "lost corrections"
    typer.echo(f"{len(found):,} {what}{' forgotten' if forget else ''}")


def _becomes(lost: LostCorrection) -> str:
    if lost.text == lost.original:
        return "was disabled"
    return f"was {'disabled, and ' if lost.disabled else ''}edited: {_excerpt(lost.text)}"


def _list(store: IndexStore, document: Document, as_json: bool) -> None:
    states = store.chunk_changes.states(document.namespace, document.doc_id)
    if as_json:
        print_json([_plain(state) for state in states])
        return
    for state in states:
        typer.echo(f"{_head(state)}\n    {_excerpt(state.chunk.text)}")
    typer.echo(f"{len(states):,} {'chunk' if len(states) == 1 else 'chunks'}")


def _show(state: ChunkState, as_json: bool) -> None:
    if as_json:
        print_json(_plain(state))
        return
    typer.echo(f"{_head(state)}\nversion {state.version}\n{state.chunk.text}")
    if state.original is not None:
        typer.echo(f"\n--- text of the file\n{state.original}")


def _head(state: ChunkState) -> str:
    marks = [place(state.chunk), "edited" if state.chunk.edited else "", "disabled" if state.disabled else ""]
    head = f"{state.chunk.ordinal} [{state.chunk.start}:{state.chunk.end}], {state.chunk.n_tokens} tokens"
    return ", ".join([head, *filter(None, marks)])


def _excerpt(text: str) -> str:
    line = shown(" ".join(text.split()))
    return line if len(line) <= _EXCERPT_CHARS else line[: _EXCERPT_CHARS - 1] + "…"


def _plain(state: ChunkState) -> dict[str, Any]:
    from ragserve.api.views import ChunkView

    return ChunkView.of(state, edits=True).model_dump(exclude={"doc_id"})
