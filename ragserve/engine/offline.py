"""SGLang's offline engine: started in this process group for one piece of work, without REST routes."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from ragserve.children import ENDING, ended_by_signals
from ragserve.config import Settings
from ragserve.engine import local
from ragserve.engine.crash import end_now
from ragserve.engine.ports import hold_port
from ragserve.files import temporary_folder

T = TypeVar("T")

GRACE_S = 2.0
"""Seconds from a signal until the engine's processes and this one are killed."""


def run_once(
    settings: Settings, work: Callable[[local.LocalEngine], Awaitable[T]], *, measures: bool = True
) -> T:
    """Start an engine on a free port, await ``work(engine)``, stop it and return the result. Where
    it ``measures`` answers without comparing distributions, documents are analysed before they are used:
    there is no idle time.

    Call it from the main thread, once per process. Errors of ``work`` or of the start are raised after the
    engine's processes have ended. A signal that ends commands (`ENDING`) cancels ``work`` and raises
    ``SystemExit``, or ends the process after `GRACE_S`; ``work`` may put its own handlers on the loop."""
    if measures and settings.kv_analysis == "idle":
        settings = settings.model_copy(update={"kv_analysis": "ingest"})
    done: list[T] = []
    failure: list[BaseException] = []

    def make_app(engine: local.LocalEngine, sglang_app: Any) -> Any:
        from fastapi import FastAPI

        @contextlib.asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            async with sglang_app.router.lifespan_context(sglang_app):
                try:
                    done.append(await _until_signal(engine, work))
                except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001 - raised again below
                    failure.append(error)
                finally:
                    engine.stop()
                yield
                await engine.close()

        return FastAPI(lifespan=lifespan)

    with ended_by_signals(_end_soon), temporary_folder(), hold_port() as listener:
        local.serve(settings, make_app, listener)
    if failure:
        raise failure[0]
    return done[0]


def _end_soon(number: int) -> None:
    """End by force after `GRACE_S`, whatever holds up an orderly end."""
    timer = threading.Timer(GRACE_S, end_now, (128 + number,))
    timer.daemon = True
    timer.start()


async def _until_signal(engine: local.LocalEngine, work: Callable[[local.LocalEngine], Awaitable[T]]) -> T:
    loop = asyncio.get_running_loop()
    received: list[int] = []

    def stop(number: int) -> None:
        received.append(number)
        task.cancel()
        _end_soon(number)

    def take_signals() -> None:
        for number in ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, stop, number)

    async def start_and_work() -> T:
        await engine.start()
        take_signals()  # the engine has replaced some
        return await work(engine)

    task = asyncio.create_task(start_and_work())
    take_signals()  # uvicorn would note a signal and wait for the work
    try:
        return await task
    except asyncio.CancelledError:
        if received:
            raise SystemExit(128 + received[0]) from None
        raise
