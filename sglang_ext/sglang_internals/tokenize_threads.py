"""Long texts are tokenised in threads, and long chats made prompts there. SGLang does it in the event loop: a
text of 1 MiB took seconds, in which nobody was answered. The tokenizer itself works without the interpreter's
lock."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from types import SimpleNamespace
from typing import Any

from sglang_ext.sglang_internals.request_checks import check_sampling

INLINE_CHARS = 2**14  # about 5 ms
AT_A_TIME = 2  # what a text takes on its way is up to a kilobyte for each of its tokens
_HANDLERS = (
    ("openai_serving_tokenize", "_handle_non_streaming_request"),
    ("openai_serving_detokenize", "_handle_non_streaming_request"),
    ("anthropic_serving", "handle_count_tokens"),
    ("openai_serving_responses", "_make_request"),
)
"""What answers by tokenising alone, or makes a prompt. None of these waits for anything."""
_CHATS = (
    ("openai_serving_chat", "handle_request"),
    ("anthropic_serving", "_handle_streaming"),
    ("anthropic_serving", "_handle_non_streaming"),
)
"""What has ``openai_serving_chat`` convert a request, its first argument, and then waits for the answer. The
HTTP request is the last one."""

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
        if (handler := getattr(state, name, None)) is not None:  # /v1/responses may be off
            setattr(handler, method, _threaded(getattr(handler, method)))
    _serve_ollama(state.ollama_serving, manager)
    _serve_anthropic(state.anthropic_serving)
    if (responses := getattr(state, "openai_serving_responses", None)) is not None:
        _say_once(responses)
    ahead = _Ahead(state.openai_serving_chat)
    for name, method in _CHATS:
        handler = getattr(state, name)
        setattr(handler, method, ahead.of(getattr(handler, method)))


def _serve_ollama(ollama: Any, manager: Any) -> None:
    """Let Ollama's routes give lists of ids and seeds under their names, and answer 400 to what is wrong
    with a request before its stream begins: SGLang ends with 500 or cuts the connection."""
    from starlette.responses import JSONResponse

    ollama.tokenizer_manager = _WithLists(manager)
    convert = ollama._convert_options_to_sampling_params

    def converted(options: Any = None) -> Any:
        params = convert(options)
        if "seed" in params:
            params["sampling_seed"] = params.pop("seed")
        return params

    def checked(method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
        async def answer(request: Any, raw_request: Any) -> Any:
            try:
                context = manager.context_len
                check_sampling(converted(request.options), manager.model_config.vocab_size, context)
                return await method(request, raw_request)
            except (ValueError, TypeError) as error:
                return JSONResponse({"error": str(error)}, 400)

        return answer

    ollama._convert_options_to_sampling_params = converted
    for name in ("handle_chat", "handle_generate"):
        setattr(ollama, name, checked(getattr(ollama, name)))


class _WithLists:
    """``manager`` for ``/api/chat``: its tokenizer's templates give lists of ids, as they did before
    transformers 5, not what SGLang 0.5.17 sends on as the prompt and then refuses."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self.tokenizer = SimpleNamespace(apply_chat_template=self._ids)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def _ids(self, messages: Any, **options: Any) -> Any:
        from jinja2 import TemplateError

        try:
            return self._manager.tokenizer.apply_chat_template(messages, **options | {"return_dict": False})
        except TemplateError as error:  # raise_exception of a template, which refuses the messages
            raise ValueError(str(error)) from error


def _serve_anthropic(anthropic: Any) -> None:
    """Let Anthropic's routes answer 400 to what ``/v1/chat/completions`` answers 400 to, such as messages
    that the chat template refuses: SGLang answers 500 to every error of the conversion."""
    from sglang.srt.entrypoints.anthropic.serving import _scrub_error_message

    original = anthropic._error_response

    def error_response(
        status_code: int, error_type: str, message: str, exception_name: str | None = None
    ) -> Any:
        error = sys.exception()  # SGLang calls this where it handles it
        if status_code == 500 and isinstance(error, ValueError):
            return original(400, "invalid_request_error", _scrub_error_message(str(error), 400))
        return original(status_code, error_type, message, exception_name)

    anthropic._error_response = error_response


def _say_once(responses: Any) -> None:
    """Let ``/v1/responses`` say what is wrong with a request once: SGLang appends the error's cause, which
    says the same, or ``None``."""
    original = responses.create_error_response

    def error_response(message: str, *rest: Any, **options: Any) -> Any:
        if (error := sys.exception()) is not None and message == f"{error} {error.__cause__}":
            message = str(error)
        return original(message, *rest, **options)

    responses.create_error_response = error_response


class _Ahead:
    """Converts long requests in a thread before ``chat``, SGLang's handler of chats, asks for it."""

    def __init__(self, chat: Any) -> None:
        self._convert = chat._convert_to_internal_request
        found = tuple(inspect.signature(self._convert).parameters)
        if found != ("request", "raw_request"):
            raise RuntimeError(f"SGLang's OpenAIServingChat._convert_to_internal_request has {found}")
        self._done: dict[int, asyncio.Future[Any]] = {}  # by the identity of the request
        chat._convert_to_internal_request = self._converted

    def _converted(self, request: Any, raw_request: Any = None) -> Any:
        done = self._done.pop(id(request), None)
        return self._convert(request, raw_request) if done is None else done.result()

    def of(self, method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
        """``method``, which begins when its long request is converted."""

        async def ahead(request: Any, *rest: Any) -> Any:
            if int(rest[-1].headers.get("content-length", INLINE_CHARS + 1)) <= INLINE_CHARS:
                return await method(request, *rest)
            loop = asyncio.get_running_loop()
            convert = partial(copy_context().run, self._convert, request, rest[-1])
            done = loop.run_in_executor(_executor, convert)
            await asyncio.wait([done])
            done.exception()  # it is raised where SGLang would convert
            self._done[id(request)] = done
            try:
                return await method(request, *rest)
            finally:
                self._done.pop(id(request), None)

        return ahead


def _chars(texts: Any) -> int:
    if isinstance(texts, str):
        return len(texts)
    return sum(map(_chars, texts)) if isinstance(texts, (list, tuple)) else 0


def _threaded(method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
    async def threaded(*args: Any, **options: Any) -> Any:
        return await _in_thread(method, *args, **options)

    return threaded


async def _in_thread(method: Callable[..., Coroutine[Any, Any, Any]], *args: Any, **options: Any) -> Any:
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_executor, lambda: asyncio.run(method(*args, **options)))
