"""`ragserve calibrate`: fit the cost model by which strategy ``auto`` chooses."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from ragserve.commands.options import ENGINE_SETTINGS, with_settings
from ragserve.config import Settings, StrategyName
from ragserve.errors import InvalidRequest

if TYPE_CHECKING:
    from ragserve.costs import Sample
    from ragserve.engine.local import LocalEngine
    from ragserve.strategies import StrategySpec

SETTINGS = ("model", "data_dir", "kv_disk_bytes", *ENGINE_SETTINGS)


def register(app: typer.Typer) -> None:
    app.command("calibrate")(with_settings(calibrate, SETTINGS))


def calibrate(
    settings: Settings,
    strategies: Annotated[str | None, typer.Option(help="Composed ones, as for eval. Default: those verified for the model.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=64, help="Longest prompt to measure. Default: what the engine takes.")] = None,
    document_tokens: Annotated[int, typer.Option(min=16, help="Size of the documents.")] = 256,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each case, after one that does not count.")] = 3,
) -> None:
    """Measure the time to the first token of every strategy on this machine and leave a profile in the data folder.

    Stop a server on the same machine first: it would be measured with it.
    """
    from ragserve.bench.report import environment
    from ragserve.bench.server import free_port
    from ragserve.calibrate import Schedule, measure
    from ragserve.costs import COSTS, FILE_NAME, fit
    from ragserve.engine.once import run_once
    from ragserve.gate import Gate
    from ragserve.strategies import parse
    from sglang_ext.protocol import EXACT_STRATEGIES

    names = [name for name in get_args(StrategyName) if name not in (*EXACT_STRATEGIES, "auto")]
    given = parse(strategies, names) if strategies else None
    place = settings.data_dir / FILE_NAME
    served: dict[str, str] = {}

    async def work(engine: LocalEngine) -> list[Sample]:
        served["fingerprint"] = engine.info.fingerprint
        gate = Gate.of(settings, engine.info)
        specs: list[StrategySpec] = given or [parse(label)[0] for label in gate.verified()]
        if not specs:
            raise InvalidRequest(
                "No composed strategy is verified for this model, so auto has nothing to choose from.",
                hint="Run ragserve eval --write-gate first, or name some with --strategies.",
            )
        return await measure(engine, specs, Schedule(max_tokens, document_tokens, repeats), lambda line: typer.echo(line, err=True))

    with tempfile.TemporaryDirectory(prefix="ragserve-calibrate-") as folder:
        # Documents of its own: a server may own those of the data folder.
        samples = run_once(settings.model_copy(update={"data_dir": Path(folder), "port": free_port()}), work)
    ran = environment()
    costs = fit(samples, model=Path(settings.model).name, hardware=ran["gpu"] or ran["cpu"], date=time.strftime("%Y-%m-%d"))
    COSTS.save(place, served["fingerprint"], costs)
    typer.echo(f"{len(samples)} measurements, mean error of the fit {costs.error:.1%}")
    for label in costs.composed:
        for tokens in (1024, 4096):
            composed = costs.composed_ms(label, [(tokens, "device")])
            typer.echo(f"{label}, {tokens} tokens on the device: {composed:.0f} ms, exact {costs.exact_ms(tokens):.0f} ms")
    typer.echo(f"written: {place}")
