"""Run the engine without the product around it, for as long as some work takes: evaluations, benchmarks, calibration."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from ragserve.config import Settings
from ragserve.engine import local

T = TypeVar("T")


def run(settings: Settings, work: Callable[[local.LocalEngine], Awaitable[T]]) -> T:
    """Start SGLang, await ``work(engine)`` on its event loop, stop SGLang; what ``work`` gave, or raises what it raised.

    Needs the main thread of a process that does nothing else: SGLang installs signal handlers and ends its child processes by their parent.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # several processes share the cores
    done: dict[str, T] = {}
    failure: list[BaseException] = []

    def make_app(engine: local.LocalEngine, sglang_app: Any) -> Any:
        from fastapi import FastAPI

        @contextlib.asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            async with sglang_app.router.lifespan_context(sglang_app):
                try:
                    await engine.start()
                    done["result"] = await work(engine)
                except Exception as error:  # noqa: BLE001 - raised below: the web server would only log it
                    failure.append(error)
                finally:
                    engine.stop()
                yield
                await engine.close()

        return FastAPI(lifespan=lifespan)

    local.serve(settings, make_app)
    if failure:
        raise failure[0]
    return done["result"]
