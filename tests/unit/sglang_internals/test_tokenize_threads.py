"""While a long text is tokenised, others are answered."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.entrypoints.ollama.serving import OllamaServing

from sglang_ext.sglang_internals import tokenize_threads
from sglang_ext.sglang_internals.tokenize_threads import AT_A_TIME, INLINE_CHARS

WAIT_S = 240


class Manager:
    async_dynamic_batch_tokenizer: Any = None

    def __init__(self) -> None:
        self.threads: list[str] = []

    async def _tokenize_texts(self, texts: Any, is_cross_encoder: bool = False) -> Any:
        self.threads.append(threading.current_thread().name)
        return [len(texts)], is_cross_encoder


class Handler:
    """Tokenises until ``go`` is set, and does not let the event loop go on, as SGLang's handlers do."""

    chat: Handler
    _error_response: Any = None

    def __init__(self) -> None:
        self.go = threading.Event()
        self.at_once = self.most = 0
        self.threads: list[str] = []

    async def _handle_non_streaming_request(self, adapted: Any, request: Any, raw: Any) -> Any:
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        assert self.go.wait(WAIT_S)
        self.at_once -= 1
        if request == "bad":
            raise ValueError("no tokens")
        return request

    async def handle_count_tokens(self, request: Any, raw: Any) -> Any:
        return await self._handle_non_streaming_request(request, request, raw)

    async def _handle_streaming(self, request: Any, other: Any, raw: Any) -> Any:
        return self.chat._convert_to_internal_request(request, raw)

    async def _handle_non_streaming(self, request: Any, other: Any, raw: Any) -> Any:
        return self.chat._convert_to_internal_request(request, raw)

    async def handle_request(self, request: Any, raw: Any) -> Any:
        if request == ["not valid"]:
            return "refused"
        return self._convert_to_internal_request(request, raw)

    def _convert_to_internal_request(self, request: Any, raw_request: Any = None) -> Any:
        self.threads.append(threading.current_thread().name)
        assert self.go.wait(WAIT_S)
        if request[0] == "bad":
            raise ValueError("no template")
        return request, raw_request


def installed() -> tuple[Any, dict[str, Handler]]:
    manager: Any = Manager()
    names = (
        *("openai_serving_tokenize", "openai_serving_detokenize", "anthropic_serving"),
        "openai_serving_chat",
    )
    handlers = {name: Handler() for name in names}
    for handler in handlers.values():
        handler.chat = handlers["openai_serving_chat"]
    ollama = OllamaServing(manager)
    tokenize_threads.install(manager, SimpleNamespace(**handlers, ollama_serving=ollama))
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

    async def run() -> None:
        asked = [handlers[name]._handle_non_streaming_request(None, name, None) for name in two]
        asked += [handlers["anthropic_serving"].handle_count_tokens("c", None) for _ in range(4)]
        tasks = asyncio.gather(*asked)
        while not any(handler.at_once for handler in handlers.values()):
            await asyncio.sleep(0.001)  # here they are tokenised, and the event loop goes on
        for handler in handlers.values():
            handler.go.set()
        assert await tasks == [*two, "c", "c", "c", "c"]
        with pytest.raises(ValueError, match="no tokens"):
            await handlers["openai_serving_tokenize"]._handle_non_streaming_request(None, "bad", None)

    asyncio.run(run())
    assert handlers["anthropic_serving"].most <= AT_A_TIME


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("openai_serving_chat", "handle_request"),
        ("anthropic_serving", "_handle_streaming"),
        ("anthropic_serving", "_handle_non_streaming"),
    ],
)
def test_a_long_chat_becomes_a_prompt_in_a_thread(name: str, method: str) -> None:
    _, handlers = installed()
    chat, handle = handlers["openai_serving_chat"], getattr(handlers[name], method)

    def asked(request: Any, length: int | None) -> Any:
        headers = {} if length is None else {"content-length": str(length)}
        rest = (SimpleNamespace(headers=headers),)
        return handle(request, *(rest if method == "handle_request" else (None, *rest)))

    async def run() -> None:
        tasks = asyncio.gather(*(asked([f"chat {i}"], length) for i, length in enumerate((10**6, None))))
        while not chat.threads:
            await asyncio.sleep(0.001)  # the event loop goes on
        chat.go.set()
        assert [found[0] for found in await tasks] == [["chat 0"], ["chat 1"]]
        with pytest.raises(ValueError, match="no template"):
            await asked(["bad"], 10**6)
        assert (await asked(["short"], INLINE_CHARS))[0] == ["short"]
        if method == "handle_request":
            assert await asked(["not valid"], 10**6) == "refused"

    asyncio.run(run())
    inline = [not thread.startswith("tokenize") for thread in chat.threads]
    assert inline == [False] * 3 + [True] + [False] * (method == "handle_request")


def test_chats_of_ollamas_route_send_lists_of_ids(model_path: Path) -> None:
    """Transformers 5 returns a mapping, which SGLang 0.5.17 sends on: the route answered 500."""
    from sglang.srt.entrypoints.ollama.protocol import OllamaChatRequest
    from transformers import AutoTokenizer

    sent: list[Any] = []

    async def generate_request(request: Any, raw: Any) -> AsyncIterator[dict[str, Any]]:
        sent.append(request)
        yield {"text": "x", "meta_info": {}}

    manager: Any = Manager()
    manager.tokenizer = AutoTokenizer.from_pretrained(model_path)
    manager.generate_request, manager.served_model_name = generate_request, "tiny"
    manager.context_len, manager.model_config = 2048, SimpleNamespace(vocab_size=8192)
    ollama = OllamaServing(manager)
    names = ("openai_serving_tokenize", "openai_serving_detokenize", "anthropic_serving")
    others = {name: Handler() for name in (*names, "openai_serving_chat")}
    tokenize_threads.install(manager, SimpleNamespace(**others, ollama_serving=ollama))
    message = {"role": "user", "content": "Who built Skerryvore?"}

    def ask(stream: bool, **options: Any) -> Any:
        asked = OllamaChatRequest(model="tiny", messages=[message], stream=stream, options=options)  # type: ignore[list-item]
        return asyncio.run(ollama.handle_chat(asked, None))  # type: ignore[arg-type]

    ask(False, seed=7)
    assert isinstance(sent[0].input_ids, list)
    assert all(isinstance(token, int) for token in sent[0].input_ids)
    assert (sent[0].sampling_params["sampling_seed"], "seed" in sent[0].sampling_params) == (7, False)
    wrong = [{"num_predict": "[1]("}, {"stop": [5]}, {"temperature": "hot"}, {"top_k": 1.5}, {"seed": "x"}]
    for options in wrong:
        for stream in (False, True):
            assert ask(stream, **options).status_code == 400, options
    assert len(sent) == 1


def test_another_sglang_is_noticed() -> None:
    manager = SimpleNamespace(_tokenize_texts=lambda texts: texts)
    with pytest.raises(RuntimeError, match="_tokenize_texts has parameters"):
        tokenize_threads.install(manager, SimpleNamespace())
    from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
    from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses
    from sglang.srt.entrypoints.openai.serving_tokenize import OpenAIServingDetokenize, OpenAIServingTokenize
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    real: Any = object.__new__(TokenizerManager)
    state = SimpleNamespace(
        openai_serving_tokenize=object.__new__(OpenAIServingTokenize),
        openai_serving_detokenize=object.__new__(OpenAIServingDetokenize),
        anthropic_serving=object.__new__(AnthropicServing),
        ollama_serving=OllamaServing(real),
        openai_serving_chat=object.__new__(OpenAIServingChat),
        openai_serving_responses=object.__new__(OpenAIServingResponses),
    )
    tokenize_threads.install(real, state)
