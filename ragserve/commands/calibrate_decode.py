"""`ragserve calibrate --part decode`: find the context length from which sparse decoding is faster on this
machine."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragserve.commands.options import DECODE_SETTINGS, ENGINE_SETTINGS, say, with_settings
from ragserve.config import Settings
from ragserve.files import temporary_folder

if TYPE_CHECKING:
    from ragserve.engine.local import LocalEngine
    from ragserve.profiles.decode import DecodeProfile

SETTINGS = ("model", "data_dir", *ENGINE_SETTINGS, *DECODE_SETTINGS)


def register(app: typer.Typer) -> None:
    instead: Any = "Use `ragserve calibrate --part decode`."  # Typer's annotation allows a bool only
    app.command("calibrate-decode", deprecated=instead, hidden=True)(
        with_settings(calibrate_decode, SETTINGS)
    )


@temporary_folder()
def calibrate_decode(
    settings: Settings,
    batch: Annotated[
        int,
        typer.Option(
            min=1, help="Requests that decode at once. With more of them, sparse decoding pays sooner."
        ),
    ] = 4,
    max_tokens: Annotated[
        int | None, typer.Option(min=1024, help="Longest context to measure. Default: what the engine takes.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=8, help="Tokens that each request generates.")] = 96,
) -> None:
    """Time dense and sparse decode steps over context lengths and write a profile to the data folder.

    `ragserve serve --sparse-attention on` keeps requests dense up to the length found, unless
    --decode-dense-below is given. Stop a server on the same machine first: it would disturb the
    measurement."""
    from ragserve.commands.serve_checks import check_engine
    from ragserve.engine.offline import run_once
    from ragserve.profiles.decode import FILE_NAME, options_of
    from ragserve.verification.calibration.decode import find_and_save

    options_of(settings)  # refuse dense decoding before an engine is started
    check_engine(settings)

    async def work(engine: LocalEngine) -> DecodeProfile:
        return await find_and_save(
            settings, engine, batch=batch, max_tokens=max_tokens, tokens=tokens, report=say
        )

    with tempfile.TemporaryDirectory(prefix="ragserve-calibrate-") as folder:
        own = {
            "data_dir": Path(folder),
            "kv_disk_bytes": 0,
            "kv_storage": "file",
            "sparse_attention": "on",
            "decode_dense_below": 0,
        }
        found = run_once(settings.model_copy(update=own), work)
    longest = found.points[-1]
    faster = longest.dense_ms / longest.sparse_ms
    typer.echo(
        f"dense up to {found.dense_below} tokens; "
        f"at {longest.tokens} tokens a sparse step is {faster:.2f} times as fast"
    )
    typer.echo(f"written: {settings.data_dir / FILE_NAME}")
