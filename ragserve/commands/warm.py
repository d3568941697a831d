"""Running a warm-up job for a command: by the server that uses the data folder, or, where there is none, by
an engine started here.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ragserve.cache import lock as serving
from ragserve.config import Settings
from ragserve.errors import EngineError, InvalidRequest
from ragserve.ingest.jobs.job_report import JobReport, Progress

if TYPE_CHECKING:
    from ragserve.engine.local import LocalEngine
    from ragserve_index import IndexStore

__all__ = ["check_warm", "run_warm", "show_warm"]

_POLL_S = 0.2
_ALONE_WAIT_S = 0.5  # for another command that holds the cache for a moment
_COUNTS = ("warmed", "unchanged", "failed", "skipped")


def check_warm(settings: Settings, *, again_and_again: bool = False) -> None:
    """Before work that a warm-up is to follow: raises InvalidRequest where it could not."""
    with serving.alone(settings.data_dir) as nobody_else:
        if not nobody_else:
            return
        _needs_no_server(settings)
        if again_and_again:
            raise InvalidRequest(
                "Following changes with --warm needs a server on the data folder.",
                hint="Start it: ragserve serve",
            )


def _needs_no_server(settings: Settings) -> None:
    """Raises InvalidRequest for settings with which an engine started here could leave nothing behind."""
    if settings.engine_url:
        raise InvalidRequest(
            "An engine that runs elsewhere has no document cache to warm.", hint="Unset engine_url."
        )
    if not settings.kv_disk_bytes:
        raise InvalidRequest(
            "Without a disk tier nothing outlives this command.",
            hint="Set kv_disk_bytes, or warm a running server.",
            param="kv_disk_bytes",
        )


def show_warm(
    settings: Settings, store: IndexStore, job_id: str, stop: threading.Event, *, quiet: bool
) -> JobReport:
    """``run_warm`` with a progress bar and a report on the terminal."""
    from rich.console import Console

    from ragserve.commands.job_console import print_report, progress_bar

    console = Console(quiet=quiet)
    with progress_bar(console, enabled=not quiet) as show:
        report = run_warm(settings, store, job_id, stop=stop, on_progress=show)
    print_report(console, report, pruned=False)
    if report.state == "interrupted":
        console.print(
            f"Interrupted. Run the same command again, or start a server: it finishes job {job_id}."
        )
    return report


def run_warm(
    settings: Settings,
    store: IndexStore,
    job_id: str,
    *,
    stop: threading.Event,
    on_progress: Callable[[Progress], None],
) -> JobReport:
    """Run the job to its end, wherever. ``stop`` ends it: cancelled where a server runs it, interrupted and
    resumable here.

    Raises what ended it: InvalidRequest, Unavailable, StorageFull, EngineError.
    """
    while True:
        with serving.alone(settings.data_dir, _ALONE_WAIT_S) as nobody_else:
            if nobody_else:
                _needs_no_server(settings)
                return _run_here(settings, store, job_id, stop, on_progress)
        report = _follow(settings, store, job_id, stop, on_progress)
        if report is not None:
            return report


def _run_here(
    settings: Settings,
    store: IndexStore,
    job_id: str,
    stop: threading.Event,
    on_progress: Callable[[Progress], None],
) -> JobReport:
    from ragserve.answering.prompt import PromptBuilder
    from ragserve.cache.evictions import Evictor, note_engine
    from ragserve.cache.warm import Warmer
    from ragserve.engine.offline import run_once
    from ragserve.engine.ports import claim_port

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    async def work(engine: LocalEngine) -> JobReport:
        loop = asyncio.get_running_loop()
        for number in (
            signal.SIGINT,
            signal.SIGTERM,
        ):  # SGLang and uvicorn have taken them over: the first one stops the job
            loop.add_signal_handler(number, handlers[number], number, None)
        prompts = await asyncio.to_thread(PromptBuilder.load, engine.info.tokenizer, settings.system_prompt)
        note_engine(settings, engine.info.tokenizer)
        async with Evictor(store, engine, prompts).running():
            warmer = Warmer(store, engine, prompts, loop)
            return await asyncio.to_thread(warmer.run, job_id, on_progress=on_progress, stop=stop, wait=True)

    handlers = {number: _callable(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return run_once(
            settings.model_copy(update={"port": claim_port("127.0.0.1", 0), "host": "127.0.0.1"}), work
        )
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _callable(handler: object) -> Callable[[int, object], object]:
    return handler if callable(handler) else lambda number, frame: None


def _follow(
    settings: Settings,
    store: IndexStore,
    job_id: str,
    stop: threading.Event,
    on_progress: Callable[[Progress], None],
) -> JobReport | None:
    """Watch a job that a server runs; None when the server is gone before its end."""
    from ragserve_index import JobStore

    jobs, started = JobStore(store), time.monotonic()
    cancelled = False
    while True:
        job = jobs.get(job_id)
        progress = Progress(total=job.n_items, chunks=job.chunks, tokens=job.tokens)
        for name in _COUNTS:
            setattr(progress, name, job.counts[name])
        on_progress(progress)
        if job.finished:
            if job.state == "failed":
                raise EngineError(f"The warm-up {job_id} failed: {job.error}", hint="See the server's log.")
            failures = tuple(
                (item.source, item.reason or "")
                for item in jobs.items(job_id)
                if item.state in ("failed", "skipped")
            )
            return JobReport(job_id, job.namespace, job.state, time.monotonic() - started, progress, failures)
        if stop.is_set() and not cancelled:
            cancelled = True
            jobs.request_cancel(job_id)
        with serving.alone(settings.data_dir) as server_is_gone:
            if server_is_gone:
                return None
        time.sleep(_POLL_S)
