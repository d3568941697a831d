"""A seeded fuzzer of SGLang's routes: valid requests in which a few values are replaced by nasty ones.

`python -m tests.integration.route_fuzz URL --seed 1 --minutes 15` runs it against a server until that stops
answering. The names of fields come from SGLang's own OpenAPI description.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import random
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

TIMEOUT_S = 240.0  # of a busy machine; a standstill has no end
NASTY: list[Any] = [
    None, True, False, 0, 1, -1, 2, 1.5, 1e-300, 1e300, -1e300, 1e39, float("nan"), float("inf"),
    -float("inf"), 2**31, -(2**31) - 1, 2**63, -(2**63) - 1, 2**70, 10**9, "", "a", "0", "-1", "1e5", "\0",
    "\ud800", "x" * 5000, [], [[]], [None], [0], [-1], [3, 10**9], [1.5], ["a"], [[1], []], [[[1]]], [True],
    [2**70], ["\ud800"], {}, {"a": 1}, {"0": 1.0}, {"999999999": 1.0}, {"-1": 1.0}, {"1": float("nan")},
    {"1": float("inf")}, {"a": {"b": {"c": [1]}}}, [{}], [{"a": 1}], [1] * 3000, ["a"] * 300, [[1]] * 40,
    "[" * 5000, "(" * 5000, '{"type": "string"}', "[a-z]+", "(a+)+$", 'root ::= "a"', "(a{500}){500}",
    '{"$ref": "#"}', "data:image/png;base64,AAAA", "/etc/hostname", "ragserve/x", "../..", "HEALTH_CHECK_1",
]  # fmt: skip
SAMPLING = (
    "max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "n", "json_schema",
    "regex", "ebnf", "structural_tag", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens",
    "no_stop_trim", "custom_params", "stream_interval", "logit_bias", "sampling_seed", "stop_strs",
    "stop_str_max_len", "is_normalized", "unknown",
)  # fmt: skip
SHORT = {"max_new_tokens": 4}
CHAT = [{"role": "user", "content": "What is a lighthouse?"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
BODIES: dict[str, list[dict[str, Any]]] = {
    "/generate": [
        {"text": "A lighthouse is", "sampling_params": SHORT},
        {"input_ids": [5, 6, 7], "sampling_params": SHORT, "stream": True},
        {"input_ids": [[5, 6], [7]], "sampling_params": SHORT, "return_logprob": True},
        {"text": ["A", "B"], "sampling_params": [SHORT, SHORT]},
        {"text": "A", "sampling_params": {"min_new_tokens": 2, "max_new_tokens": 6, "n": 2}},
        {"text": "A", "sampling_params": {"json_schema": "{}", "max_new_tokens": 4, "temperature": 0.7}},
    ],
    "/encode": [{"text": "A"}, {"input_ids": [5, 6]}],
    "/classify": [{"text": "A"}],
    "/tokenize": [{"prompt": "A"}],
    "/v1/tokenize": [{"prompt": ["A", "B"]}],
    "/detokenize": [{"tokens": [5, 6]}],
    "/v1/detokenize": [{"tokens": [[5], [6]]}],
    "/v1/completions": [
        {"model": "default", "prompt": "A lighthouse", "max_tokens": 4},
        {"model": "default", "prompt": [5, 6], "max_tokens": 4, "logprobs": 2, "echo": True, "stream": True},
        {"model": "default", "prompt": [[5], [6, 7]], "max_tokens": 2, "n": 2},
    ],
    "/v1/chat/completions": [
        {"model": "default", "messages": CHAT, "max_tokens": 4},
        {"model": "default", "messages": CHAT, "max_tokens": 4, "logprobs": True, "top_logprobs": 3},
        {"model": "default", "messages": CHAT, "max_tokens": 4, "tools": [TOOL], "tool_choice": "required"},
    ],
    "/v1/responses": [{"model": "default", "input": "A", "max_output_tokens": 4}],
    "/v1/embeddings": [{"model": "default", "input": "A"}],
    "/v1/classify": [{"model": "default", "input": "A"}],
    "/v1/score": [
        {"model": "default", "query": "A", "items": ["b", "c"], "label_token_ids": [5, 6]},
        {"model": "default", "query": [5], "items": [[6], [7]], "label_token_ids": [5]},
    ],
    "/v1/rerank": [{"query": "A", "documents": ["b", "c"]}],
    "/v1/messages": [{"model": "default", "max_tokens": 4, "messages": CHAT}],
    "/v1/messages/count_tokens": [{"model": "default", "messages": CHAT}],
    "/api/chat": [{"model": "default", "messages": CHAT, "stream": False, "options": {"num_predict": 4}}],
    "/api/generate": [{"model": "default", "prompt": "A", "stream": False, "options": {"num_predict": 4}}],
    "/api/show": [{"model": "default"}],
    "/invocations": [{"model": "default", "messages": CHAT, "max_tokens": 4}],
    "/vertex_generate": [{"instances": [{"text": "A"}], "parameters": {"sampling_params": SHORT}}],
    "/abort_request": [{"rid": "a-request-that-is-not-there"}],
}
HEAVY = ("/generate", "/v1/completions", "/v1/chat/completions")  # where most of what can break is


def sglang_document() -> dict[str, Any]:
    """SGLang's OpenAPI description; it warns of its own duplicate names."""
    from ragserve.engine.compat import prepare

    prepare()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.entrypoints.http_server import app

        return dict(app.openapi())


def sglang_fields() -> dict[str, list[str]]:
    """The names of the fields of each JSON body."""
    document = sglang_document()
    fields = {}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json")
            if content and "$ref" in content["schema"]:
                schema = document["components"]["schemas"][content["schema"]["$ref"].rsplit("/", 1)[1]]
                fields[path] = sorted(schema.get("properties", {}))
    return fields


def requests(seed: int, fields: dict[str, list[str]]) -> Iterator[tuple[str, bytes]]:
    """Paths and bodies without end, the same for the same seed."""
    draw = random.Random(seed)
    paths = [*BODIES, *HEAVY * 8]
    while True:
        path = draw.choice(paths)
        body = copy.deepcopy(draw.choice(BODIES[path]))
        names = fields.get(path) or list(body)
        for _ in range(draw.choice((1, 1, 2, 3))):
            if "sampling_params" in names and draw.random() < 0.6:
                params = body.get("sampling_params")
                params = params[0] if isinstance(params, list) and params else params
                if not isinstance(params, dict):
                    params = body["sampling_params"] = {"max_new_tokens": 4}
                params[draw.choice(SAMPLING)] = _value(draw)
            else:
                body[draw.choice(names)] = _value(draw)
        yield path, encoded(body)


def encoded(body: Any) -> bytes:
    """JSON with ``NaN`` and lone surrogates, which Python's parser takes."""
    return json.dumps(body).encode()


def _value(draw: random.Random) -> Any:
    value = copy.deepcopy(draw.choice(NASTY))
    if draw.random() < 0.1:
        value = [value, copy.deepcopy(draw.choice(NASTY))]
    return value


def send(client: httpx.Client, path: str, body: bytes, *, leaves: bool = False) -> int:
    """Send a request and read its answer. Returns the status, 0 if the connection ended, -1 without answer.

    SGLang closes the connection after an error of its own; `answers` tells whether the server lives."""
    headers = {"Content-Type": "application/json"}
    try:
        return client.post(
            path, content=body, headers=headers, timeout=0.05 if leaves else TIMEOUT_S
        ).status_code
    except httpx.TimeoutException:
        return 0 if leaves else -1
    except httpx.TransportError:
        return 0


def answers(client: httpx.Client) -> bool:
    """Return whether the server still generates."""
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 2, "temperature": 0}}
    fresh = {"Connection": "close"}
    for _ in range(3):  # a pooled connection may have been closed
        with contextlib.suppress(httpx.HTTPError):
            answer = client.post("/generate", json=body, headers=fresh, timeout=TIMEOUT_S)
            return answer.status_code == httpx.codes.OK
    return False


def fuzz(
    client: httpx.Client, seed: int, *, count: int = 0, until: float = 0.0, at_once: int = 8
) -> Counter[int]:
    """Send ``count`` requests, or send until the monotonic time ``until``. Returns the number of each status.

    Raises AssertionError with the last requests if the server no longer generates or left one unanswered."""
    statuses: Counter[int] = Counter()
    stream = requests(seed, sglang_fields())
    draw = random.Random(seed)
    with ThreadPoolExecutor(at_once) as pool:
        while statuses.total() < count or time.monotonic() < until:
            batch = [next(stream) for _ in range(at_once)]
            leaving = [draw.random() < 0.05 for _ in batch]
            found = list(
                pool.map(lambda one: send(client, *one[0], leaves=one[1]), zip(batch, leaving, strict=True))
            )
            statuses.update(found)
            shown = "\n".join(f"{s} {p} {b[:3000]!r}" for (p, b), s in zip(batch, found, strict=True))
            assert min(found) >= 0, f"a request was not answered:\n{shown}"
            assert answers(client), f"the server no longer generates after:\n{shown}"
    return statuses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=15)
    given = parser.parse_args()
    with httpx.Client(base_url=given.url) as connection:
        print(fuzz(connection, given.seed, until=time.monotonic() + 60 * given.minutes))
