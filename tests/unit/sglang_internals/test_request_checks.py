"""Values that SGLang's routes take as they come are checked before its scheduler gets them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.sglang_internals import request_checks
from sglang_ext.sglang_internals.request_checks import (
    OwnTraceHeaders,
    check_request,
    check_sampling,
    check_tokenized,
)
from sglang_ext.wire.measuring import measuring
from sglang_ext.wire.protocol import DISTRIBUTION_FIELD, FORCED_FIELD
from sglang_ext.wire.token_meter import metered

VOCABULARY, CONTEXT = 1000, 512
NAN, HUGE = math.nan, 10**30


def sampling(**params: Any) -> None:
    check_sampling(params, VOCABULARY, CONTEXT)


def request(**fields: Any) -> None:
    given = {"rid": None, "text": None, "input_ids": None, "sampling_params": None} | fields
    if given["text"] is None and given["input_ids"] is None:
        given["text"] = "x"
    check_request(SimpleNamespace(**given), CONTEXT)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop_token_ids", [VOCABULARY]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1.5]),
        ("stop_token_ids", HUGE),
        ("top_k", 2**31),
        ("top_k", 1.5),
        ("top_k", True),
        ("n", 0),
        ("n", HUGE),
        ("min_new_tokens", 2**31),
        ("max_new_tokens", HUGE),
        ("max_new_tokens", 1.5),
        ("stream_interval", 0),
        ("stream_interval", -1),
        ("sampling_seed", 2**70),
        ("temperature", NAN),
        ("temperature", math.inf),
        ("temperature", 1e300),
        pytest.param("temperature", 10**400, id="temperature-large"),
        ("temperature", "hot"),
        ("top_p", NAN),
        ("min_p", [0.1]),
        pytest.param("min_p", -(10**400), id="min_p-large"),
        ("repetition_penalty", 1e-300),
        ("frequency_penalty", NAN),
        ("logit_bias", {"1": NAN}),
        ("logit_bias", {"1": math.inf}),
        ("logit_bias", {"1": 1e39}),
        pytest.param("logit_bias", {"1": 10**400}, id="logit_bias-large"),
        ("logit_bias", {str(VOCABULARY): 1.0}),
        ("logit_bias", {"-1": 1.0}),
        ("logit_bias", {"1_0": 1.0}),
        ("logit_bias", {"\u0663": 1.0}),
        ("logit_bias", [1]),
        ("stop", [""]),
        ("stop", [1]),
        ("stop", ["a"] * 257),
        ("stop", "a" * 5000),
        ("stop", ["a" * 3000, "b" * 3000]),
        ("stop_regex", "(a+)+$"),
        ("regex", 5),
        ("regex", "a\0"),
        ("regex", "a" * (2**17 + 1)),
        ("ebnf", "root ::= " + "(" * 1000),
        ("json_schema", '{"a":' * 20000),
        ("json_schema", "[" * 20000),
        ("json_schema", "{"),
        ("structural_tag", "{"),
        ("stop_strs", ["a"]),
        ("is_normalized", True),
        ("unknown", None),
    ],
)
def test_a_parameter_that_the_scheduler_cannot_take_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name.split("_")[0]):
        sampling(**{name: value})


def test_what_is_not_served_may_be_named_empty() -> None:
    """As SGLang's routes of 0.5.23 do in every chat."""
    params = {"temperature": 0.5, "watermark": None}
    check_sampling(params, VOCABULARY, CONTEXT)
    assert params == {"temperature": 0.5}
    with pytest.raises(ValueError, match="no 'watermark'"):
        sampling(watermark={"key": "ab"})


def test_what_sglangs_routes_make_of_plain_requests_passes() -> None:
    from sglang.srt.entrypoints.openai.protocol import (
        ChatCompletionRequest,
        CompletionRequest,
        ResponsesRequest,
    )
    from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion

    chat = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "a"}])
    made = [chat.to_sampling_params([], {}), ResponsesRequest(input="a").to_sampling_params(16)]
    completion: Any = SimpleNamespace(default_sampling_params={})
    build = OpenAIServingCompletion._build_sampling_params
    made.append(build(completion, CompletionRequest(model="m", prompt="a")))
    for params in made:
        check_sampling(params, VOCABULARY, CONTEXT)


def test_usual_parameters_pass() -> None:
    sampling()
    sampling(
        temperature=0.7, top_p=0.9, top_k=-1, min_p=0, repetition_penalty=1, frequency_penalty=-2, n=None,
        stop=["a", "\n"], stop_token_ids=[0, VOCABULARY - 1], logit_bias={"5": -100}, max_new_tokens=None,
        min_new_tokens=3, json_schema=json.dumps({"type": "object", "properties": {"a": {"type": "string"}}}),
        sampling_seed=7, stream_interval=1, stop_regex=[], custom_params={"ragserve": "{}"},
    )  # fmt: skip
    sampling(json_schema="$$ANY$$")


@pytest.mark.parametrize(
    "fields",
    [
        {name: value}
        for name in sorted({*request_checks.REFUSED, "new_in_sglang"})
        for value in ("x", [1], 7)
    ]
    + [
        {"rid": ""},
        {"rid": "a"},
        {"max_dynamic_patch": 10**9},
        {"image_max_dynamic_patch": [1]},
        {"rid": ["long-enough-1", ""]},
        {"priority": 2**63},
        {"logprob_start_len": -2},
        {"logprob_start_len": [0, 10**9]},
        {"top_logprobs_num": -1},
        {"top_logprobs_num": 10**9},
        {"top_logprobs_num": [1, 1025]},
        {"sampling_params": {"n": 2000}},
        {"sampling_params": {"n": 0}},
        {"sampling_params": {"n": 1.5}},
        {"sampling_params": {"n": 40}, "text": ["x"] * 40},
        {"sampling_params": []},
        {"sampling_params": [1]},
        {"sampling_params": [{}, {}]},
        {"lora_path": ["a", "b"]},
        {"text": ["x", "y"], "lora_path": ["a"]},
        {"text": ["x"] * 1025},
        {"input_ids": [[1]] * 1025},
        {"input_ids": [[1], []]},
        {"text": "x" * (2**20 + 1)},
        {"text": ["x" * 2**19] * 3},
    ],
)  # fmt: skip
def test_a_request_that_is_not_served_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        request(**fields)


@pytest.mark.parametrize(
    ("salt", "key", "joined"), [("s", "k", "sk"), ("s", None, "s"), ("", None, None), (None, "k", "k")]
)
def test_a_salt_is_a_part_of_the_key_by_which_prompts_are_cached(
    salt: str | None, key: str | None, joined: str | None
) -> None:
    obj: Any = SimpleNamespace(cache_salt=salt, extra_key=key)
    request_checks.join_salt(obj)
    assert (obj.cache_salt, obj.extra_key) == (None, joined)


def test_sglang_has_no_field_that_nobody_has_looked_at() -> None:
    """A field that SGLang adds fails here: serve it, within a limit, or refuse it."""
    from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput

    models = (GenerateReqInput, EmbeddingReqInput)
    theirs = {field.name for model in models for field in dataclasses.fields(model)}
    assert theirs - (request_checks.SERVED | request_checks.REFUSED) == set()
    assert theirs >= request_checks.SERVED
    assert not request_checks.SERVED & request_checks.REFUSED
    for obj in (GenerateReqInput(text="x"), EmbeddingReqInput(text="x")):
        check_request(obj, CONTEXT)
    with pytest.raises(ValueError, match="mm_hashes is not served"):
        check_request(GenerateReqInput(text="x", image_data="data:,", mm_hashes=["ab"]), CONTEXT)


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling_params": {"n": 1024}, "top_logprobs_num": 50},
        {"sampling_params": {"n": 8, "max_new_tokens": None}, "top_logprobs_num": 1024},
        {"token_ids_logprob": [5] * 2**15},
        {"text": ["x", "y"], "token_ids_logprob": [[5] * 2**15, [5]]},
        {
            "text": "x" * 100_000,
            "logprob_start_len": 0,
            "top_logprobs_num": 1024,
            "sampling_params": {"n": 4},
        },
        {"input_ids": [[1] * 512] * 600, "logprob_start_len": 0, "top_logprobs_num": 9},
        {
            "image_data": "data:,",
            "logprob_start_len": 0,
            "top_logprobs_num": 1000,
            "sampling_params": {"n": 9},
        },
    ],
)
def test_log_probabilities_have_one_budget(fields: dict[str, Any]) -> None:
    """Sequences x positions x values of each: a test of one of them bounds nothing."""
    with pytest.raises(ValueError, match="log-probabilities are more than"):
        request(return_logprob=True, **fields)
    request(**fields)  # SGLang computes none


@pytest.mark.parametrize("value", ["x", -1, 1.5, [1], 2**40])
def test_a_budget_of_nonsense_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="max_new_tokens"):
        request(return_logprob=True, sampling_params={"max_new_tokens": value})


def test_usual_log_probabilities_pass() -> None:
    request(return_logprob=True, top_logprobs_num=20, sampling_params={"max_new_tokens": None, "n": 8})
    request(
        return_logprob=[True, False], text=["x" * 5000] * 2, logprob_start_len=[0, 10], top_logprobs_num=5
    )
    request(return_logprob=True, token_ids_logprob=[5, 6], sampling_params={"max_new_tokens": 0})
    request(return_logprob=True, input_ids=[1] * 500, logprob_start_len=100, top_logprobs_num=1000)


@pytest.mark.parametrize("custom", [{DISTRIBUTION_FIELD: 2}, {FORCED_FIELD: "[1]"}])
def test_only_the_server_itself_measures(custom: dict[str, Any]) -> None:
    def ask(**params: Any) -> None:
        request(sampling_params={"custom_params": custom, **params})

    with pytest.raises(ValueError, match="is the server's own; omit it"):
        ask()
    with measuring(allowed=False), pytest.raises(ValueError, match="is the server's own; omit it"):
        ask()
    with measuring():
        ask()
        ask(n=8)
        custom = {DISTRIBUTION_FIELD: 400}
        with pytest.raises(ValueError, match="at most 512 in all"):
            ask(n=2)


def test_usual_requests_pass() -> None:
    request()
    request(rid="request-1", text=["a", "b"], sampling_params=[{"n": 1}, {}], top_logprobs_num=[0, 5])
    request(text=["a", "b"], lora_path=["one", None])
    request(lora_path="one")
    request(input_ids=[1, 2], bootstrap_room=None, return_routed_experts=False, routed_experts_start_len=0)
    request(sampling_params={"n": None}, priority=3, logprob_start_len=-1)


@pytest.mark.parametrize("name", request_checks.MEDIA)
@pytest.mark.parametrize(
    "place",
    [
        "http://169.254.169.254/latest/meta-data",
        "HTTPS://example.com/a.png",
        "file:///etc/passwd",
        "/etc/passwd",
        "photo.png",
        "AAAA",  # base64 without data: would be read as a file where it begins with a slash
        {"url": "data:image/png;base64,AAAA"},
        5,
    ],
    ids=str,
)
def test_nothing_is_fetched_or_read_for_a_client(name: str, place: Any) -> None:
    """The shapes are those that routes make of it."""
    wrapped = SimpleNamespace(url=place, detail="auto")  # as chats' images arrive
    content = "data:image/png;base64,AAAA"
    for given in (place, [place], [[content, place]], [None, [place]], wrapped, [content, wrapped]):
        with pytest.raises(ValueError, match=rf"{name}.*send the content"):
            request(**{name: given})
    for given in (None, [], [None], content, [[content], None], SimpleNamespace(url=content), b"RIFF"):
        request(**{name: given})


@pytest.mark.parametrize("received", [0.0, -1e300, NAN, 1e12])
def test_a_clients_clock_does_not_enter_the_timings(received: float) -> None:
    asked = SimpleNamespace(rid=None, text="x", input_ids=None, sampling_params=None, received_time=received)
    check_request(asked, CONTEXT)
    assert asked.received_time is None


def tokenized(ids: list[int], fields: dict[str, Any] | None = None, **params: Any) -> Any:
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    plain = {
        "return_logprob": False,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "token_ids_logprob": None,
    }
    return TokenizedGenerateReqInput(
        rid="request-1",
        input_text="x",
        input_ids=array("q", ids),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=SamplingParams(**params),
        stream=False,
        **plain | (fields or {}),
    )


@pytest.mark.parametrize("ids", [[], [VOCABULARY], [5, -1], [2**62]])
def test_token_ids_that_the_model_does_not_have_are_refused(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="token"):
        check_tokenized(tokenized(ids), VOCABULARY)
    with_image = tokenized([1, 2**40])  # the ids that stand for it are SGLang's own
    with_image.mm_inputs = object()
    check_tokenized(with_image, VOCABULARY, given=[1, 2])
    check_tokenized(with_image, VOCABULARY)
    with pytest.raises(ValueError, match="token"):
        check_tokenized(with_image, VOCABULARY, given=ids)


@pytest.mark.parametrize(
    "fields",
    [
        {"custom_logit_processor": []},
        {"return_logprob": [1]},
        {"extra_key": 5},
        {"return_hidden_states": "x"},
    ],
)
def test_fields_that_the_scheduler_cannot_decode_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        check_tokenized(tokenized([1], fields), VOCABULARY)


@pytest.mark.parametrize(
    "params",
    [
        {"ignore_eos": "yes"},
        {"skip_special_tokens": 3},
        {"custom_params": {"a": {"b": {"c": 1}}}},
        {"custom_params": "x"},
        {"no_stop_trim": []},
    ],
)
def test_parameters_that_the_scheduler_cannot_decode_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        check_tokenized(tokenized([1], **params), VOCABULARY)
    check_tokenized(tokenized([1], custom_params={"ragserve": "{}"}), VOCABULARY)


def test_another_sglang_is_noticed() -> None:
    manager = SimpleNamespace(generate_request=lambda obj: obj, _create_tokenized_object=lambda obj: obj)
    with pytest.raises(RuntimeError, match="generate_request has parameters"):
        request_checks.install(manager)
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    real: Any = object.__new__(TokenizerManager)
    request_checks.install(real)


def test_a_trace_is_continued_for_the_server_alone() -> None:
    headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    request(external_trace_header=OwnTraceHeaders(headers))
    with pytest.raises(ValueError, match="external_trace_header is not served here"):
        request(external_trace_header=headers)


def test_tokens_are_reported_as_they_are_read_and_generated() -> None:
    class Manager:
        context_len = CONTEXT
        model_config = SimpleNamespace(vocab_size=VOCABULARY)

        async def generate_request(self, obj: Any, request: Any = None) -> Any:
            self._create_tokenized_object(obj, "x", [1, 2, 3])
            for counts in ((2, 3), (5, 5)):
                yield [{"meta_info": {"id": place, "completion_tokens": n}} for place, n in enumerate(counts)]

        def _create_tokenized_object(
            self,
            obj: Any,
            input_text: str,
            input_ids: list[int],
            input_embeds: Any = None,
            mm_inputs: Any = None,
            token_type_ids: Any = None,
        ) -> Any:
            return tokenized(input_ids)

    manager: Any = Manager()
    request_checks.install(manager)
    obj = SimpleNamespace(rid="request-1", text="x", input_ids=None, sampling_params=None)

    async def read(steps: int) -> None:
        outputs = manager.generate_request(obj, None)
        for _ in range(steps):
            await anext(outputs)
        await outputs.aclose()

    spent: list[int] = []
    asyncio.run(read(2))
    assert spent == []
    with metered(spent.append):
        asyncio.run(read(2))
    assert spent == [3, 2, 3, 3, 2]
    with metered(spent.append):
        asyncio.run(read(1))
    assert spent[5:] == [3, 2, 3]


def test_a_seed_of_several_answers_is_refused() -> None:
    """They would all be the same one."""
    sampling(sampling_seed=7, n=1)
    sampling(n=3)
    with pytest.raises(ValueError, match="sampling_seed with n"):
        sampling(sampling_seed=7, n=2)
