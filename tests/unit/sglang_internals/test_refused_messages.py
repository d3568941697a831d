"""Every route that renders the chat template answers 400 where the template refuses the messages."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
from sglang.srt.entrypoints.ollama.protocol import OllamaChatRequest
from sglang.srt.entrypoints.ollama.serving import OllamaServing
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, ResponsesRequest, TokenizeRequest
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses
from sglang.srt.entrypoints.openai.serving_tokenize import OpenAIServingTokenize
from transformers import AutoTokenizer

from sglang_ext.sglang_internals import tokenize_threads

REFUSED = "Conversation roles must alternate user/assistant."
TEMPLATE = "{{ raise_exception('" + REFUSED + "') }}"
MESSAGES: Any = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
RAW: Any = SimpleNamespace(headers={"content-length": "99"}, state=SimpleNamespace())
LONG: Any = SimpleNamespace(headers={"content-length": "99999"}, state=SimpleNamespace())


class Manager:
    """What the handlers read of SGLang's TokenizerManager."""

    async_dynamic_batch_tokenizer = None
    served_model_name, context_len = "tiny", 2048
    model_config = SimpleNamespace(
        vocab_size=8192,
        is_multimodal=False,
        hf_config=SimpleNamespace(architectures=[], model_type="llama"),
        context_len=2048,
        get_default_sampling_params=dict,
    )
    request_logger = SimpleNamespace(log_requests=False)

    def __init__(self, model_path: Path) -> None:
        from sglang.srt.server_args import ServerArgs

        self.tokenizer = AutoTokenizer.from_pretrained(model_path)
        self.tokenizer.chat_template = TEMPLATE
        self.server_args = ServerArgs(model_path=str(model_path), device="cpu")

    async def _tokenize_texts(self, texts: Any, is_cross_encoder: bool = False) -> Any:
        raise AssertionError

    def config_value(self, name: str) -> Any:
        return getattr(self.server_args, name)

    def create_abort_task(self, request: Any) -> None: ...


@pytest.fixture(scope="module")
def served(model_path: Path) -> Any:
    from sglang.srt.parser.template_manager import TemplateManager

    manager: Any = Manager(model_path)
    templates = TemplateManager()
    chat = OpenAIServingChat(manager, templates)
    state = SimpleNamespace(
        openai_serving_chat=chat,
        openai_serving_tokenize=OpenAIServingTokenize(manager, templates),
        openai_serving_responses=OpenAIServingResponses(manager, templates),
        anthropic_serving=AnthropicServing(chat),
        ollama_serving=OllamaServing(manager),
    )
    tokenize_threads.install(manager, state)
    return state


def anthropic(**more: Any) -> Any:
    return AnthropicMessagesRequest(model="tiny", max_tokens=4, messages=MESSAGES, **more)


CALLS: dict[str, Any] = {
    "/v1/chat/completions": lambda s: s.openai_serving_chat.handle_request(
        ChatCompletionRequest(model="tiny", messages=MESSAGES), RAW
    ),
    "/v1/tokenize": lambda s: s.openai_serving_tokenize.handle_request(
        TokenizeRequest(model="tiny", messages=MESSAGES), RAW
    ),
    "/v1/responses": lambda s: s.openai_serving_responses.create_responses(
        ResponsesRequest(model="tiny", input=MESSAGES), RAW
    ),
    "/v1/messages": lambda s: s.anthropic_serving.handle_messages(anthropic(), RAW),
    "/v1/messages, a stream": lambda s: s.anthropic_serving.handle_messages(anthropic(stream=True), RAW),
    "/v1/messages, long": lambda s: s.anthropic_serving.handle_messages(anthropic(), LONG),
    "/v1/messages/count_tokens": lambda s: s.anthropic_serving.handle_count_tokens(
        AnthropicCountTokensRequest(model="tiny", messages=MESSAGES), RAW
    ),
    "/api/chat": lambda s: s.ollama_serving.handle_chat(
        OllamaChatRequest(model="tiny", messages=MESSAGES, stream=False), RAW
    ),
    "/api/chat, a stream": lambda s: s.ollama_serving.handle_chat(
        OllamaChatRequest(model="tiny", messages=MESSAGES, stream=True), RAW
    ),
}


@pytest.mark.parametrize("route", CALLS)
def test_messages_that_the_template_refuses(served: Any, route: str) -> None:
    answer = asyncio.run(CALLS[route](served))
    body = json.loads(answer.body)
    assert answer.status_code == 400, body
    error = body.get("error", body)
    assert (error if isinstance(error, str) else error["message"]) == REFUSED
    if route.startswith("/v1/messages"):
        assert (body["type"], error["type"]) == ("error", "invalid_request_error")


def test_faults_of_the_server_stay_500(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("/a/path of the server")

    monkeypatch.setattr(served.openai_serving_chat, "_process_messages", broken)
    for route in ("/v1/messages", "/v1/messages, a stream", "/v1/messages/count_tokens"):
        answer = asyncio.run(CALLS[route](served))
        assert answer.status_code == 500
        assert json.loads(answer.body)["error"] == {"type": "api_error", "message": "Internal server error"}
