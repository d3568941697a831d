"""Checks requests in the server's process, before SGLang sends them to its scheduler.

SGLang's routes take most values as they come: one that its scheduler cannot decode, index with or divide by
ends the process for everyone. All routes that generate meet in `TokenizerManager`, so `install` checks there.
It raises ValueError, which SGLang answers with 400.
"""

from __future__ import annotations

import copy
import inspect
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from typing import Any

from sglang_ext.sglang_internals import grammar_checks
from sglang_ext.sglang_internals.background_prefill import check_mark
from sglang_ext.wire.cache_scope import confine
from sglang_ext.wire.measuring import check_measuring, may_measure
from sglang_ext.wire.protocol import longest_text
from sglang_ext.wire.token_meter import count_answers, count_prompt

# SGLang aborts by prefix: when the client of a request "a" leaves, it would end all whose ids begin with "a".
MIN_RID_CHARS = 8
MAX_SEQUENCES = 1024  # prompts times n of one request
MAX_STOPS = 256
MAX_STOP_CHARS = 4096
MAX_TOP_LOGPROBS = 1024
MAX_LOGPROBS = 2**21  # of one request, about 300 MB while it runs
_DEFAULT_NEW_TOKENS = 128  # SGLang's
MAX_PATCHES = 128  # that an image is cut into
MAX_BIAS = 1e9
MAX_TEMPERATURE = 1000.0
MIN_REPETITION_PENALTY = 1e-3
_INT64 = 2**63
_MOST = 2**31 - 1
_CLOCK_SKEW_S = 3600.0

SERVED = frozenset(
    {
        *("audio_data", "background", "conversation_id", "custom_logit_processor", "dimensions", "extra_key"),
        *("image_data", "image_max_dynamic_patch", "input_embeds", "input_ids", "is_cross_encoder_request"),
        *("log_metrics", "logprob_start_len", "lora_path", "max_dynamic_patch", "max_thinking_tokens"),
        *("min_dynamic_patch", "modalities", "no_logs", "priority", "received_time", "require_reasoning"),
        *("return_bytes", "return_entropy", "return_flat_raw_top_logprobs"),
        *("return_flat_raw_top_logprobs_b64", "return_hidden_states", "return_logprob"),
        *("return_pooled_hidden_states", "return_prompt_token_ids", "return_text_in_logprobs", "rid"),
        *("routing_key", "sampling_params", "stream", "text", "token_ids_logprob", "top_logprobs_num"),
        *("use_audio_in_video", "video_data", "video_max_dynamic_patch"),
    }
)
"""The fields of SGLang's ``GenerateReqInput`` and ``EmbeddingReqInput`` that are served, whichever route has
set them. All others must be empty.
"""

REFUSED = frozenset(
    {
        *("bootstrap_host", "bootstrap_pair_key", "bootstrap_port", "bootstrap_room", "cache_salt"),
        *("custom_labels", "data_parallel_rank", "decision_layout", "decode_tp_size"),
        *("disagg_prefill_dp_rank", "embed_override_token_id", "embed_overrides"),
        *("encoder_urls", "external_trace_header", "http_worker_ipc", "images_config", "lora_id"),
        *("kv_hints", "mm_content_hashes", "mm_processor_kwargs", "return_flat_raw_output_top_logprobs"),
        *("token_indices_to_pool", "video_config", "watermark"),
        *("mm_data_mooncake", "mm_hashes", "multi_item_delimiter_indices", "need_wait_for_mm_inputs"),
        *("num_items_assigned", "positional_embed_overrides", "return_indexer_topk", "return_routed_experts"),
        *("return_sampling_mask", "routed_dp_rank", "routed_experts_start_len", "sampling_logprobs_mode"),
        *("session_id", "session_params"),
    }
)
"""The others of the versions that are served, which a test compares with SGLang's: for a cluster's own
traffic, for sessions and for models of other kinds. SGLang checks none of them. ``mm_hashes`` names
entries of a cache of all clients.
"""

MEDIA = ("image_data", "video_data", "audio_data")
_PATCHES = ("image_max_dynamic_patch", "max_dynamic_patch", "min_dynamic_patch", "video_max_dynamic_patch")

SAMPLING = frozenset(
    {
        "custom_params",
        "ebnf",
        "frequency_penalty",
        "ignore_eos",
        "json_schema",
        "logit_bias",
        "max_new_tokens",
        "min_new_tokens",
        "min_p",
        "n",
        "no_stop_trim",
        "presence_penalty",
        "regex",
        "repetition_penalty",
        "sampling_seed",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_regex",
        "stop_token_ids",
        "stream_interval",
        "structural_tag",
        "temperature",
        "top_k",
        "top_p",
    }
)
"""SGLang's sampling parameters. It would take its own working fields (``is_normalized``) as well."""
UNSERVED_SAMPLING = ("watermark",)
"""Those that are not served. Routes of 0.5.23 name them, empty, in every chat and completion."""

# Routes whose sampling parameters are a client's own. Chats make structural tags of tools.
_NATIVE = ("/generate", "/vertex_generate")
_GENERATE = ("obj", "request")
_CREATE = ("obj", "input_text", "input_ids", "input_embeds", "mm_inputs", "token_type_ids")


class OwnTraceHeaders(dict[str, str]):
    """``external_trace_header`` as the server itself sets it. Clients send theirs as HTTP headers."""


def install(manager: Any, *, every_grammar: bool = False) -> None:
    """Check every request to ``manager``, a TokenizerManager, and serve ``every_grammar``, not JSON schemas
    alone. Raises RuntimeError for another SGLang.
    """
    generate = _method(manager, "generate_request", _GENERATE)
    create = _method(manager, "_create_tokenized_object", _CREATE)

    def generate_checked(obj: Any, request: Any = None) -> Any:
        join_salt(obj)
        check_request(obj, manager.context_len)
        if request is not None and request.url.path in _NATIVE:
            for params in _each(obj.sampling_params):
                # tags that servers in front of a worker have made of tools are theirs to check
                grammar_checks.check_tags(params, every=every_grammar or may_measure())
        confine(obj)
        return count_answers(generate(obj, request))

    def create_checked(obj: Any, *args: Any, **kwargs: Any) -> Any:
        # Before SGLang's own checks, which fail on other types with other exceptions.
        vocab_size = manager.model_config.vocab_size
        check_sampling(
            obj.sampling_params or {}, vocab_size, manager.context_len, every_grammar=every_grammar
        )
        tokenized = create(obj, *args, **kwargs)
        check_tokenized(tokenized, vocab_size, obj.input_ids)
        count_prompt(len(tokenized.input_ids or ()))
        return tokenized

    manager.generate_request, manager._create_tokenized_object = generate_checked, create_checked


def _method(manager: Any, name: str, expected: tuple[str, ...]) -> Callable[..., Any]:
    method: Callable[..., Any] = getattr(manager, name)
    found = tuple(inspect.signature(method).parameters)
    if found != expected:
        raise RuntimeError(f"SGLang's TokenizerManager.{name} has parameters {found}, expected {expected}")
    return method


def join_salt(obj: Any) -> None:
    """Put a request's ``cache_salt`` before its ``extra_key``, as 0.5.17's routes do. 0.5.23 has a field for
    it, which would reach the tree beside the key that `confine` sees."""
    salt, key = getattr(obj, "cache_salt", None), getattr(obj, "extra_key", None)
    if isinstance(salt, str) and isinstance(key, str | None):
        obj.extra_key, obj.cache_salt = salt + (key or "") or None, None


def check_request(obj: Any, context_length: int) -> None:
    """Check a request as a route made it: its fields, and how many sequences and characters it has."""
    for name in getattr(obj, "__dataclass_fields__", None) or vars(obj):
        value = getattr(obj, name)
        if name in SERVED or isinstance(value, OwnTraceHeaders):
            continue
        if value is not None and value is not False and value not in (0, [], {}):
            raise ValueError(f"{name} is not served here; omit it")
    for name in _PATCHES:
        _bounded(name, getattr(obj, name, None), 0, MAX_PATCHES)
    if any(len(rid) < MIN_RID_CHARS for rid in _each(obj.rid)):
        raise ValueError(f"rid must have {MIN_RID_CHARS} characters at least")
    for name, least, most in (("priority", -_INT64, _INT64 - 1), ("logprob_start_len", -1, context_length)):
        for value in _each(getattr(obj, name, None)):
            _bounded(name, value, least, most)
    for value in _each(getattr(obj, "top_logprobs_num", None)):
        _bounded("top_logprobs_num", value, 0, MAX_TOP_LOGPROBS)
    received = getattr(obj, "received_time", None)
    if received is not None and not abs(received - time.time()) < _CLOCK_SKEW_S:
        obj.received_time = None  # a client's clock must not enter our timings
    _check_media(obj)
    _check_size(obj, context_length)


def _check_media(obj: Any) -> None:
    """Allow content only. SGLang would fetch any address and open any file that a client names."""
    for name in MEDIA:
        values = [getattr(obj, name, None)]
        while values:
            value = values.pop()
            if isinstance(value, (list, tuple)):
                values += value
            elif value is not None and not isinstance(value, bytes):
                url = getattr(value, "url", value)  # chat routes wrap it
                if not (isinstance(url, str) and url.startswith("data:")):
                    raise ValueError(
                        f"{name}: {url!r:.40} is not a data: URL; addresses are not fetched and files not "
                        "read here, send the content"
                    )


def _check_size(obj: Any, context_length: int) -> None:
    samples = 1
    given = obj.sampling_params
    if given is not None and not isinstance(given, (dict, list)):
        raise ValueError("sampling_params must be an object or a list of objects")
    if isinstance(given, list) and not given:
        raise ValueError("sampling_params is an empty list")
    for params in _each(given):
        if not isinstance(params, dict):
            raise ValueError("sampling_params must be an object or a list of objects")
        if params.get("n") is None:
            params.pop("n", None)  # SGLang multiplies by it before it replaces null
        check_mark(params)
        samples = max(samples, int(_bounded("n", params.get("n", 1), 1, MAX_SEQUENCES)))
    texts = [text for text in _each(obj.text) if isinstance(text, str)]
    ids = obj.input_ids
    if isinstance(ids, list) and any(isinstance(row, list) and not row for row in ids):
        raise ValueError("input_ids has an empty prompt")
    prompts = len(obj.text) if isinstance(obj.text, list) else 1
    if obj.text is None and isinstance(ids, list) and ids and isinstance(ids[0], list):
        prompts = len(ids)
    for name in ("sampling_params", "lora_path"):
        values = getattr(obj, name, None)
        if isinstance(values, list) and prompts != len(values):
            raise ValueError(f"{name} has {len(values)} entries for {prompts} prompts")
    if prompts * samples > MAX_SEQUENCES:
        raise ValueError(f"{prompts * samples} sequences are more than the {MAX_SEQUENCES} of one request")
    for params in _each(given):
        check_measuring(params, prompts * samples)
    _check_logprobs(obj, prompts, samples, context_length)
    if (size := sum(map(len, texts))) > (longest := longest_text(context_length)):
        raise ValueError(f"the text has {size} characters, more than the {longest} that are tokenised")


def _check_logprobs(obj: Any, prompts: int, samples: int, context_length: int) -> None:
    """Bound what SGLang keeps as Python objects: sequences x positions x log-probabilities of each. A text
    counts as many tokens as characters."""
    if not getattr(obj, "return_logprob", None):
        return
    ids_of = getattr(obj, "token_ids_logprob", None)
    rows = ids_of if isinstance(ids_of, list) and ids_of and isinstance(ids_of[0], list) else [ids_of]
    listed = max(len(row) if isinstance(row, (list, tuple)) else 0 for row in rows)
    tops = [value for value in _each(getattr(obj, "top_logprobs_num", None)) if value is not None]
    new = [params.get("max_new_tokens", _DEFAULT_NEW_TOKENS) for params in _each(obj.sampling_params)]
    most = [_bounded("max_new_tokens", value, 0, _MOST) for value in new if value is not None]
    tokens = context_length if None in new else max(most, default=_DEFAULT_NEW_TOKENS)
    positions = prompts * min(tokens, context_length)
    starts = [value for value in _each(getattr(obj, "logprob_start_len", None)) if value is not None]
    if (start := min(starts, default=-1)) >= 0:
        positions += sum(max(0, length - start) for length in _prompt_lengths(obj, context_length))
    values = samples * positions * (1 + listed + max(tops, default=0))
    if values > MAX_LOGPROBS:
        raise ValueError(
            f"{values:,} log-probabilities are more than the {MAX_LOGPROBS:,} of one request: lower "
            "max_new_tokens, n, top_logprobs_num or the prompt's part that has them (logprob_start_len)"
        )


def _prompt_lengths(obj: Any, context_length: int) -> Iterator[int]:
    """The most tokens that each prompt of a request can have."""
    if any(getattr(obj, name, None) for name in MEDIA) or (obj.text is None and not obj.input_ids):
        yield context_length
    elif obj.text is not None:
        yield from (min(len(text), context_length) for text in _each(obj.text) if isinstance(text, str))
    else:
        rows = obj.input_ids if isinstance(obj.input_ids[0], list) else [obj.input_ids]
        yield from (min(len(row), context_length) for row in rows)


def check_sampling(
    params: dict[str, Any], vocab_size: int, context_length: int, *, every_grammar: bool = False
) -> None:
    """Check the sampling parameters of one sequence: what SGLang leaves to its scheduler. Leave out those
    that are not served, if they are empty."""
    for name in UNSERVED_SAMPLING:
        if params.get(name) is None:
            params.pop(name, None)
    if unknown := sorted(map(str, params.keys() - SAMPLING)):
        raise ValueError(f"sampling_params has no {unknown[0]!r:.40}")
    for name in ("temperature", "top_p", "min_p", "repetition_penalty", *_PENALTIES):
        if (value := params.get(name)) is not None:
            _finite(name, value)
    if (value := params.get("temperature")) is not None and value > MAX_TEMPERATURE:
        raise ValueError(f"temperature {value} is above {MAX_TEMPERATURE:g}")
    if (value := params.get("repetition_penalty")) is not None and value < MIN_REPETITION_PENALTY:
        raise ValueError(f"repetition_penalty {value} is below {MIN_REPETITION_PENALTY}")
    for name, least, most in (
        ("n", 1, MAX_SEQUENCES),
        ("top_k", -1, 2**30),
        ("max_new_tokens", 0, _MOST),
        ("min_new_tokens", 0, context_length),
        ("stream_interval", 1, _MOST),
        ("sampling_seed", -_INT64, _INT64 - 1),
    ):
        if (value := params.get(name)) is not None:
            _bounded(name, value, least, most)
    if params.get("sampling_seed") is not None and (params.get("n") or 1) > 1:
        raise ValueError("sampling_seed with n: all answers would be the same; ask once for each seed")
    for token in _each(params.get("stop_token_ids")):
        if token is not None:
            _bounded("stop_token_ids", token, 0, vocab_size - 1)
    _check_bias(params.get("logit_bias"), vocab_size)
    _check_stops(params.get("stop"))
    if params.get("stop_regex") not in (None, [], ()):
        raise ValueError("stop_regex is not served here: some expressions take for ever; use stop")
    for name in grammar_checks.NAMES:
        if (text := params.get(name)) is not None:
            grammar_checks.check_grammar(name, text, every=every_grammar)


_PENALTIES = ("frequency_penalty", "presence_penalty")


def _check_bias(bias: Any, vocab_size: int) -> None:
    if bias is None:
        return
    if not isinstance(bias, dict):
        raise ValueError("logit_bias must be an object of token ids and numbers")
    for key, value in bias.items():
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 19):
            raise ValueError(f"logit_bias: {key!r:.40} is not a token id")
        _bounded("logit_bias", int(key), 0, vocab_size - 1)
        if abs(_finite("logit_bias", value)) > MAX_BIAS:
            raise ValueError(f"logit_bias: {value} is not between -{MAX_BIAS:g} and {MAX_BIAS:g}")


def _check_stops(stop: Any) -> None:
    stops = list(_each(stop))
    if len(stops) > MAX_STOPS:
        raise ValueError(f"{len(stops)} stop strings are more than {MAX_STOPS}")
    for text in stops:
        if not isinstance(text, str) or not text or len(text) > MAX_STOP_CHARS:
            raise ValueError(f"a stop must be a string of 1 to {MAX_STOP_CHARS} characters")
    if sum(map(len, stops)) > MAX_STOP_CHARS:  # each step looks for the beginnings of all of them
        raise ValueError(f"stop strings of more than {MAX_STOP_CHARS} characters together")


def check_tokenized(tokenized: Any, vocab_size: int, given: Any = None) -> None:
    """Check a request as it would be sent: the scheduler must be able to decode it, and the model to embed
    each token. ``given``: ids that the client sent; with images, those that are sent on stand for them, too.
    """
    import msgspec
    import numpy as np
    from sglang.srt.managers.io_struct import msgpack_decode, msgpack_encode

    small = copy.copy(tokenized)  # without what is long, or pickled on its way
    small.input_ids, small.input_text = array("q"), None
    small.mm_inputs = small.time_stats = None
    try:
        msgpack_decode(msgpack_encode(small))
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"the request cannot be read: {error}") from None
    if getattr(tokenized, "input_embeds", None) is not None:
        return
    media = tokenized.mm_inputs is not None
    if media and given is None:
        return
    ids = np.asarray(given if media else tokenized.input_ids, dtype=np.int64)
    if not len(ids):
        raise ValueError("the prompt has no tokens")
    bad = ids[(ids < 0) | (ids >= vocab_size)]
    if len(bad):
        raise ValueError(f"token id {bad[0]} is not between 0 and {vocab_size - 1}")


def _each(value: Any) -> Iterator[Any]:
    """The values of a field that is null, one value or a list."""
    if value is not None:
        yield from value if isinstance(value, (list, tuple, set)) else (value,)


def _bounded(name: str, value: Any, least: int, most: int) -> int:
    if value is None:
        return least
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name}: {value!r:.40} is not a whole number between {least} and {most}")
    return value


def _finite(name: str, value: Any) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not abs(value) <= sys.float_info.max:  # false for NaN; a whole number may be any size
        raise ValueError(f"{name}: {value!r:.40} is not a finite number")
    return float(value)
