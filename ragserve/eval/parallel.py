"""Run an evaluation over several engine processes: start the workers, watch them, and collect their rows."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragserve.config import SECRETS, Settings
from ragserve.engine.document_prefix import prefix_text
from ragserve.engine.running_server import kill_session, spawn
from ragserve.engine.server_args import resolve_sparse_attention
from ragserve.errors import EngineError
from ragserve.eval.data import Half, by_name, load
from ragserve.eval.engine import Tier
from ragserve.files import write_json
from ragserve.strategy_spec import StrategySpec
from ragserve.verification import rows

_POLL_S = 0.2
_RESTARTS = 1  # per engine: several that start at once may pick the same port
# settings that change what is read or answered, and those that begin so
_DEPENDED_ON = (
    *("model", "tokenizer", "dtype", "context_length", "engine_args", "sentence_bytes", "system_prompt"),
    *("embedder", "query_prompt", "passage_prompt"),
    *("kv_bits", "kv_page_bits", "kv_block_tokens", "sparse_attention"),
)
_OF_ATTENTION = ("decode_", "prefill_")
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurements to make. ``sets`` are files; ``workers`` engines run side by side, each with
    ``in_flight`` questions at a time.

    ``seconds``: stop asking after that time, engine start included; the rows known by then are reported.
    ``first``: every question is asked under that many of the strategies before any under the others.
    ``half``: of each set. ``compare``, ``tier``: as `ragserve.eval.engine.Ask` has them. ``benchmark``: the
    preset's name."""

    sets: Sequence[Path]
    strategies: Sequence[StrategySpec]
    settings: Settings
    limit: int | None = None
    max_new_tokens: int = 24
    in_flight: int = 4
    workers: int = 1
    seconds: float | None = None
    first: int = 0
    half: Half | None = None
    compare: bool = True
    tier: Tier = "device"
    benchmark: str | None = None


def run(
    plan: Plan, folder: Path, progress: Progress = lambda done, total: None
) -> tuple[list[rows.Row], dict[str, Any]]:
    """Measure the rows of a plan, in order of sets, questions and strategies.

    Rows that ``folder`` already holds are not asked for again; engines start only if some are missing. An
    engine that ends early is started once more.

    Returns:
        The rows, and a description of what served them (``engine``, ``environment``).

    Raises:
        EngineError: An engine ended twice (with the end of its log), or nothing was answered in time. Run
            again with the same folder to go on, or take :func:`known`.
    """
    keys = _keys(plan)
    rows.claim(folder, _identity(plan))
    before = rows.read(folder)
    done = {key for key in keys if key in before and not before[key].get("error")}
    if len(done) < len(set(keys)):
        written = rows.count(folder)

        def tick() -> None:
            progress(min(len(keys), len(done) + rows.count(folder) - written), len(keys))

        _work(plan, folder, tick)
    return known(plan, folder)


def known(plan: Plan, folder: Path) -> tuple[list[rows.Row], dict[str, Any]]:
    """The same as :func:`run`, of the rows there are now. Raises EngineError if there is none."""
    by_key = rows.read(folder)
    found = [by_key[key] for key in _keys(plan) if key in by_key]
    if not found:
        raise EngineError(
            f"No question has been answered in {folder}.", hint="Give it more time; see worker-*.log there."
        )
    served = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("engine-*.json"))]
    return found, served[0]


def _keys(plan: Plan) -> list[rows.Key]:
    questions = [
        (name, question)
        for name, path in by_name(plan.sets).items()
        for question in load(path, plan.limit, plan.half)
    ]
    return [(name, question.id, spec.label) for name, question in questions for spec in plan.strategies]


def _identity(plan: Plan) -> dict[str, Any]:
    """The facts that all rows of one table must share."""
    settings, _ = resolve_sparse_attention(plan.settings)
    names = {*_DEPENDED_ON, *(name for name in Settings.model_fields if name.startswith(_OF_ATTENTION))}
    files = {"kv_prefix": prefix_text(settings).encode()}
    if settings.decode_heads is not None:
        files["decode_heads"] = settings.decode_heads.read_bytes()
    sets = {name: path.read_bytes() for name, path in by_name(plan.sets).items()}
    return {
        **settings.model_dump(mode="json", include=names),
        **_digests(files),
        "max_new_tokens": plan.max_new_tokens,
        "compared": plan.compare,
        "tier": plan.tier,
        "sets": _digests(sets),
    }


def _digests(contents: Mapping[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(content).hexdigest()[:16] for name, content in contents.items()}


def _work(plan: Plan, folder: Path, tick: Callable[[], None]) -> None:
    with contextlib.ExitStack() as stack:
        running = {index: stack.enter_context(_worker(plan, folder, index)) for index in range(plan.workers)}
        restarts = dict.fromkeys(running, _RESTARTS)
        deadline = time.monotonic() + (plan.seconds or math.inf)
        while running and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            tick()
            for index, (process, log) in list(running.items()):
                if process.poll() is None:
                    continue
                del running[index]
                if process.returncode == 0:
                    continue
                if not restarts[index]:
                    end = log.read_bytes()[-4000:].decode("utf-8", "replace")
                    raise EngineError(
                        f"An engine of the evaluation ended with {process.returncode}:\n{end}",
                        hint="What was measured is kept: run again with the same folder to go on.",
                    )
                restarts[index] -= 1
                running[index] = stack.enter_context(_worker(plan, folder, index))


@contextlib.contextmanager
def _worker(plan: Plan, folder: Path, index: int) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    # Documents serve one question each, so they need no disk, and no store that engines share; every engine
    # needs its own folder.
    own = {"kv_disk_bytes": 0, "kv_storage": "file", "data_dir": folder / f"data-{index}"}
    settings, _ = resolve_sparse_attention(plan.settings)  # its record is in the data folder
    settings = settings.model_copy(update=own)
    job = {
        "folder": str(folder),
        "index": index,
        "of": plan.workers,
        "sets": [str(path) for path in plan.sets],
        "limit": plan.limit,
        "half": plan.half,
        "strategies": [spec.label for spec in plan.strategies],
        "first": plan.first,
        "max_new_tokens": plan.max_new_tokens,
        "in_flight": plan.in_flight,
        "compare": plan.compare,
        "tier": plan.tier,
        "settings": settings.model_dump(mode="json", exclude=set(SECRETS)),
    }
    place = folder / f"job-{index}.json"
    write_json(place, job)
    log = folder / f"worker-{index}.log"
    with log.open("ab") as output:
        command = [sys.executable, "-m", "ragserve.eval.engine_worker", str(place)]
        secrets = settings.secrets("embedder_api_key", "rerank_api_key")
        process = spawn(command, output, {"PYTHONUNBUFFERED": "1"} | secrets)
    try:
        yield process, log
    finally:
        kill_session(process)  # its rows are on disk
