"""Dialogues of several turns on a GPU machine, over all sets, with several engines on one GPU.

    python -m benchmarks.gpu_multiturn OUT_DIR SETS_DIR [--engines 5] [--dialogues 20] [--seconds 270]
        [--units SET:TURNS:PLACE,...] [--strategies LIST] [--refresh-turns 3] [--decode-budget 512]
        [--model FOLDER]

Does what `ragserve eval --mode multiturn` does, on machines that have SGLang and this checkout on the path
but not the rest of the product. A unit is a set, the turns of its dialogues and where their questions stand
(`end`, `beginning` or `middle`); units whose name ends in `+` also have the rivals that decode over chosen
pages. All units' first dialogues come first. Each dialogue is written to OUT_DIR/rows-N.jsonl when it has
ended; after ``--seconds``, engine start included, OUT_DIR/multiturn.json has the dialogues there are, by
turn, OUT_DIR/multiturn-short.json the turns of a strategy in one row, and the same command continues where
it stopped. Engines share the GPU: first tokens are those of a busy one. Without a GPU, `--engines 1
--refresh-turns "" --units onehop:5:end,crossdoc:5:end` takes minutes a dialogue."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.lib.fan_out import engine_args, listed
from ragserve.answering.prompt import PromptBuilder
from ragserve.config import DEFAULT_MODEL, load
from ragserve.engine.offline import run_once
from ragserve.errors import InvalidRequest
from ragserve.eval.data import find
from ragserve.eval.dialogue_sets import AskedAt, load_dialogues
from ragserve.eval.multiturn_engine import NOTE, by_turn, led_along
from ragserve.strategy_spec import parse
from ragserve.verification import report

UNITS = (
    "onehop:5:end+,crossdoc:5:end+,2wikimqa:5:end+,mtrag_un:5:end+,qmsum:3:end+,musique:2:end+,"
    "crossdoc:5:beginning,onehop:5:beginning,crossdoc:5:middle,onehop:5:middle"
)
STRATEGIES = "full,prefix,concat:recompute=sentences,share=0.1,concat:recompute=sentences,share=0.3"
AT = ", question at the "
SHORT = (
    "By turn: kl, KL(full || strategy) in nats a token, mean over the answer of full that the strategy is "
    "led along; last to first: that of the last turn by that of the first; f1, percent, of what would be "
    "answered; ttft, milliseconds to the first token, documents on the device, beside all engines on the "
    "device. anew every N: every N turns the dialogue before the new documents is prefilled exactly. prefix, "
    "N by: decode steps read N tokens in each KV head, of pages chosen as named."
)
POOL_TOKENS = 200_000  # per engine: a dialogue of 8k tokens in a session of every side


class Unit(NamedTuple):
    """Dialogues of one set."""

    name: str
    turns: int
    asked_at: AskedAt
    rivals: bool

    @classmethod
    def of(cls, text: str) -> Unit:
        name, turns, place = text.rstrip("+").split(":")
        return cls(name, int(turns), place, text.endswith("+"))  # type: ignore[arg-type]

    @property
    def label(self) -> str:
        return f"{self.name}{AT}{self.asked_at}"


def tasks(given: argparse.Namespace) -> list[tuple[Unit, int]]:
    """Dialogues by unit and number, the first ones of all units first. Sets that are not there are left
    out."""
    units = []
    for unit in map(Unit.of, given.units.split(",")):
        try:
            find(unit.name, given.sets)
        except InvalidRequest as error:
            print(error, file=sys.stderr, flush=True)
        else:
            units.append(unit)
    return [(unit, number) for number in range(given.dialogues) for unit in units]


def done(folder: Path) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Lines of the dialogues that have ended, by unit and number."""
    found = {}
    for path in sorted(folder.glob("rows-*.jsonl")):
        for text in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(text)
            found[row["unit"], row["dialogue"]] = row["lines"]
    return found


def work(given: argparse.Namespace) -> None:
    """Lead strategies along every n-th dialogue, on an engine of this process."""
    number, of = given.worker
    own = [task for at, task in enumerate(tasks(given)) if at % of == number]
    ended = done(given.out)
    rows = given.out / f"rows-{number}.jsonl"

    async def lead(engine: Any) -> None:
        builder = PromptBuilder.load(engine.info.tokenizer, settings.system_prompt)
        for at, (unit, place) in enumerate(own):
            if (unit.label, place) in ended:
                continue
            path = find(unit.name, given.sets)
            made = load_dialogues(path, unit.turns, given.dialogues * unit.turns, unit.asked_at)
            if place >= len(made):
                continue
            lines = await led_along(
                engine,
                builder,
                [made[place]],
                parse(given.strategies),
                24,
                budget=given.decode_budget if unit.rivals else None,
                refresh_turns=[turns for turns in given.refresh_turns if turns < unit.turns],
                first=at,
                progress=lambda: None,
            )
            with rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"unit": unit.label, "dialogue": place, "lines": lines}) + "\n")
        await engine.control("check")

    graphs: dict[str, Any] = {}
    if torch.cuda.is_available():  # small ones: start-up matters more here than the last millisecond
        graphs = {"cuda_graph_max_bs_decode": 4, "disable_prefill_cuda_graph": True}
    with tempfile.TemporaryDirectory() as folder:
        settings = load(
            model=given.model,
            max_total_tokens=POOL_TOKENS,
            kv_disk_bytes=0,
            data_dir=Path(folder),
            sparse_attention="on",
            decode_mode="dense",
            decode_budget=given.decode_budget,
            decode_max_budget=given.decode_budget,
            engine_args=graphs | engine_args(None),
        )
        run_once(settings, lead)


def short(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each set and strategy, with the figures of its turns one after the other."""
    found = []
    for unit, strategy in dict.fromkeys((row["set"], row["strategy"]) for row in rows):
        own = [row for row in rows if (row["set"], row["strategy"]) == (unit, strategy)]
        kls = [row["answer_kl"] for row in own if row["answer_kl"] is not None]
        name, _, place = unit.partition(AT)
        line: dict[str, Any] = {"set": name, "question at": place, "strategy": strategy}
        line["dialogues"] = own[0]["n"]
        line["kl"] = " ".join(f"{kl:.2g}" for kl in kls)
        line["last to first"] = round(kls[-1] / kls[0], 2) if kls and kls[0] else None
        line["f1"] = " ".join(f"{row['f1']:.0f}" for row in own)
        ttft = ("-" if row["ttft_ms"] is None else f"{row['ttft_ms']:.0f}" for row in own)
        found.append(line | {"ttft": " ".join(ttft)})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("sets", type=Path)
    parser.add_argument("--engines", type=int, default=5)
    parser.add_argument("--dialogues", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=270)
    parser.add_argument("--units", default=UNITS)
    parser.add_argument("--strategies", default=STRATEGIES)
    parser.add_argument("--refresh-turns", type=listed(int), default=[3])
    parser.add_argument("--decode-budget", type=int, default=512)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--worker", type=int, nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.worker:
        work(given)
        return 0
    deadline = time.monotonic() + given.seconds
    failed = _run_workers(given, deadline)
    found, rows = done(given.out), []
    for label in dict.fromkeys(unit.label for unit, _ in tasks(given)):
        lines = [line for (unit, _), own in found.items() if unit == label for line in own]
        rows += [{"set": label, **row} for row in by_turn(lines)]
        errors = {line["error"] for line in lines if line["error"]}
        if errors:
            print(f"{label}: {len(errors)} dialogues ended early: {sorted(errors)[0]}", flush=True)
    machine = "GPU" if torch.cuda.is_available() else "CPU"
    workload: dict[str, Any] = {"model": Path(given.model).name}
    workload |= {"dialogues": len(found), f"engines on one {machine}": given.engines}
    workload |= {"max_new_tokens": 24, "decode budget": given.decode_budget}
    report.write("dialogues", workload, rows, out=given.out / "multiturn.json", note=NOTE, shown=("set",))
    report.write("dialogues", workload, short(rows), out=given.out / "multiturn-short.json", note=SHORT)
    return int(failed)


def _run_workers(given: argparse.Namespace, deadline: float) -> bool:
    """Run the engines until they have ended or time is up; one that fails is started once more. Return True
    if one failed twice."""

    def start(number: int) -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-m",
            __spec__.name,
            *sys.argv[1:],
            "--worker",
            str(number),
            str(given.engines),
        ]
        with (given.out / f"worker-{number}.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log)

    running = {number: start(number) for number in range(given.engines)}
    restarted, failed = set[int](), False
    try:
        while running and time.monotonic() < deadline:
            time.sleep(1)
            for number, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[number]
                if process.returncode and number not in restarted:  # two may have picked the same port
                    restarted.add(number)
                    running[number] = start(number)
                else:
                    failed |= bool(process.returncode)
    finally:
        for process in running.values():
            process.terminate()  # its rows are on disk
        for process in running.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
    return failed


if __name__ == "__main__":
    sys.exit(main())
