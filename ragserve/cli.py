"""The command line. Each command lives in a module of `ragserve.commands`, which imports what is heavy only
when it runs.
"""

from __future__ import annotations

import sys

import typer

from ragserve import __version__
from ragserve.errors import RagserveError

app = typer.Typer(
    name="ragserve",
    help=__doc__.split("\n")[0] if __doc__ else None,
    no_args_is_help=True,
    add_completion=False,
)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"ragserve {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Answer questions over your documents with SGLang."""


def _register() -> None:
    from ragserve.commands import (
        bench,
        cache,
        calibrate,
        calibrate_decode,
        calibrate_heads,
        docs,
        doctor,
        evaluate,
        ingest,
        query,
        serve,
    )

    for module in (
        serve,
        ingest,
        docs,
        query,
        cache,
        doctor,
        evaluate,
        calibrate,
        calibrate_decode,
        calibrate_heads,
        bench,
    ):
        module.register(app)


def main() -> None:
    """Entry point: a known error prints its message and what to do, without a traceback, and exits with 1."""
    _register()
    try:
        app()
    except RagserveError as error:
        typer.secho(f"error: {error}", err=True, fg=typer.colors.RED)
        sys.exit(1)


if __name__ == "__main__":
    main()
