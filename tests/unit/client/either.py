"""Both clients under one face: what `AsyncClient` does is awaited, and lists are read to their end."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ragserve.client import AsyncClient, Client

both = pytest.mark.parametrize("kind", ["threads", "asyncio"])


class Awaited:
    """An `AsyncClient` whose methods block."""

    def __init__(self, client: AsyncClient, runner: asyncio.Runner) -> None:
        self._client, self._runner = client, runner

    def __getattr__(self, name: str) -> Any:
        def method(*args: Any, **kwargs: Any) -> Any:
            made = getattr(self._client, name)(*args, **kwargs)
            return self._runner.run(made if inspect.iscoroutine(made) else read(made))

        return method


async def read(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


@contextmanager
def opened(kind: str, url: str, **options: Any) -> Iterator[Any]:
    """A client of the kind, closed at the end of the block."""
    if kind == "threads":
        with Client(url, **options) as client:
            yield client
        return
    with asyncio.Runner() as runner:
        client = AsyncClient(url, **options)
        runner.run(client.__aenter__())
        try:
            yield Awaited(client, runner)
        finally:
            runner.run(client.close())
