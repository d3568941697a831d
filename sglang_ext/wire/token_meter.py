"""Counts the tokens of requests to SGLang's own routes.

The server's app sets the meter around SGLang's app. `sglang_ext.sglang_internals.request_checks` reads
it where all routes that generate meet, in the same process. Imports neither torch nor SGLang."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from typing import Any, cast

Spend = Callable[[int], None]
"""Called with numbers of tokens as they are read or generated."""

_spend: ContextVar[Spend | None] = ContextVar("ragserve_token_meter", default=None)


@contextmanager
def metered(spend: Spend) -> Iterator[None]:
    """Report the tokens of requests that the block, and tasks started in it, give to SGLang."""
    token = _spend.set(spend)
    try:
        yield
    finally:
        _spend.reset(token)


def count_prompt(tokens: int) -> None:
    """Report a prompt that is about to be sent."""
    if (spend := _spend.get()) is not None:
        spend(tokens)


def count_answers(outputs: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Report the tokens of answers as they pass: outputs of SGLang, or lists of them, each with the number of
    tokens generated so far."""
    spend = _spend.get()
    return outputs if spend is None else _counted(cast("AsyncGenerator[Any, None]", outputs), spend)


async def _counted(outputs: AsyncGenerator[Any, None], spend: Spend) -> AsyncGenerator[Any, None]:
    known: dict[Any, int] = {}  # by the id of a sequence
    async with aclosing(outputs):
        async for output in outputs:
            for one in output if isinstance(output, list) else [output]:
                meta = one.get("meta_info") or {}
                now, before = meta.get("completion_tokens") or 0, known.get(meta.get("id"), 0)
                if now > before:
                    known[meta.get("id")] = now
                    spend(now - before)
            yield output
