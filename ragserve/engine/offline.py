"""SGLang's offline engine: started in this process group for one piece of work, without REST routes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from ragserve.config import Settings
from ragserve.engine import local
from ragserve.engine.ports import hold_port

T = TypeVar("T")


def run_once(settings: Settings, work: Callable[[local.LocalEngine], Awaitable[T]]) -> T:
    """Start an engine on a free port, await ``work(engine)``, stop it and return the result.

    Call it from the main thread, once per process. Errors of ``work`` or of the start are raised after the
    engine's processes have ended."""
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
                except Exception as error:  # noqa: BLE001 - raised again below
                    failure.append(error)
                finally:
                    engine.stop()
                yield
                await engine.close()

        return FastAPI(lifespan=lifespan)

    with hold_port() as listener:
        local.serve(settings, make_app, listener)
    if failure:
        raise failure[0]
    return done[0]
