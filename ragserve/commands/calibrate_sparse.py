"""`ragserve calibrate --part sparse`: find what sparse attention costs a model in answers."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ragserve.commands.options import say
from ragserve.config import Settings
from ragserve.errors import InvalidRequest

if TYPE_CHECKING:
    from ragserve.engine.local import LocalEngine
    from ragserve.profiles.sparse_attention import SparseRecord


def calibrate_sparse(settings: Settings, data: Sequence[Path], limit: int | None, in_flight: int) -> None:
    """Ask question sets densely and sparsely, and write the record of the model to the data folder."""
    if not data:
        raise InvalidRequest(
            "--part sparse asks the questions of sets with long contexts.",
            hint="Name their files with --data; docs/sparse-decoding.md says what they should be like.",
            param="data",
        )
    from ragserve.commands.serve_checks import check_engine
    from ragserve.engine.offline import run_once
    from ragserve.engine.server_args import resolve_sparse_attention
    from ragserve.eval.sparse_calibration import BUDGETS, find_and_record, tasks_of
    from ragserve.profiles.sparse_attention import FILE_NAME

    tasks = tasks_of(data, limit)
    check_engine(settings)

    async def work(engine: LocalEngine) -> SparseRecord:
        return await find_and_record(settings, engine, tasks, in_flight=in_flight, report=say)

    with tempfile.TemporaryDirectory(prefix="ragserve-calibrate-") as folder:
        own = {
            "data_dir": Path(folder),
            "kv_disk_bytes": 0,
            "kv_storage": "file",
            "sparse_attention": "on",
            "decode_mode": "dense",
            "decode_max_budget": max(settings.decode_max_budget, *BUDGETS),
            "prefill_mode": "dense",
            "prefill_dense_below": 0,
        }
        found = run_once(settings.model_copy(update=own), work)
    for entry in found.entries:
        for name, each in entry.sets.items():
            loss = round(each.dense - each.score, 1)
            typer.echo(
                f"{entry.label}: {name}: {each.n} questions, {each.dense:.1f} dense, {loss:g} points lost, "
                f"at 95 % at most {each.loss_bound:.1f}; {each.read:.0%} of {each.prompt_tokens} tokens read"
            )
        typer.echo(f"{entry.label}: {'; '.join(entry.shortfalls()) or 'holds'}")
    _, why = resolve_sparse_attention(settings.model_copy(update={"sparse_attention": "auto"}))
    typer.echo(f"--sparse-attention auto: {why}")
    typer.echo(f"written: {settings.data_dir / FILE_NAME}")
