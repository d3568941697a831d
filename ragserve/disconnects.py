"""Clients that leave before their answer is complete: what is computed for them is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

T = TypeVar("T")


async def until_left(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await ``work``. If the client leaves first, cancel it, await its clean-up and raise ClientDisconnect.

    The request's body must have been read."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(left(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        await cancel(task, gone)


async def left(receive: Receive) -> None:
    """Return when the client has left. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        continue


async def cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait for their clean-up; errors were read before or no longer matter."""
    pending = [task for task in tasks if not task.done()]
    for task in pending:
        task.cancel()
    if pending:
        await asyncio.wait(pending)
    for task in tasks:
        if not task.cancelled():
            task.exception()
