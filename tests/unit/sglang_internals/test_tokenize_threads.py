"""While a long text is tokenised, others are answered."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.sglang_internals import tokenize_threads
from sglang_ext.sglang_internals.tokenize_threads import AT_A_TIME, INLINE_CHARS

WORK_S = 0.2


class Manager:
    async_dynamic_batch_tokenizer: Any = None

    def __init__(self) -> None:
        self.threads: list[str] = []

    async def _tokenize_texts(self, texts: Any, is_cross_encoder: bool = False) -> Any:
        self.threads.append(threading.current_thread().name)
        return [len(texts)], is_cross_encoder


class Handler:
    """Tokenises for ``WORK_S`` without waiting for anything, as SGLang's handlers do."""

    def __init__(self) -> None:
        self.at_once = self.most = 0

    async def _handle_non_streaming_request(self, adapted: Any, request: Any, raw: Any) -> Any:
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        time.sleep(WORK_S)
        self.at_once -= 1
        if request == "bad":
            raise ValueError("no tokens")
        return request

    async def handle_count_tokens(self, request: Any, raw: Any) -> Any:
        return await self._handle_non_streaming_request(request, request, raw)


def installed() -> tuple[Any, dict[str, Handler]]:
    manager: Any = Manager()
    names = ("openai_serving_tokenize", "openai_serving_detokenize", "anthropic_serving")
    handlers = {name: Handler() for name in names}
    tokenize_threads.install(manager, SimpleNamespace(**handlers))
    return manager, handlers


def test_long_texts_leave_the_event_loop_and_short_ones_stay() -> None:
    manager, _ = installed()

    async def run() -> None:
        assert await manager._tokenize_texts("x") == ([1], False)
        assert await manager._tokenize_texts("x" * (INLINE_CHARS + 1), True) == ([INLINE_CHARS + 1], True)
        await manager._tokenize_texts(["x" * INLINE_CHARS, "x"])
        await manager._tokenize_texts([["x" * INLINE_CHARS, "x"]], True)
        manager.async_dynamic_batch_tokenizer = object()
        await manager._tokenize_texts("x" * (INLINE_CHARS + 1))

    asyncio.run(run())
    assert [name.startswith("tokenize") for name in manager.threads] == [False, True, True, True, False]


def test_the_event_loop_answers_while_texts_are_tokenised() -> None:
    _, handlers = installed()
    two = list(handlers)[:2]

    async def run() -> float:
        asked = [handlers[name]._handle_non_streaming_request(None, name, None) for name in two]
        asked += [handlers["anthropic_serving"].handle_count_tokens("c", None) for _ in range(4)]
        tasks = asyncio.gather(*asked)
        longest = 0.0
        while not tasks.done():
            began = time.monotonic()
            await asyncio.sleep(0)
            longest = max(longest, time.monotonic() - began)
            await asyncio.sleep(0.005)
        assert await tasks == [*two, "c", "c", "c", "c"]
        with pytest.raises(ValueError, match="no tokens"):
            await handlers["openai_serving_tokenize"]._handle_non_streaming_request(None, "bad", None)
        return longest

    assert asyncio.run(run()) < WORK_S
    assert handlers["anthropic_serving"].most <= AT_A_TIME


def test_another_sglang_is_noticed() -> None:
    manager = SimpleNamespace(_tokenize_texts=lambda texts: texts)
    with pytest.raises(RuntimeError, match="_tokenize_texts has parameters"):
        tokenize_threads.install(manager, SimpleNamespace())
    from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
    from sglang.srt.entrypoints.openai.serving_tokenize import OpenAIServingDetokenize, OpenAIServingTokenize
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    real: Any = object.__new__(TokenizerManager)
    state = SimpleNamespace(
        openai_serving_tokenize=object.__new__(OpenAIServingTokenize),
        openai_serving_detokenize=object.__new__(OpenAIServingDetokenize),
        anthropic_serving=object.__new__(AnthropicServing),
    )
    tokenize_threads.install(real, state)
