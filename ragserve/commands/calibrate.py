"""`ragserve calibrate-heads`: learn which KV heads may stream, and what that costs."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Annotated

import typer

from ragserve.config import DEFAULT_MODEL
from ragserve.errors import InvalidRequest

_HELD_OUT_SEED = 1_000_003


def register(app: typer.Typer) -> None:
    app.command("calibrate-heads")(calibrate_heads)


def calibrate_heads(
    out: Annotated[Path, typer.Argument(help="Pattern file to write, for `ragserve serve --decode-heads`.")],
    model: Annotated[str, typer.Option(help="The model: a Hugging Face path or id.")] = DEFAULT_MODEL,
    share: Annotated[float, typer.Option(min=0, max=1, help="Share of the heads that the pattern lets stream.")] = 0.5,
    steps: Annotated[int, typer.Option(min=1, help="Training steps, one text each.")] = 200,
    tokens: Annotated[int, typer.Option(min=512, help="Tokens of the longest text; the others have at least half.")] = 1536,
    penalty: Annotated[float, typer.Option(min=0, help="Weight of the mean gate beside the hidden states' relative error.")] = 0.05,
    held_out: Annotated[int, typer.Option(min=1, help="Texts that the pattern is tried on.")] = 8,
    device: Annotated[str, typer.Option(help="torch device; auto: cuda if there is one.")] = "auto",
) -> None:
    """Learn a gate per KV head on synthetic passkeys (DuoAttention) and write the pattern of streaming heads.

    Prints the quality at 25, 50 and 75 % streaming heads, chosen by the gates and, beside them, at random.
    """
    if out.exists() and out.is_dir():
        raise InvalidRequest(f"{out} is a folder.", hint="Name the file to write.")
    from ragserve.engine.compat import prepare

    prepare()
    import torch

    from ragserve.calibrate_heads import SHARES, GatedModel, evaluate, learn, make_passkeys
    from sglang_ext.attention.heads import save_pattern, streaming_heads

    where = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    gated = GatedModel(model, device=where)

    def progress(step: int, error: float, gate: float) -> None:
        if step % 20 == 0 or step == steps - 1:
            typer.echo(f"step {step + 1} of {steps}: error {error:.4f}, mean gate {gate:.3f}", err=True)

    gates = learn(gated, steps=steps, tokens=tokens, penalty=penalty, progress=progress)
    draw = random.Random(_HELD_OUT_SEED)
    texts = [make_passkeys(gated.encode, tokens, draw) for _ in range(held_out)]
    noise = torch.rand(gates.shape, generator=torch.Generator().manual_seed(0))
    typer.echo(f"{'streaming':>9}  {'chosen by':>9}  {'error':>7}  {'same token':>10}  {'passkeys':>8}")
    found = []
    for part in sorted({0.0, *SHARES, share, 1.0}):
        for name, scores in (("gates", gates), ("chance", noise)):
            if name == "chance" and part in (0.0, 1.0):
                continue
            quality = evaluate(gated, streaming_heads(scores, part), texts)
            found.append({"chosen by": name, "share": part, **{k: round(v, 4) for k, v in vars(quality).items() if k != "share"}})
            typer.echo(f"{part:9.0%}  {name:>9}  {quality.error:7.4f}  {quality.agreement:10.1%}  {quality.passkeys:8.1%}")
    save_pattern(out, gates, share=share, model=model)
    details = {"steps": steps, "tokens": tokens, "penalty": penalty, "held out": held_out, "quality": found}
    out.write_text(json.dumps(json.loads(out.read_text(encoding="utf-8")) | details) + "\n", encoding="utf-8")
    typer.echo(f"written: {out}")
