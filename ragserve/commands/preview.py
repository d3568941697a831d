"""`ragserve ingest --preview`: how files would be cut. Nothing is stored, and neither engine nor embedder is
loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ragserve.commands.job_console import place, print_json, shown
from ragserve.config import Settings
from ragserve.errors import InvalidRequest, UnsupportedDocument

if TYPE_CHECKING:
    from ragserve.ingest.parsing.parse_process import ParsedFile
    from ragserve_index.types import Chunk


def show_preview(settings: Settings, inputs: Sequence[str], as_json: bool) -> None:
    """Print the chunks of files. Exits with 3 if one cannot be read, which is said with the reason."""
    from ragserve.ingest.preview import Previewer, previewed
    from ragserve.ingest.tokenizer import TokenizerSource

    paths = [Path(given).expanduser() for given in inputs]
    for path in paths:
        if not path.is_file():
            raise InvalidRequest(
                f"--preview takes files, and {shown(str(path))!r} is none.",
                hint="Name one or more files, without URLs, folders and -.",
            )
    source = TokenizerSource.load(settings.tokenizer or settings.model)
    previewer = Previewer(settings, lambda: source)
    failed = False
    found: list[dict[str, Any]] = []
    for path in paths:
        try:
            parsed = previewer.preview(path.resolve(), path.name)
        except UnsupportedDocument as error:
            failed = True
            found.append({"filename": path.name, "error": str(error)})
            if not as_json:
                typer.secho(f"{shown(path.name)}: {shown(str(error))}", err=True, fg=typer.colors.RED)
            continue
        chunks = previewed(parsed, str(path))
        found.append(_plain(parsed, chunks))
        if not as_json:
            _print(parsed, chunks)
    if as_json:
        print_json(found)
    if failed:
        raise typer.Exit(3)


def _print(parsed: ParsedFile, chunks: Sequence[Chunk]) -> None:
    tokens = sum(chunk.n_tokens for chunk in chunks)
    size = f"{len(chunks):,} {'chunk' if len(chunks) == 1 else 'chunks'}, {tokens:,} tokens"
    typer.echo(f"{shown(parsed.filename)}: {shown(chunks[0].title)} ({parsed.mime}), {size}")
    if parsed.note:
        typer.echo(f"note: {shown(parsed.note)}")
    for chunk in chunks:
        where = f", {place(chunk)}" if chunk.page is not None else ""
        head = f"chunk {chunk.ordinal} [{chunk.start}:{chunk.end}], {chunk.n_tokens} tokens{where}"
        typer.echo(f"\n--- {head}\n{chunk.text}")


def _plain(parsed: ParsedFile, chunks: Sequence[Chunk]) -> dict[str, Any]:
    from ragserve.api.views import PreviewedChunk

    plain = asdict(parsed)
    own = {name: plain[name] for name in ("filename", "mime", "size", "metadata", "note")}
    shown_chunks = [PreviewedChunk.model_validate(chunk).model_dump() for chunk in chunks]
    return {**own, "title": chunks[0].title, "chunks": shown_chunks}
