"""`ragserve calibrate-decode`: find the context length from which sparse decoding is faster on this
machine."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ragserve.commands.options import ENGINE_SETTINGS, say, with_settings
from ragserve.config import Settings

if TYPE_CHECKING:
    from ragserve.engine.local import LocalEngine
    from ragserve.profiles.decode import Point

SETTINGS = (
    "model",
    "data_dir",
    *ENGINE_SETTINGS,
    "decode_mode",
    "decode_budget",
    "decode_reuse",
    "decode_scores",
    "decode_threshold",
    "decode_page_size",
    "decode_logical_page",
    "decode_ranking",
    "decode_bound",
)


def register(app: typer.Typer) -> None:
    app.command("calibrate-decode")(with_settings(calibrate_decode, SETTINGS))


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
    from ragserve.calibration.decode import measure
    from ragserve.engine.offline import run_once
    from ragserve.measuring.report import measured_on
    from ragserve.profiles.decode import DECODE, FILE_NAME, DecodeProfile, crossover, options_of

    options = options_of(settings)
    place = settings.data_dir / FILE_NAME

    async def work(engine: LocalEngine) -> tuple[str, list[Point]]:
        points = await measure(engine, options, batch=batch, max_tokens=max_tokens, tokens=tokens, report=say)
        return engine.info.fingerprint, points

    with tempfile.TemporaryDirectory(prefix="ragserve-calibrate-") as folder:
        own = {
            "data_dir": Path(folder),
            "kv_disk_bytes": 0,
            "sparse_attention": "on",
            "decode_dense_below": 0,
        }
        fingerprint, points = run_once(settings.model_copy(update=own), work)
    where = measured_on(settings.model)
    found = DecodeProfile(crossover(points), options, batch, tuple(points), **where)
    DECODE.save(place, fingerprint, found)
    longest = points[-1]
    faster = longest.dense_ms / longest.sparse_ms
    typer.echo(
        f"dense up to {found.dense_below} tokens; "
        f"at {longest.tokens} tokens a sparse step is {faster:.2f} times as fast"
    )
    typer.echo(f"written: {place}")
