"""What of a JSON body SGLang's routes get: the fields that are served, within limits on what they cost.

SGLang's own routes read what they know and ignore the rest, as clients of other servers expect. So fields
that nobody has looked at are left out here, and those that are known not to be served are refused. The fields
of ``/generate``, ``/encode`` and ``/classify`` are checked where all requests meet that run the model
(`sglang_ext.sglang_internals.request_checks`)."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator
from typing import Any

from ragserve.errors import InvalidRequest, TooLarge
from sglang_ext.wire.protocol import longest_text

_SAMPLING = frozenset(
    {
        *("custom_logit_processor", "custom_params", "ebnf", "frequency_penalty", "ignore_eos", "logit_bias"),
        *("logprobs", "lora_path", "max_tokens", "min_p", "min_tokens", "model", "n", "no_stop_trim"),
        *("presence_penalty", "regex", "repetition_penalty", "response_format", "seed"),
        *("skip_special_tokens", "stop", "stop_token_ids", "stream", "stream_options", "temperature"),
        *("top_k", "top_p", "user"),
    }
)
_OWN = frozenset({"cache_salt", "extra_key", "priority", "rid"})
_RETURNED = frozenset({"return_cached_tokens_details", "return_hidden_states", "return_token_ids"})
_MESSAGES = frozenset(
    {
        *("chat_template_kwargs", "continue_final_message", "messages", "model", "reasoning_effort"),
        *("tool_choice", "tools"),
    }
)
_CHAT = (
    _SAMPLING
    | _OWN
    | _RETURNED
    | _MESSAGES
    | {
        *("input_ids", "max_completion_tokens", "max_dynamic_patch", "min_dynamic_patch"),
        *("parallel_tool_calls", "return_meta_info", "return_prompt_token_ids", "separate_reasoning"),
        *("stream_reasoning", "task", "top_logprobs", "use_audio_in_video"),
        "reasoning",  # no field of theirs: it sets reasoning_effort and the template's arguments
    }
)
_TOKENIZE = _MESSAGES | {"add_special_tokens", "prompt"}
_DETOKENIZE = frozenset({"model", "skip_special_tokens", "tokens"})
_COUNTED = frozenset(
    {"betas", "messages", "model", "output_config", "system", "thinking", "tool_choice", "tools"}
)
_OLLAMA = frozenset({"format", "keep_alive", "model", "options", "stream", "think"})

FIELDS: dict[str, frozenset[str]] = {
    "/api/chat": _OLLAMA | {"messages"},
    "/api/generate": _OLLAMA | {"context", "images", "prompt", "raw", "suffix", "system", "template"},
    "/api/show": frozenset({"model"}),
    "/detokenize": _DETOKENIZE,
    "/invocations": _CHAT,
    "/tokenize": _TOKENIZE,
    "/v1/chat/completions": _CHAT,
    "/v1/classify": frozenset({"input", "model", "priority", "rid", "user"}),
    "/v1/completions": _SAMPLING | _OWN | _RETURNED | {"best_of", "echo", "json_schema", "prompt", "suffix"},
    "/v1/detokenize": _DETOKENIZE,
    "/v1/embeddings": frozenset(
        {"dimensions", "encoding_format", "input", "lora_path", "model", "priority", "rid", "user"}
    ),
    "/v1/messages": _COUNTED
    | {"max_tokens", "metadata", "stop_sequences", "stream", "temperature", "top_k", "top_p"},
    "/v1/messages/count_tokens": _COUNTED,
    "/v1/rerank": frozenset({"documents", "instruct", "query", "return_documents", "top_n"}),
    "/v1/responses": frozenset(
        {
            *("background", "cache_salt", "extra_key", "frequency_penalty", "include", "input"),
            *("instructions", "max_output_tokens", "max_tool_calls", "metadata", "min_p", "model"),
            *("parallel_tool_calls", "presence_penalty", "previous_response_id", "priority", "reasoning"),
            *("repetition_penalty", "request_id", "service_tier", "stop", "store", "stream", "temperature"),
            *("tool_choice", "tools", "top_k", "top_logprobs", "top_p", "truncation", "user"),
        }
    ),
    "/v1/score": frozenset(
        {
            *("apply_softmax", "item_first", "items", "label_token_ids", "model", "query"),
            "return_pooled_hidden_states",
        }
    ),
    "/v1/tokenize": _TOKENIZE,
    "/vertex_generate": frozenset({"instances", "parameters"}),
}
"""The fields that are passed on, by route."""

REFUSED = frozenset(
    {
        *("bootstrap_host", "bootstrap_port", "bootstrap_room", "custom_labels", "data_parallel_rank"),
        *("disagg_prefill_dp_rank", "embed_override_token_id", "embed_overrides", "images_config"),
        *("item_embed_overrides", "query_embed_overrides", "return_routed_experts", "routed_dp_rank"),
        *("routed_experts_start_len", "session_id", "session_params", "stop_regex"),
        # of 0.5.23
        *("http_worker_ipc", "mm_processor_kwargs", "return_flat_raw_output_top_logprobs"),
        *("return_flat_raw_top_logprobs", "return_flat_raw_top_logprobs_b64", "return_input_ids_in_sglext"),
        *("return_output_ids_in_sglext", "return_sampling_mask", "return_spec_tokens_details"),
        *("return_token_logprobs", "sampling_logprobs_mode", "score_extraction_token", "video_config"),
        "watermark",
    }
)
"""Fields of SGLang's models that are not served: of clusters, sessions, models of other kinds, expressions
that take for ever, and what its newer version has."""

_MEDIA_PARTS = ("image", "image_url", "input_image", "input_audio", "audio_url", "video_url")
_MEDIA_FIELDS = frozenset({"audio_url", "image", "image_url", "input_audio", "source", "video_url"})
_WITH_PARTS = ("documents", "input", "messages", "query")
_IDS = ("context", "input", "input_ids", "items", "label_token_ids", "prompt", "query", "tokens")
_EACH = 32  # characters that a text, a number or an object in a list counts beside its own
MOST_PER_BYTE = _EACH  # of a body
_TOKENISED = frozenset({"/tokenize", "/v1/tokenize", "/v1/messages/count_tokens"})
_DETOKENISED = frozenset({"/detokenize", "/v1/detokenize"})
_REPEATED = {"/v1/rerank": ("documents", "query", "instruct"), "/v1/score": ("items", "query")}
"""A list, and what is put before each of its texts."""
_INLINE = "/api/chat"  # tokenised in the event loop, whatever its length
_INLINE_CHARS = 2**16
SIZED = _TOKENISED | _DETOKENISED | _REPEATED.keys() | {_INLINE}
_MIN_DETOKENISED = 2**16  # tokens of one request, also for a model of a short context

_KWARGS = "chat_template_kwargs"
_MAX_KWARGS = 32
_MAX_KWARG_CHARS = 256
_MAX_KWARG_INT = 2**31
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


def check_size(path: str, data: dict[str, Any], context_length: int) -> None:
    """Bound what a request makes SGLang tokenise, make text of or put together before it has counted it: no
    more fits into the model's context.

    Raises TooLarge."""
    longest = longest_text(context_length)
    if path in _TOKENISED or path == _INLINE:
        check_text(data, longest if path in _TOKENISED else _INLINE_CHARS)
    if path in _DETOKENISED and isinstance(data.get("tokens"), list):
        size = sum(len(row) or 1 if isinstance(row, list) else 1 for row in data["tokens"])
        if size > (most := max(context_length, _MIN_DETOKENISED)):
            raise TooLarge(f"{size:,} tokens are more than the {most:,} of one request.", hint="Send less.")
    if path in _REPEATED:
        many, *before = _REPEATED[path]
        n = len(data[many]) if isinstance(data.get(many), list) else 1
        size = n * (_EACH + sum(map(_length, map(data.get, before))))
        if size > longest:
            raise TooLarge(
                f"{before[0]} before each of {n:,} {many} makes {size:,} characters; the limit of this model "
                f"is {longest:,}.",
                hint=f"Send fewer {many} at a time.",
            )


def _length(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    return sum(_EACH + _chars(one) for one in value) if isinstance(value, list) else 0


def check_text(data: Any, limit: int) -> None:
    """Raise TooLarge for a body with more than ``limit`` characters that may become a prompt: those of texts,
    names and numbers, but for token ids, images, sound and films."""
    if (size := sum(map(_chars, _written(data)))) > limit:
        raise TooLarge(
            f"The request has {size:,} characters of text; the limit of this model is {limit:,}.",
            hint="Send less.",
        )


def _written(data: Any) -> Iterator[Any]:
    """The values of a body without its token ids and the parts that are no text."""
    if not isinstance(data, dict):
        return
    for name, value in data.items():
        yield name
        if not isinstance(value, list):
            yield value
        elif name in _WITH_PARTS:
            for one in value:
                yield [_without_media(one)]
        elif name in _IDS:
            yield _without_ids(value)
        else:
            yield value


def _without_ids(values: list[Any]) -> list[Any]:
    """A list without its token ids and lists of token ids."""
    kept = []
    for one in values:
        rest = [each for each in one if not isinstance(each, int)] if isinstance(one, list) else one
        if not isinstance(one, int) and (rest or not one):
            kept.append(rest)
    return kept


def _without_media(one: Any) -> Any:
    """A message or document without what is no text in its parts; token ids are none either."""
    if isinstance(one, list):
        return [_part_without_media(part) for part in one if not isinstance(part, int)]
    if isinstance(one, dict) and isinstance(one.get("content"), list):
        return _part_without_media(one) | {"content": _without_media(one["content"])}
    return _part_without_media(one)


def _part_without_media(part: Any) -> Any:
    """A part without its image, sound or film. What else is in it may be read, whatever type it says."""
    if isinstance(part, dict) and part.get("type") in _MEDIA_PARTS:
        return {name: value for name, value in part.items() if name not in _MEDIA_FIELDS}
    return "" if isinstance(part, int) else part


def _chars(data: Any) -> int:
    """Characters of a value as a template may write it."""
    chars, values = 0, [data]
    while values:
        value = values.pop()
        if isinstance(value, str):
            chars += len(value)
        elif isinstance(value, list):
            chars += _EACH * len(value)
            values += value
        elif isinstance(value, dict):
            chars += sum(len(name) + _EACH for name in value)
            values += value.values()
    return chars


def served_body(path: str, data: Any, *, every_grammar: bool = False) -> Any:
    """Return what SGLang gets of a body: ``data`` itself if that is all of it. ``every_grammar``: clients may
    send structural tags of their own.

    Raises InvalidRequest for what is not served."""
    if not isinstance(data, dict):
        raise InvalidRequest("The body must be a JSON object.", hint="See /docs for its fields.")
    for name in sorted(REFUSED & data.keys()):
        value = data[name]
        if value is not None and value is not False and value not in (0, [], {}):
            raise InvalidRequest(f"{name} is not served here.", hint="Omit it.", param=name)
    fields = FIELDS[path]
    if _KWARGS in fields and data.get(_KWARGS) is not None:
        _check_template_arguments(data[_KWARGS])
    form = data.get("response_format")
    if isinstance(form, dict) and form.get("type") == "structural_tag" and not every_grammar:
        raise InvalidRequest(
            "response_format: structural_tag is not served here: its expressions may stop the engine.",
            hint="Use json_schema or tools; the server's --grammars all opens it.",
            param="response_format",
        )
    return {name: data[name] for name in data if name in fields} if data.keys() - fields else data


@functools.cache
def template_parameters() -> frozenset[str]:
    """Names that mean something to the function that renders chat templates: one may even replace the
    template by a program of the client's."""
    from transformers import PreTrainedTokenizerBase

    return frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {"messages"}


def _check_template_arguments(arguments: Any) -> None:
    """Check the variables of a chat template. They may choose among what the model's template does."""

    def refuse(reason: str) -> InvalidRequest:
        return InvalidRequest(
            f"{_KWARGS}: {reason}.",
            hint='Send what the model\'s template reads, such as {"enable_thinking": false}.',
            param=_KWARGS,
        )

    if not isinstance(arguments, dict) or len(arguments) > _MAX_KWARGS:
        raise refuse(f"must be an object of at most {_MAX_KWARGS} values")
    for name, value in arguments.items():
        if not _NAME.fullmatch(name):
            raise refuse(f"{name!r:.80} is not a name")
        if name in template_parameters():
            raise refuse(f"{name!r} is not the client's to set")
        if isinstance(value, str) and len(value) > _MAX_KWARG_CHARS:
            raise refuse(f"{name!r} has {len(value)} characters, more than {_MAX_KWARG_CHARS}")
        if value is not None and not isinstance(value, (bool, int, float, str)):
            raise refuse(f"{name!r} must be a number, a truth value or a short text")
        if isinstance(value, (int, float)) and not abs(value) < _MAX_KWARG_INT:
            raise refuse(f"{name!r} must be below {_MAX_KWARG_INT}")
