"""The command line. Each command is a module of `ragserve.commands` and imports heavy packages when run."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import NoReturn

import typer

from ragserve import __version__
from ragserve.children import ended_by_signals
from ragserve.errors import RagserveError, explained

# in the order of `ragserve --help`
COMMANDS = (
    "serve",
    "ingest",
    "sync",
    "docs",
    "query",
    "mcp",
    "keys",
    "cache",
    "doctor",
    "tune",
    "adapt",
    "evaluate",
    "calibrate",
    "calibrate_decode",
    "calibrate_heads",
    "bench",
)
_EPILOG = (
    "To begin: `ragserve ingest FOLDER --recursive`, then `ragserve serve`, and when it is ready, in another "
    "terminal, `ragserve query QUESTION`. `ragserve COMMAND --help` describes a command, `ragserve doctor` "
    "finds out why something fails. Settings are flags, RAGSERVE_* variables or lines of ragserve.toml."
)
app = typer.Typer(name="ragserve", no_args_is_help=True, add_completion=False, epilog=_EPILOG)


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


def _register(command: str = "") -> None:
    """Register the command that is to run, or all: Typer takes 0.3 s to read the signatures of all."""
    asked = "evaluate" if command == "eval" else command.replace("-", "_")
    for name in (asked,) if asked in COMMANDS else COMMANDS:
        import_module(f"ragserve.commands.{name}").register(app)


def main() -> None:
    """Run the command line. A `RagserveError`, a file that cannot be written or read, and an argument that is
    not UTF-8 print a message that says what to do, no traceback, and exit with 1."""
    _register(*sys.argv[1:2])
    try:
        with ended_by_signals():
            app()
    except RagserveError as error:
        _fail(str(error))
    except UnicodeEncodeError as error:
        piece = error.object[error.start : error.end]
        given = next((each for each in sys.argv if piece in each), None)
        if given is None:
            raise
        _fail(f"The argument {given!a} is not UTF-8: no name is stored in another encoding.")
    except OSError as error:
        if (said := explained(error)) is None:
            raise
        _fail(str(said))


def _fail(text: str) -> NoReturn:
    typer.secho(f"error: {text}", err=True, fg=typer.colors.RED)
    sys.exit(1)


if __name__ == "__main__":
    main()
