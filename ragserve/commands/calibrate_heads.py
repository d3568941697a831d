"""`ragserve calibrate --part heads`: learn which KV heads may stream, and what that costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ragserve.config import DEFAULT_MODEL
from ragserve.errors import InvalidRequest


def register(app: typer.Typer) -> None:
    instead: Any = "Use `ragserve calibrate --part heads`."  # Typer's annotation allows a bool only
    app.command("calibrate-heads", deprecated=instead, hidden=True)(calibrate_heads)


def calibrate_heads(
    out: Annotated[Path, typer.Argument(help="Pattern file to write, for `ragserve serve --decode-heads`.")],
    model: Annotated[str, typer.Option(help="The model: a Hugging Face path or id.")] = DEFAULT_MODEL,
    share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the heads that the pattern lets stream.")
    ] = 0.5,
    steps: Annotated[int, typer.Option(min=1, help="Training steps, one text each.")] = 200,
    tokens: Annotated[
        int,
        typer.Option(
            min=768,
            help="Tokens of the longest text; the others have at least half of it. Keep it well above the "
            "320 tokens that streaming heads attend to.",
        ),
    ] = 1536,
    penalty: Annotated[
        float, typer.Option(min=0, help="Weight of the mean gate beside the hidden states' relative error.")
    ] = 0.05,
    held_out: Annotated[int, typer.Option(min=1, help="Texts that the pattern is tested on.")] = 8,
    device: Annotated[str, typer.Option(help="torch device; auto: cuda if there is one.")] = "auto",
) -> None:
    """Learn a gate per KV head on synthetic passkeys (DuoAttention) and write the pattern of streaming heads.

    Prints the quality at 25, 50 and 75 % streaming heads, chosen by the gates and, for comparison, at
    random."""
    if out.exists() and out.is_dir():
        raise InvalidRequest(f"{out} is a folder.", hint="Name the file to write.")
    from ragserve.verification.calibration.streaming_heads import calibrate_heads as calibrate

    def progress(step: int, error: float, gate: float) -> None:
        if step % 20 == 0 or step == steps - 1:
            typer.echo(f"step {step + 1} of {steps}: error {error:.4f}, mean gate {gate:.3f}", err=True)

    typer.echo(f"{'streaming':>9}  {'chosen by':>9}  {'error':>7}  {'same token':>10}  {'passkeys':>8}")
    rows = calibrate(
        out,
        model=model,
        share=share,
        steps=steps,
        tokens=tokens,
        penalty=penalty,
        held_out=held_out,
        device=device,
        progress=progress,
    )
    for row in rows:
        figures = f"{row['error']:7.4f}  {row['agreement']:10.1%}  {row['passkeys']:8.1%}"
        typer.echo(f"{row['share']:9.0%}  {row['chosen by']:>9}  {figures}")
    typer.echo(f"written: {out}")
