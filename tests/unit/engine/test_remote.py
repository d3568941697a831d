"""Whether the tokenizer of a remote engine is the one that prompts are made with."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import httpx
import pytest

from ragserve.answering.prompt import PromptBuilder
from ragserve.config import load
from ragserve.engine.remote import RemoteEngine
from ragserve.errors import InvalidRequest
from tests.conftest import MODEL

INFO = {"model_path": str(MODEL), "max_total_num_tokens": 1000}
Answer = Callable[[str], httpx.Response]


@pytest.fixture(scope="module")
def prompts() -> PromptBuilder:
    return PromptBuilder.load(str(MODEL))


def check(prompts: PromptBuilder, tokenize: Answer) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/tokenize":
            return tokenize(json.loads(request.content)["prompt"])
        return httpx.Response(200, json=INFO)

    async def run() -> None:
        engine = RemoteEngine(load(engine_url="http://engine"))
        engine._client = httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://engine")
        await engine.start()
        await engine.check_tokenizer(prompts.plain_ids)

    asyncio.run(run())


def test_the_engines_own_tokenizer_passes(prompts: PromptBuilder) -> None:
    check(prompts, lambda text: httpx.Response(200, json={"tokens": prompts.plain_ids(text)}))


def test_another_tokenizer_is_refused(prompts: PromptBuilder) -> None:
    """Its ids may be none of the model's, which ends a plain SGLang."""
    with pytest.raises(InvalidRequest, match="--tokenizer") as refused:
        check(prompts, lambda text: httpx.Response(200, json={"tokens": prompts.plain_ids(text)[1:]}))
    assert refused.value.code == "other_tokenizer"


@pytest.mark.parametrize("answer", [httpx.Response(404), httpx.Response(200, json=[]), httpx.Response(200)])
def test_an_engine_that_does_not_tell_passes(prompts: PromptBuilder, answer: httpx.Response) -> None:
    check(prompts, lambda text: answer)
