"""Long texts are tokenised in threads. SGLang does it in the event loop: a text of 1 MiB took seconds, in
which nobody was answered. The tokenizer itself works without the interpreter's lock."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

INLINE_CHARS = 2**14  # about 5 ms
AT_A_TIME = 2  # what a text takes on its way is up to a kilobyte for each of its tokens
_HANDLERS = (
    ("openai_serving_tokenize", "_handle_non_streaming_request"),
    ("openai_serving_detokenize", "_handle_non_streaming_request"),
    ("anthropic_serving", "handle_count_tokens"),
)
"""What answers by tokenising alone. None of these waits for anything."""

_executor = ThreadPoolExecutor(AT_A_TIME, thread_name_prefix="tokenize")


def install(manager: Any, state: Any) -> None:
    """Let ``manager``, a TokenizerManager, and what answers for the app of ``state`` work in threads. Raises
    RuntimeError for another SGLang.
    """
    original = manager._tokenize_texts
    found = tuple(inspect.signature(original).parameters)
    if found != ("texts", "is_cross_encoder"):
        raise RuntimeError(f"SGLang's TokenizerManager._tokenize_texts has parameters {found}")

    async def tokenize_texts(texts: Any, is_cross_encoder: bool = False) -> Any:
        # SGLang's own batches of single texts belong to the event loop
        if manager.async_dynamic_batch_tokenizer is not None or _chars(texts) <= INLINE_CHARS:
            return await original(texts, is_cross_encoder)
        return await _in_thread(original, texts, is_cross_encoder)

    manager._tokenize_texts = tokenize_texts
    for name, method in _HANDLERS:
        handler = getattr(state, name)
        setattr(handler, method, _threaded(getattr(handler, method)))


def _chars(texts: Any) -> int:
    if isinstance(texts, str):
        return len(texts)
    return sum(map(_chars, texts)) if isinstance(texts, (list, tuple)) else 0


def _threaded(method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
    async def threaded(*args: Any) -> Any:
        return await _in_thread(method, *args)

    return threaded


async def _in_thread(method: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> Any:
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_executor, lambda: asyncio.run(method(*args)))
