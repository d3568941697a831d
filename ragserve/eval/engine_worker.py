"""One engine of an evaluation, in its own process: ``python -m ragserve.eval.engine_worker JOB.json``.

Takes every ``of``-th question from the ``index``-th on, and writes its rows and a description of the engine
to the job's folder."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ragserve.config import Settings


@dataclass(frozen=True, slots=True)
class WorkerJob:
    """The work of one worker: ``sets`` are files, ``settings`` the engine's, ``strategies`` labels."""

    folder: str
    index: int
    of: int
    sets: tuple[str, ...]
    limit: int | None
    strategies: tuple[str, ...]
    max_new_tokens: int
    in_flight: int
    compare: bool
    settings: dict[str, Any]

    @property
    def path(self) -> Path:
        return Path(self.folder) / f"job-{self.index}.json"

    def save(self) -> Path:
        self.path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        return self.path

    @classmethod
    def load(cls, path: Path) -> WorkerJob:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return cls(sets=tuple(raw.pop("sets")), strategies=tuple(raw.pop("strategies")), **raw)


def run(job: WorkerJob) -> None:
    """Start the engine, ask the questions and write rows. A question that fails is a row."""
    from ragserve.answering.prompt import PromptBuilder
    from ragserve.engine.local import LocalEngine
    from ragserve.engine.offline import run_once
    from ragserve.eval.data import interleaved, load, set_name
    from ragserve.eval.engine import Ask, evaluate
    from ragserve.eval.rows import RowFile, read
    from ragserve.strategy_spec import parse

    folder = Path(job.folder)
    questions = interleaved({set_name(path): load(path, job.limit) for path in map(Path, job.sets)})[
        job.index :: job.of
    ]
    finished = {key for key, row in read(folder).items() if not row.get("error")}
    specs = [spec for label in job.strategies for spec in parse(label)]

    async def work(engine: LocalEngine) -> None:
        (folder / f"engine-{job.index}.json").write_text(json.dumps(_served(engine)) + "\n", encoding="utf-8")
        builder = PromptBuilder.load(engine.info.tokenizer)
        with RowFile(folder / f"rows-{job.index}.jsonl") as rows:
            ask = Ask(job.max_new_tokens, job.in_flight, job.compare)
            await evaluate(engine, builder, questions, specs, ask, finished=finished, write=rows.write)
        await engine.control("check")

    run_once(Settings(**job.settings), work)


def _served(engine: Any) -> dict[str, Any]:
    """Describe the engine, hardware and versions."""
    from ragserve.measuring.report import environment

    return {"engine": asdict(engine.info), "environment": environment()}


if __name__ == "__main__":
    run(WorkerJob.load(Path(sys.argv[1])))
