"""An engine for one piece of work: started in this process group, without a web server, and stopped when the
work is done.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from ragserve.config import Settings
from ragserve.engine import local

T = TypeVar("T")


def run_once(settings: Settings, work: Callable[[local.LocalEngine], Awaitable[T]]) -> T:
    """Start an engine, await ``work(engine)`` and stop it, from the main thread and once in a process.

    Returns what ``work`` did; raises what it, or the start, raised, when the engine's processes have ended.
    """
    done: list[T] = []
    failure: list[BaseException] = []

    def make_app(engine: local.LocalEngine, sglang_app: Any) -> Any:
        from fastapi import FastAPI

        @contextlib.asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            async with sglang_app.router.lifespan_context(sglang_app):
                try:
                    await engine.start()
                    done.append(await work(engine))
                except Exception as error:  # noqa: BLE001 - raised again below, once the engine's processes have ended
                    failure.append(error)
                finally:
                    engine.stop()
                yield
                await engine.close()

        return FastAPI(lifespan=lifespan)

    local.serve(settings, make_app)
    if failure:
        raise failure[0]
    return done[0]
