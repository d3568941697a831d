"""The engine of `ragserve tune`, in its own process: ``python -m MODULE JOB.json``.

It looks for samkv's profile where there is none, compares strategies, writes the gate's record, the cost
profile and, with ``sparse_attention``, the decode profile, and leaves its progress, and its result or why it
failed, in the job's folder."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragserve.config import Settings
from ragserve.errors import InvalidRequest, RagserveError, explained
from ragserve.files import write_json
from ragserve.profiles import gate
from ragserve.profiles.costs import FILE_NAME as COSTS_FILE
from ragserve.profiles.costs import CostSample, add_costs, costs_here, fit
from ragserve.profiles.in_use import InUseRecord
from ragserve.profiles.samkv import FILE_NAME as SAMKV_FILE

if TYPE_CHECKING:
    from ragserve.engine.local import LocalEngine
    from ragserve.strategy_spec import StrategySpec
    from ragserve.verification.comparison import Comparison

RESTART = 75  # exit status: a new samkv profile was found, which only a new engine reads
PROGRESS, RESULT, FAILURE = "progress.json", "result.json", "failure.json"
_COMPARING = 0.75  # share of the time for comparisons; the rest is for costs
_LONGEST = 0.9  # the same while nothing is verified: there would be nothing to measure
_PICKING = 0.3  # of that, for the first part of the probes
_PROFILE = 1 / 3  # share of the time for samkv's profile, at most


@dataclass(frozen=True, slots=True)
class TuneJob:
    """A run, from ``began`` until ``until`` (``time.monotonic``, one clock for all processes of a machine).
    ``questions``: a file; None asks those of the query log, then about the namespace's chunks. ``at_once``:
    questions in flight. ``folder``: of progress and result; ``state``: of the rows of all runs."""

    namespace: str
    strategies: list[str]
    folder: str
    state: str
    began: float
    until: float
    most: int
    at_once: int
    settings: dict[str, Any] = field(default_factory=dict)
    questions: str | None = None

    @property
    def compare_until(self) -> float:
        """When the comparisons end, in favour of the costs."""
        return self._at(_COMPARING)

    @property
    def compare_longest(self) -> float:
        """When they end where nothing is verified."""
        return self._at(_LONGEST)

    def _at(self, share: float) -> float:
        return self.began + share * (self.until - self.began)


def run(job: TuneJob) -> int:
    """Run on an engine of its own and return the exit status: 0, or `RESTART`."""
    from ragserve.engine.offline import run_once
    from ragserve.engine.server_args import resolve_sparse_attention
    from ragserve.strategy_spec import parse

    settings, _ = resolve_sparse_attention(Settings(**job.settings))
    specs = [spec for label in job.strategies for spec in parse(label)]

    def report(phase: str, done: int = 0) -> None:
        left = max(0.0, job.until - time.monotonic()) / 60
        phase = f"{phase}, {left:.0f} min left"
        write_json(Path(job.folder) / PROGRESS, {"phase": phase, "done": done})

    report("starting the engine")

    async def work(engine: LocalEngine) -> int:
        if engine.info.only_exact:
            raise InvalidRequest(f"Nothing can be composed with this model: {engine.info.only_exact}.")
        wants = any(spec.name == "samkv" for spec in specs) and not engine.info.samkv
        if wants and await _profile(job, settings, engine, report):
            return RESTART
        known = [spec for spec in specs if spec.name != "samkv" or engine.info.samkv]
        await _tune(job, settings, known, engine, report)
        return 0

    with tempfile.TemporaryDirectory(prefix="ragserve-tune-") as folder:
        # A temporary cache folder: a running server may own that of the data folder.
        if (settings.data_dir / SAMKV_FILE).exists():
            shutil.copy(settings.data_dir / SAMKV_FILE, folder)
        return run_once(settings.model_copy(update={"data_dir": Path(folder)}), work, measures=False)


async def _profile(
    job: TuneJob, settings: Settings, engine: LocalEngine, report: Callable[..., None]
) -> bool:
    """Look for samkv's profile, for a share of the time. Return whether it was found."""
    from ragserve.verification.calibration.samkv import ProbeSchedule, find_and_save

    try:
        async with asyncio.timeout(max(1.0, _PROFILE * (job.until - time.monotonic()))):
            await find_and_save(settings, engine, ProbeSchedule(), lambda line: report(f"samkv: {line}"))
    except TimeoutError:
        report("samkv is left out: there was no time for its profile")
        return False
    return True


async def _tune(
    job: TuneJob,
    settings: Settings,
    specs: Sequence[StrategySpec],
    engine: LocalEngine,
    report: Callable[..., None],
) -> None:
    from ragserve.answering.key_reranker import make_rerankers
    from ragserve.answering.prompt import PromptBuilder
    from ragserve.answering.query_log import LoggedQuestions
    from ragserve.retrieval.document_store import open_store
    from ragserve.retrieval.embedder import Embedder
    from ragserve.retrieval.passage_search import PassageSearch
    from ragserve.retrieval.retriever import Retriever
    from ragserve.verification import rows
    from ragserve.verification.comparison import Comparison
    from ragserve.verification.comparison_run import compare_all
    from ragserve.verification.course import Course, course
    from ragserve.verification.dropped import forget_outdated
    from ragserve.verification.questions import asked, drawn, given
    from ragserve.verification.tuned_queries import TunedQueries
    from ragserve.verification.verdicts import full_figures, record_verdicts, state_name, verdict, verdicts

    in_use = InUseRecord.of(settings, **engine.info.gate_identity)
    labels = [spec.label for spec in specs]
    margin = settings.verify_margin
    async with AsyncExitStack() as stack:
        store = stack.enter_context(open_store(settings))
        made_at = store.made_at().get(job.namespace, 0.0)
        version = store.namespace(job.namespace).version
        queries = TunedQueries.of(settings, job.namespace, settings.max_new_tokens, made_at, version)
        folder = Path(job.state) / state_name(engine.info, queries, job.questions)
        embedder = await asyncio.to_thread(Embedder.of, settings)
        retriever = Retriever(store, embedder)
        stack.push_async_callback(retriever.close)
        builder = await asyncio.to_thread(PromptBuilder.load, engine.info.tokenizer, settings.system_prompt)
        rerankers = make_rerankers(settings, engine, builder)
        for reranker in rerankers.values():
            stack.push_async_callback(reranker.close)
        rows.strip(folder)
        append = stack.enter_context(rows.appending(folder / "rows-0.jsonl"))

        def write(row: rows.Row) -> None:
            append(rows.without_texts(row))  # which would outlive their documents
            now = comparison.course
            what = "comparing" if now.part == "pick" else "verifying"
            report(f"{what} {len(now.labels)} of {len(labels)} strategies", comparison.compared)

        comparison = Comparison(
            engine,
            PassageSearch(retriever, rerankers),
            builder,
            queries,
            specs,
            known=rows.read(folder),
            write=write,
            out_at=in_use.out_at(job.namespace),
            present=lambda ids: store.chunks_around(job.namespace, ids, 0),
        )
        logged = LoggedQuestions(settings.data_dir, store, job.namespace, job.most)
        picking = job.compare_until - (1 - _PICKING) * (job.compare_until - time.monotonic())

        any_verified = False

        def following() -> Course:
            nonlocal any_verified
            known = comparison.rows
            decided = {
                label: one.decision
                for label in labels
                if (one := verdict(label, known, margin=margin, project=False, ended=False)) is not None
            }
            any_verified = "verified" in decided.values()
            return course(
                labels,
                known,
                margin=margin,
                open_=lambda label: decided.get(label) not in ("verified", "refused"),
                verified=lambda label: decided.get(label) == "verified",
                pick_time=lambda: time.monotonic() < picking,
            )

        finished = await compare_all(
            comparison,
            () if job.questions else drawn(store, job.namespace),
            given(Path(job.questions)) if job.questions else asked(logged),
            time_left=lambda: time.monotonic() < (job.compare_until if any_verified else job.compare_longest),
            most=job.most,
            at_once=job.at_once,
            course=following,
        )
        comparison.leave_out_gone()  # meanwhile
        found = verdicts(labels, comparison.rows, margin=margin)
        out = in_use.taken_out(job.namespace)  # what was verified before that counts no more
        kept = record_verdicts(settings, engine.info, queries, found, replaces=out)
        forget_outdated(settings.data_dir, store)  # where it was dropped while it was compared
    in_use.clear(job.namespace, [one.label for one in found if one.decision in ("verified", "refused")])
    priced = await _costs(
        job.namespace, settings, engine, comparison, report, time_left=lambda: time.monotonic() < job.until
    )
    decode = await _decode(
        settings, engine, comparison, report, time_left=lambda: time.monotonic() < job.until
    )
    result = {
        "verdicts": [asdict(one) | {"line": one.line} for one in found],
        "kept": kept,
        "questions": comparison.kinds,
        "tried": sum("usable" in row for row in comparison.rows),
        "full": full_figures(comparison.rows),
        "retriever": queries.retriever,
        "namespace": job.namespace,
        "margin": margin,
        "finished": finished,
        "settled": not comparison.course.labels,
        "failures": dict(comparison.failures.most_common()),
        "costs": priced,
        "decode": decode,
        "model": engine.info.model,
    }
    write_json(Path(job.folder) / RESULT, result)


async def _costs(
    namespace: str,
    settings: Settings,
    engine: LocalEngine,
    comparison: Comparison,
    report: Callable[..., None],
    *,
    time_left: Callable[[], bool],
) -> str:
    """Measure what verified strategies cost, those of the namespace first, unless that is known, and say what
    came of it."""
    from ragserve.strategy_spec import parse, without_passages
    from ragserve.verification.costs import CostMeasurement, CostSchedule
    from ragserve.verification.report import measured_on

    info = engine.info
    records = gate.Gate.of(settings, **info.gate_identity)
    verified = records.to_price()  # the profile is of all namespaces
    place = settings.data_dir / COSTS_FILE
    known = costs_here(place, info.fingerprint, info.device)
    if not verified:
        return "no costs were measured: nothing is verified"
    if known is not None and set(verified) <= {gate.EXACT, *known.composed}:
        return "the costs of all verified strategies are known"
    if not time_left():
        return "no time was left to measure costs: run ragserve calibrate --part costs"
    schedule = CostSchedule(max_tokens=max(2 * _longest(comparison), 1024), repeats=1)
    here = {without_passages(parse(label)[0]).label for label in records.verified(namespace)}
    wanted = [
        label for label in verified if label != gate.EXACT and (known is None or label not in known.composed)
    ]
    samples: list[CostSample] = []
    measured: list[str] = []
    for label in [gate.EXACT, *sorted(wanted, key=lambda label: label not in here)]:
        specs = [] if label == gate.EXACT else parse(label)
        step = CostMeasurement(
            engine, specs, schedule, lambda line: report(f"costs: {line}", comparison.compared)
        )
        while not step.finished and (time_left() or label == gate.EXACT):
            await step.step()
        if not step.finished:
            await step.forget()
            break
        samples += step.samples
        measured += [spec.label for spec in specs]
    found = fit(samples, **measured_on(settings.model))
    add_costs(place, info.fingerprint, info.device, found)
    left = len(wanted) - len(measured)
    more = f"; no time was left for {left} more" if left else ""
    return f"costs of {', '.join(['exact prefill', *measured])} were measured{more}"


async def _decode(
    settings: Settings,
    engine: LocalEngine,
    comparison: Comparison,
    report: Callable[..., None],
    *,
    time_left: Callable[[], bool],
) -> str | None:
    """Find from which length sparse decoding pays, unless that is known, and say what came of it; None where
    the engine decodes densely."""
    from ragserve.profiles.decode import DECODE, options_of
    from ragserve.profiles.decode import FILE_NAME as DECODE_FILE
    from ragserve.verification.calibration.decode import enough, find_and_save

    if not engine.info.sparse_decode or settings.decode_mode == "dense":
        return None
    found = DECODE.load(settings.data_dir / DECODE_FILE, engine.info.fingerprint)
    if found is None or found.options != options_of(settings):
        if not time_left():
            return "no time was left for sparse decoding: run ragserve calibrate --part decode"
        try:
            found = await find_and_save(
                settings,
                engine,
                max_tokens=enough(settings, _longest(comparison)),
                report=lambda line: report(f"decoding: {line}", comparison.compared),
                time_left=time_left,
            )
        except InvalidRequest as error:
            return f"from which length sparse decoding pays is unknown: {error.message} {error.hint}"
    return f"requests decode densely up to {found.dense_below} tokens"


def _longest(comparison: Comparison) -> int:
    """Tokens of the longest prompt that was compared."""
    return max((row.get("prompt_tokens", 0) for row in comparison.rows), default=0)


def main(job: TuneJob) -> int:
    """Run a job; return its exit status."""
    try:
        return run(job)
    except (RagserveError, OSError) as error:  # the command shows it without the log
        said = explained(error) if isinstance(error, OSError) else error
        if said is None:
            raise
        write_json(Path(job.folder) / FAILURE, {"message": said.message, "hint": said.hint})
        return 1


if __name__ == "__main__":
    sys.exit(main(TuneJob(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))))
