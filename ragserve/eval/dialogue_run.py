"""Evaluate strategies along dialogues, on an engine of this process."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragserve.answering.prompt import PromptBuilder
from ragserve.config import Settings
from ragserve.eval.console import progress
from ragserve.eval.data import Half, set_name
from ragserve.eval.dialogue_sets import AskedAt, load_dialogues
from ragserve.eval.multiturn_engine import NOTE, by_turn, led_along
from ragserve.eval.rest import Line, report_of
from ragserve.strategy_spec import StrategySpec
from ragserve.verification import report

if TYPE_CHECKING:
    from ragserve.engine.local import LocalEngine


def lead_dialogues(
    settings: Settings,
    paths: list[Path],
    specs: list[StrategySpec],
    shape: tuple[int, int | None, AskedAt, int, Half | None],
    max_new_tokens: int,
    budgets: tuple[int | None, list[int], list[int]],
    out: Path | None,
) -> list[Line]:
    """Lead strategies along dialogues on an engine of this process; print and write a table for each set.
    ``shape``: turns, limit, place of the questions, turns by which documents come before them, and half, as
    `load_dialogues` takes them. ``budgets``: that of decode steps, those of earlier turns, and the numbers of
    turns after which a dialogue is prefilled anew."""
    from ragserve.engine.offline import run_once
    from ragserve.engine.server_args import resolve_sparse_attention

    turns, _, asked_at, ahead, half = shape
    decode_budget, session_budgets, refresh_turns = budgets
    made = {path: load_dialogues(path, *shape) for path in paths}

    async def work(engine: LocalEngine) -> dict[Path, list[Line]]:
        builder = PromptBuilder.load(engine.info.tokenizer, settings.system_prompt)
        found = {}
        for path, dialogues in made.items():
            with progress(set_name(path), turns * len(dialogues)) as step:
                found[path] = await led_along(
                    engine,
                    builder,
                    dialogues,
                    specs,
                    max_new_tokens,
                    budget=decode_budget,
                    session_budgets=session_budgets,
                    refresh_turns=refresh_turns,
                    progress=step,
                )
        await engine.control("check")
        return found

    settings, _ = resolve_sparse_attention(settings)  # its record is in the data folder
    with tempfile.TemporaryDirectory(prefix="ragserve-eval-") as folder:
        own: dict[str, Any] = {"data_dir": Path(folder), "kv_disk_bytes": 0, "kv_storage": "file"}
        if decode_budget is not None:
            own |= {"sparse_attention": "on", "decode_mode": "dense", "decode_max_budget": decode_budget}
            own["decode_budget"] = decode_budget
        found = run_once(settings.model_copy(update=own), work)
    for path, lines in found.items():
        workload: dict[str, Any] = {"set": set_name(path), "mode": "multiturn"}
        workload["model"] = Path(settings.model).name
        workload |= {"turns": turns, "dialogues": len(made[path]), "max_new_tokens": max_new_tokens}
        workload |= {"asked_at": asked_at, "decode_budget": decode_budget}
        workload |= {"ahead": ahead, "session_budgets": session_budgets}
        workload |= {"refresh_turns": refresh_turns, "half": half}
        name = f"eval {set_name(path)} multiturn"
        report.write(name, workload, by_turn(lines), out=report_of(path, paths, out), note=NOTE)
    return [{"set": set_name(path), **line} for path, lines in found.items() for line in lines]
