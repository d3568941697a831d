"""Run a warm-up job for a command: on the server that uses the data folder, else on an engine of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from ragserve.cache import lock
from ragserve.children import ENDING
from ragserve.commands.serve_checks import check_engine
from ragserve.config import Settings
from ragserve.errors import EngineError, InvalidRequest
from ragserve.ingest.jobs.job_report import JobReport, OnProgress, failures_of, progress_of

if TYPE_CHECKING:
    from ragserve.engine.local import LocalEngine
    from ragserve_index import IndexStore

_POLL_S = 0.2
_ALONE_WAIT_S = 0.5  # another command may hold the cache for a moment


def check_warm(settings: Settings, *, repeated: bool = False) -> None:
    """Raise the error for which a warm-up after the work at hand, once or ``repeated``, could not run."""
    with lock.alone(settings.data_dir) as nobody_else:
        if not nobody_else:
            return
        _check_local(settings)
        if repeated:
            raise InvalidRequest(
                "Following changes with --warm needs a server on the data folder.",
                hint="Start one: ragserve serve",
            )


def _check_local(settings: Settings) -> None:
    """Raise ``InvalidRequest`` if KV computed by an engine started here would not outlive it, and the error
    that would end its start."""
    if settings.engine_url:
        raise InvalidRequest("A remote engine has no document cache to warm.", hint="Unset engine_url.")
    if settings.engine_elsewhere:
        raise InvalidRequest(
            "Workers have the document cache.", hint="Start the server in front of them, which warms it."
        )
    if not settings.kv_disk_bytes:
        raise InvalidRequest(
            "Without a disk tier, cached KV would not outlive this command.",
            hint="Set kv_disk_bytes, or warm a running server.",
            param="kv_disk_bytes",
        )
    check_engine(settings)


def show_warm(
    settings: Settings, store: IndexStore, job_id: str, stop: threading.Event, *, quiet: bool
) -> JobReport:
    """Run the job as `run_warm` does, with a progress bar and a report on the terminal."""
    from rich.console import Console

    from ragserve.commands.job_console import print_report, progress_bar

    console = Console(quiet=quiet)
    with progress_bar(console, enabled=not quiet, phase="warming") as show:
        report = run_warm(settings, store, job_id, stop=stop, on_progress=show)
    print_report(console, report, pruned=False)
    if report.state == "interrupted":
        advice = f"Run the same command again, or start a server, which finishes job {job_id}."
        console.print(f"Interrupted. {advice}")
    return report


def run_warm(
    settings: Settings, store: IndexStore, job_id: str, *, stop: threading.Event, on_progress: OnProgress
) -> JobReport:
    """Run the job to its end, on a server or here.

    ``stop`` cancels a job that a server runs; a job that runs here is interrupted and can be resumed. Raises
    the error that ended it: ``InvalidRequest``, ``Unavailable``, ``StorageFull`` or ``EngineError``.
    """
    while True:
        with lock.alone(settings.data_dir, _ALONE_WAIT_S) as nobody_else:
            if nobody_else:
                _check_local(settings)
                return _run_here(settings, store, job_id, stop, on_progress)
        report = _follow(settings, store, job_id, stop, on_progress)
        if report is not None:
            return report


def _run_here(
    settings: Settings, store: IndexStore, job_id: str, stop: threading.Event, on_progress: OnProgress
) -> JobReport:
    from ragserve.answering.prompt import PromptBuilder
    from ragserve.cache.evictions import Evictor, note_engine
    from ragserve.cache.warm import Warmer
    from ragserve.engine.offline import run_once
    from ragserve_index import JobStore

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    async def work(engine: LocalEngine) -> JobReport:
        loop = asyncio.get_running_loop()
        # SGLang and uvicorn have replaced the handlers; the first signal must stop the job
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler, number, None)
        prompts = await asyncio.to_thread(PromptBuilder.load, engine.info.tokenizer, settings.system_prompt)
        note_engine(settings, engine.info.tokenizer)
        async with Evictor(store, engine, prompts).running():
            warmer = Warmer(store, engine, prompts, loop)
            return await asyncio.to_thread(warmer.run, job_id, on_progress=on_progress, stop=stop, wait=True)

    # those of `signals_stop`
    handlers: dict[int, Any] = {n: signal.getsignal(n) for n in ENDING}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    try:
        return run_once(settings, work, measures=False)
    except SystemExit as ended:  # by a signal during the start, before `work` had its handlers
        signalled = int(ended.code or 0) - 128
        if signalled not in handlers:
            raise
        handlers[signalled](signalled, None)
        job = JobStore(store).get(job_id)
        return JobReport(job_id, job.namespace, "interrupted", 0.0, progress_of(job))
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _follow(
    settings: Settings, store: IndexStore, job_id: str, stop: threading.Event, on_progress: OnProgress
) -> JobReport | None:
    """Watch a job that a server runs. Returns None if the server is gone before the job ends."""
    from ragserve_index import JobStore

    jobs, started = JobStore(store), time.monotonic()
    cancelled = False
    while True:
        job = jobs.get(job_id)
        progress = progress_of(job, chunks=job.chunks, tokens=job.tokens)
        on_progress(progress)
        if job.finished:
            if job.state == "failed":
                raise EngineError(f"The warm-up {job_id} failed: {job.error}", hint="See the server's log.")
            failures = failures_of(jobs, job_id, "failed", "skipped")
            return JobReport(job_id, job.namespace, job.state, time.monotonic() - started, progress, failures)
        if stop.is_set() and not cancelled:
            cancelled = True
            jobs.request_cancel(job_id)
        with lock.alone(settings.data_dir) as server_is_gone:
            if server_is_gone:
                return None
        time.sleep(_POLL_S)
