"""Stress of offloaded requests beside decode graphs: random requests to one engine with little room.

    python -m benchmarks.gpu_offloaded_stress OUT.json [--seconds 290] [--seed 1] [--page 64] [--dtype DTYPE]
        [--retract-every 41] [--compare 30] [--tp 2] [--merge EARLIER.json] [--ended PART] [--embedded]

The small model in bfloat16, a KV pool of 6,144 tokens in pages of 64, host pages for five times as many.
Rounds of up to 24 requests, at once or spread over seconds: offloaded, `auto`, and on the device with the
same lag; by budget and progressive; composed contexts; prompts and contexts larger than the pool; prompts
that share their starts. A quarter of the clients leave, at any moment. Meanwhile tiers are emptied, accounts
checked, and in every N-th step all requests but one are retracted (besides those that the pool has no room
for). After a round nobody may hold a slot, a page or a host page, and resident blocks, statistics and
documents must be right.

Then a second engine, whose pool holds every prompt, answers ``--compare`` requests of a kind again, with
their KV on the device and the same lag: by pages of their own choice, by those that the request of the stress
has chosen (``by the same pages``), and once more in a crowd (``on the device, again``), which says how far
apart answers of the device are from each other. In bfloat16 rounding may decide between two tokens, so
log-probabilities are compared up to the first token that differs, and between two pages: ``choose otherwise``
counts the answers of requests that choose by a budget whose pages differ before their tokens do, ``scores
moved`` is the largest difference of a page's scores until then, in standard deviations of its head's scores.
Requests that were prefilled again are left out: what they had decoded by chosen pages, they prefill by all.

OUT has a row for each kind of request, and every answer; the seconds, checks and violations of the run are in
the last row. With ``--dtype float32 --attention triton`` almost nothing rounds.
``--merge``: add its rows for other seeds. About three minutes besides ``--seconds``. Exits with 1 if there
was a violation. ``--embedded``: small sizes in float32, to try it without a GPU."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pickle
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from benchmarks.lib import offloaded_choices
from benchmarks.lib import offloaded_compare as compared_with
from benchmarks.lib.fan_out import engine_args, this_script
from benchmarks.lib.offloaded_jobs import KINDS, Answer, Job, Jobs, judge, row_of, send
from benchmarks.lib.rounding import BFLOAT16
from ragserve.answering.prompt import PromptBuilder
from ragserve.bench import model_shapes
from ragserve.config import DEFAULT_MODEL, load
from ragserve.engine.offline import run_once
from ragserve.errors import EngineError
from ragserve.files import write_json
from ragserve.verification import report

if __name__ == "__mp_main__":  # a process of an engine
    offloaded_choices.install()
from tests.campaigns.progress import Progress

ROUND_S, SETTLE_S = 150.0, 60.0  # after which a round, and what it holds, counts as hanging
START_S = 300.0  # for an engine's start, compiling included
MOST = 16  # requests that run at once
FLOAT32 = 1e-3  # difference of log-probabilities that rounding explains
HEAD_DIM = 64
EVERYTHING = "all"
COUNTED = ("steps", "offloaded_steps", "resumed", "segmented_tokens", "misses", "hits", "host_reads", "fills")
HELD = ("used", "in_documents", "document_pages", "requests", "copying", "retracted", "prefilling")


class Sizes:
    """Of the engines: the pool that is stressed, and the dtype."""

    def __init__(self, given: argparse.Namespace) -> None:
        embedded: bool = given.embedded
        self.pool = given.pool or (1024 if embedded else 6144)
        self.longest = min(7 * self.pool // 5, 7900)
        self.page: int = given.page or (16 if embedded else 64)
        self.answer = 40 if embedded else 160  # tokens, at most
        self.dtype = given.dtype or ("float32" if embedded else "bfloat16")
        self.itemsize, self.rounding = (4, FLOAT32) if self.dtype == "float32" else (2, BFLOAT16)
        if given.rounded:
            self.rounding = BFLOAT16
        self.token = model_shapes.kv_bytes_per_token("embedded") * self.itemsize // 4
        self.head_page = 2 * self.page * HEAD_DIM * self.itemsize  # bytes of one KV head of one layer

    def settings(self, tokens: int, given: argparse.Namespace) -> dict[str, Any]:
        """Of an engine whose pool holds ``tokens``."""
        flags: dict[str, Any] = {
            "model": DEFAULT_MODEL,
            "dtype": self.dtype,
            "max_total_tokens": tokens,
            "kv_disk_bytes": 0,
            "kv_host_bytes": 3 * self.longest * self.token,
            "kv_offload_bytes": 5 * self.pool * self.token,
            "sparse_attention": "on",
            "decode_mode": "dense",
            "decode_dense_below": 0,
            "decode_page_size": self.page,
            "decode_logical_page": self.page // 4,
            "decode_max_budget": 8 * self.page,
        }
        flags["engine_args"] = engine_args(given.attention) | {
            "max_running_requests": MOST,
            "chunked_prefill_size": self.pool // 8,
            "schedule_conservativeness": 0.3,  # it admits more than it will have room for
            "tp_size": given.tp,
        }
        if given.overlap:
            flags["engine_args"]["disable_overlap_schedule"] = False
        if not given.embedded:
            flags["engine_args"] |= {
                "disable_prefill_cuda_graph": True,
                "cuda_graph_bs_decode": [1, 2, 4, 8, 12, MOST],
            }
        return flags


class Stress:
    """The rounds, and what is counted in them."""

    def __init__(self, engine: Any, given: argparse.Namespace, folder: Path) -> None:
        self.engine, self.given, self.sizes = engine, given, Sizes(given)
        self.progress = Progress(folder, "offload", seed=given.seed, target=None, minutes=given.seconds / 60)
        builder = PromptBuilder.load(engine.info.tokenizer)
        sizes = self.sizes
        self.jobs = Jobs(builder, sizes.pool, page=sizes.page, longest=sizes.longest, answer=sizes.answer)
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)
        self.samples: dict[str, list[tuple[Job, Answer]]] = defaultdict(list)
        self.seen: Counter[str] = Counter()
        self.sampling = random.Random(given.seed)
        self.rounds = self.checks = 0
        self.most: Counter[str] = Counter()
        self.stuck = False

    async def run(self) -> None:
        while self.progress.goes_on() and not self.stuck:
            chance = random.Random(f"{self.given.seed} {self.rounds}")
            await self.round(chance)
            self.rounds += 1
            if self.rounds % 5 == 1:
                self.save()
                held = {name: self.most[name] for name in sorted(self.most)}
                print(
                    f"{self.progress.seconds:.0f} s, round {self.rounds}: {dict(self.seen)}", held, flush=True
                )

    def save(self) -> None:
        """Write what has been counted and what is to be compared: the engine may end at any moment."""
        info, progress = self.engine.info, self.progress
        found = {
            "engine": {"device": info.device, "attention": info.attention_backend},
            "environment": report.environment(),
            "seconds": round(progress.seconds, 1),
            "rounds": self.rounds,
            "checks": self.checks,
            "most at once": dict(self.most),
            "troubles": {name: count for name, count in self.seen.items() if name.startswith("emptied")},
            "violations": progress.n_violations,
            "first violations": progress.violations,
            "kinds": {name: dict(counts) for name, counts in self.counts.items()},
        }
        samples_of(self.given).write_bytes(pickle.dumps(dict(self.samples)))
        write_json(part_of(self.given, "stress"), found)

    async def round(self, chance: random.Random) -> None:
        count, spread = chance.choice((2, 6, 10, 16, 24)), chance.choice((0.0, 0.0, 0.5, 3.0))
        if self.given.embedded:
            count = min(count, 6)
        # half of the rounds have few kinds, so that many of one kind meet
        kinds = list(KINDS) if chance.random() < 0.5 else chance.sample(list(KINDS), 3)
        jobs = [self.jobs.draw(chance, kinds) for _ in range(count)]

        async def one(job: Job, wait: float) -> None:
            await asyncio.sleep(wait)
            missed = Counter[str]()
            answer = await send(self.engine, job, lambda: missed.update(["missed"]))
            self.note(job, answer, missed["missed"])

        tasks = [asyncio.create_task(one(job, chance.uniform(0, spread))) for job in jobs]
        troubles = asyncio.create_task(self.trouble(chance))
        done, hanging = await asyncio.wait(tasks, timeout=ROUND_S)
        troubles.cancel()
        await asyncio.gather(troubles, return_exceptions=True)
        for task in done:
            if (error := task.exception()) is not None:
                self.progress.violation(f"round {self.rounds}: {type(error).__name__}: {error}")
        if hanging:
            self.stuck = True
            self.progress.violation(f"{len(hanging)} requests hang: {await self.offloaded()}")
            for task in hanging:
                task.cancel()
            return
        await self.settle()

    async def offloaded(self) -> dict[str, Any]:
        return dict((await self.engine.control("info"))["decode"]["offloaded"])

    async def trouble(self, chance: random.Random) -> None:
        """Empty tiers and check everything while requests run."""
        while True:
            await asyncio.sleep(chance.uniform(0.02, 0.4) * (8 if self.given.embedded else 1))
            what = chance.choice((*["device"] * 4, "all", *["check"] * 2, *["look"] * 5))
            if what == "look":
                now = await self.offloaded()
                for name in (*HELD, "resident_blocks"):
                    self.most[name] = max(self.most[name], now[name] or 0)
                for bound, waiting in now["waiting"].items():
                    self.most[f"waiting: {bound}"] = max(self.most[f"waiting: {bound}"], waiting)
            elif what == "check":
                await self.check("check")
            else:
                await self.engine.control(
                    "evict", tiers=["device"] if what == "device" else ["device", "host"]
                )
                self.seen[f"emptied: {what}"] += 1

    async def check(self, operation: str) -> None:
        try:
            await self.engine.control(operation)
        except EngineError as error:
            self.progress.violation(f"round {self.rounds}, {operation}: {error}")
        self.checks += 1

    async def settle(self) -> None:
        """Wait until nobody holds anything, and check all accounts."""
        until = time.monotonic() + SETTLE_S
        while True:
            offloaded, stat = await self.offloaded(), await self.engine.control("stat")
            held = {name: offloaded[name] for name in HELD}
            held["resident_blocks"] = offloaded["resident_blocks"]
            held["locked slots"] = stat["device"]["locked_tokens"]
            held["pinned documents"] = stat["host"]["pinned_documents"]
            held["slots of requests"] = (await self.engine.control("slots"))["now"]
            if not any(held.values()):
                break
            if time.monotonic() > until:
                self.stuck = True
                self.progress.violation(f"round {self.rounds} leaves {held}")
                return
            await asyncio.sleep(0.02)
        await self.check("check")

    def note(self, job: Job, answer: Answer, missed: int) -> None:
        self.seen[answer.ended] += 1
        counts = self.counts[job.kind]
        counts.update({"requests": 1, answer.ended: 1, "retracted": answer.retracted})
        counts["documents missing"] += missed
        # seen with the overlap scheduler; why is not known
        lacking = len(answer.ids) < answer.tokens
        with self.progress.operation(job.kind):
            assert answer.ended != "failed", answer.error
            if answer.ended != "answered":
                return
            assert answer.tokens == job.n_new, f"{answer.tokens} of {job.n_new} tokens"
            assert not lacking or answer.retracted, f"{len(answer.ids)} of {job.n_new} log-probabilities"
            counts["log-probability missing"] += lacking
            if answer.report is not None:
                self.note_report(job, answer)
        if not lacking and answer.as_if_never_retracted(job):
            counts["comparable"] += 1
            kept = self.samples[job.kind]
            if len(kept) < self.given.compare:
                kept.append((job, answer))
            elif (place := self.sampling.randrange(counts["comparable"])) < len(kept):
                kept[place] = (job, answer)

    def note_report(self, job: Job, answer: Answer) -> None:
        said, counts = answer.report, self.counts[job.kind]
        assert said is not None
        for name in (*COUNTED, "loaded_bytes"):
            counts[name] += getattr(said, name)
        # the overlap scheduler has launched a step more when it sees the last token
        undisturbed = answer.retracted == 0 and said.steps in (job.n_new - 1, job.n_new)
        whole = said.resumed == answer.retracted  # not prefilled again
        if job.spans and whole and said.offloaded_steps == said.steps > 0:
            counts["on the host from the start"] += 1
        asked = job.decode.get("offloaded", False)
        assert asked or not said.offloaded_steps + said.misses + said.host_reads + said.segmented_tokens
        if len(job.ids) > self.sizes.pool:
            assert bool(job.spans) or said.segmented_tokens >= self.sizes.pool
            assert not undisturbed or said.offloaded_steps == said.steps
        if undisturbed:
            assert said.loaded_bytes == (said.misses + said.host_reads) * self.sizes.head_page
        if job.decode["mode"] == "progressive":
            assert said.weight is None or said.weight > job.decode["threshold"] - 0.02, said.weight


def stress(given: argparse.Namespace) -> None:
    """Run the rounds."""
    os.environ["SGLANG_TEST_RETRACT"] = "1"
    os.environ["SGLANG_TEST_RETRACT_INTERVAL"] = str(given.retract_every)

    async def work(engine: Any) -> None:
        with tempfile.TemporaryDirectory(prefix="ragserve-stress-") as folder:
            run = Stress(engine, given, Path(folder))
            try:
                await run.run()
            except Exception as error:  # noqa: BLE001 - such as an engine that has ended
                run.progress.violation(f"round {run.rounds}: {type(error).__name__}: {error}")
            run.save()

    with tempfile.TemporaryDirectory(prefix="ragserve-stress-") as data:
        sizes = Sizes(given)
        run_once(load(data_dir=Path(data), **sizes.settings(sizes.pool, given)), work)


def compare(given: argparse.Namespace) -> None:
    """Answer the samples on the device of an engine with room for all of them, and compare."""
    sizes = Sizes(given)
    samples: compared_with.Samples = pickle.loads(samples_of(given).read_bytes())
    places = (1, 6) if given.embedded else (4, MOST)
    folder = Path(os.environ[offloaded_choices.FOLDER])

    async def work(engine: Any) -> None:
        found = await compared_with.compare(engine, samples, folder, places=places, rounding=sizes.rounding)
        write_json(part_of(given, "compare"), found)

    with tempfile.TemporaryDirectory(prefix="ragserve-stress-") as data:
        room = 8 * sizes.longest // sizes.page * sizes.page
        run_once(load(data_dir=Path(data), **sizes.settings(room, given)), work)


def samples_of(given: argparse.Namespace) -> Path:
    return Path(given.out).with_suffix(".samples")


def rows_of(
    given: argparse.Namespace, found: dict[str, Any], compared: dict[str, Any]
) -> list[dict[str, Any]]:
    rows, run = [], {"seed": given.seed, "GPUs": given.tp, "page": Sizes(given).page}
    for kind in KINDS:
        counts: Counter[str] = Counter(found["kinds"].get(kind, {}))
        rows.append(run | row_of(kind, counts, compared.get(kind, {})))
    total: Counter[str] = Counter()
    for each in found["kinds"].values():
        total.update(each)
    everything = compared_with.summary(
        [compared_with.Compared(**answer) for each in compared.values() for answer in each["answers"]],
        Sizes(given).rounding,
    )
    last = run | row_of(EVERYTHING, total, everything)
    names = ("seconds", "rounds", "checks", "violations", "first violations", "most at once", "troubles")
    last["answers"] = [answer for each in compared.values() for answer in each["answers"]]
    return [*rows, last | {name: found[name] for name in names}]


PARTS = {"stress": stress, "compare": compare}
LIMITS_S = {"stress": ROUND_S + SETTLE_S + START_S, "compare": 400.0}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=290.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--page", type=int, default=0, help="tokens; default 64")
    parser.add_argument("--pool", type=int, default=0, help="tokens of the KV pool that is stressed")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on a GPU")
    parser.add_argument("--overlap", action="store_true", help="on a CPU, too, SGLang's overlap scheduler")
    parser.add_argument("--rounded", action="store_true", help="linear layers round to bfloat16")
    parser.add_argument("--retract-every", type=int, default=41, help="steps")
    parser.add_argument("--compare", type=int, default=30, help="answers of a kind, at most")
    parser.add_argument("--tp", type=int, default=1, help="GPUs (with --embedded: processes) of an engine")
    parser.add_argument("--ended", type=Path, help="OUT.stress.json of a run that was ended: its report")
    parser.add_argument("--merge", type=Path, help="an earlier report, whose rows of other seeds stay")
    parser.add_argument(
        "--attention", default=None, help="SGLang's attention backend; default: its own choice"
    )
    parser.add_argument("--embedded", action="store_true")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    if given.part:
        PARTS[given.part](given)
        return 0
    if given.ended:
        return write(given, json.loads(given.ended.read_text(encoding="utf-8")), {}, [])
    with tempfile.TemporaryDirectory(prefix="ragserve-choices-") as folder:
        if given.tp == 1:  # others would follow the choices of the first rank's heads
            os.environ[offloaded_choices.FOLDER] = folder
        if given.rounded:
            os.environ[offloaded_choices.ROUNDED] = "1"
        if given.dtype == "float32" and not given.embedded:
            os.environ[offloaded_choices.PLAIN] = "1"
            os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # of SGLang's own kernels
        return run_parts(given)


def run_parts(given: argparse.Namespace) -> int:
    """Run the parts in processes of their own and write the report; return the exit status."""
    found: dict[str, Any] = {}
    failed: list[str] = []
    for part in PARTS:
        path = part_of(given, part)
        path.unlink(missing_ok=True)
        limit = LIMITS_S[part] + (given.seconds if part == "stress" else 0.0)
        command = [*this_script(), *sys.argv[1:], "--part", part]
        try:
            code = subprocess.run(command, timeout=limit, check=False).returncode
        except subprocess.TimeoutExpired:
            code = -1
        if not path.exists():
            print(f"{part} failed with {code}", flush=True)
            return 1
        found[part] = json.loads(path.read_text(encoding="utf-8"))
        if code:
            failed.append(f"{part} ended with {code}")
    for path in (samples_of(given), *(part_of(given, part) for part in PARTS)):
        path.unlink()
    return write(given, found["stress"], found["compare"], failed)


def write(given: argparse.Namespace, ran: dict[str, Any], compared: dict[str, Any], failed: list[str]) -> int:
    """Write the report; return the exit status."""
    sizes = Sizes(given)
    wrong = failed + judge(compared, sizes.rounding, exact=sizes.dtype == "float32" and not given.rounded)
    ran["violations"] += len(wrong)
    ran["first violations"] = [*ran["first violations"], *wrong][:20]
    rows = rows_of(given, ran, compared)
    if given.merge:
        earlier = json.loads(given.merge.read_text(encoding="utf-8"))["rows"]
        rows = [each for each in earlier if each["seed"] != given.seed] + rows
    workload = {
        "model": f"ragserve-tiny, {sizes.dtype}{', linear layers bfloat16' if given.rounded else ''}",
        "attention": ran["engine"]["attention"],
        "KV slots": sizes.pool,
        "offloaded tokens": 5 * sizes.pool,
        "longest prompt": sizes.longest,
        "requests at once": MOST,
        "forced retraction": f"every {given.retract_every} steps",
        "rounding": sizes.rounding,
    }
    hidden = ("first violations", "most at once", "troubles", "answers")
    shown = [name for row in rows[-1:] for name in row if name not in hidden]
    report.write("offloaded-stress", workload, rows, out=given.out, ran_on=ran["environment"], shown=shown)
    print(*ran["first violations"], sep="\n", flush=True)
    return bool(ran["violations"])


def part_of(given: argparse.Namespace, part: str) -> Path:
    return Path(given.out).with_suffix(f".{part}.json")


if __name__ == "__main__":
    sys.exit(main())
