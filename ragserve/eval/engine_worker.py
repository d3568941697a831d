"""An engine of an evaluation, in its own process: ``python -m ragserve.eval.engine_worker JOB.json``.

Takes every ``of``-th question from the ``index``-th on, and writes its rows and a description of the engine
to the job's folder."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ragserve.config import Settings


def run(job: dict[str, Any]) -> None:
    """Start the engine, ask the questions and write rows. A question that fails is a row.

    ``job``: as `ragserve.eval.parallel` writes it; ``sets`` are files, ``settings`` the engine's,
    ``strategies`` labels, of which all questions are asked under the ``first`` ones first."""
    from ragserve.answering.prompt import PromptBuilder
    from ragserve.answering.scores import SCORED
    from ragserve.engine.local import LocalEngine
    from ragserve.engine.offline import run_once
    from ragserve.eval.data import by_name, interleaved, load
    from ragserve.eval.engine import Ask, evaluate
    from ragserve.files import write_json
    from ragserve.retrieval.embedder import Embedder
    from ragserve.strategy_spec import parse
    from ragserve.verification.report import environment
    from ragserve.verification.rows import appending, read

    folder, index = Path(job["folder"]), job["index"]
    settings = Settings(**job["settings"])
    every = interleaved(
        {
            name: load(path, job["limit"], job["half"])
            for name, path in by_name(map(Path, job["sets"])).items()
        }
    )
    finished = {key for key, row in read(folder).items() if not row.get("error")}
    specs = [spec for label in job["strategies"] for spec in parse(label)]

    async def work(engine: LocalEngine) -> None:
        served = {"engine": asdict(engine.info), "environment": environment()}
        write_json(folder / f"engine-{index}.json", served)
        builder = PromptBuilder.load(engine.info.tokenizer, settings.system_prompt)
        with appending(folder / f"rows-{index}.jsonl") as write:
            ask = Ask(
                job["max_new_tokens"], job["in_flight"], settings.sentence_bytes, job["compare"], job["tier"]
            )
            mine = every[index :: job["of"]]
            embedder = (
                Embedder.of(settings)
                if any(spec.name == SCORED or spec.chooses_passages for spec in specs)
                else None
            )
            for part in filter(None, (specs[: job["first"]], specs[job["first"] :])):
                await evaluate(
                    engine, builder, mine, part, ask, finished=finished, write=write, embedder=embedder
                )
        await engine.control("check")

    run_once(settings, work)


if __name__ == "__main__":
    run(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
