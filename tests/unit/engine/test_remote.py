"""Whether the tokenizer of a remote engine is the one that prompts are made with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from ragserve.answering.prompt import PromptBuilder
from ragserve.config import load
from ragserve.engine.remote import RemoteEngine
from ragserve.errors import InvalidRequest
from tests.conftest import MODEL

INFO = {"model_path": str(MODEL), "max_total_num_tokens": 1000}
Answer = Callable[[str], web.Response]


@pytest.fixture(scope="module")
def prompts() -> PromptBuilder:
    return PromptBuilder.load(str(MODEL))


def check(prompts: PromptBuilder, tokenize: Answer) -> None:
    async def tokens(request: web.Request) -> web.Response:
        return tokenize((await request.json())["prompt"])

    async def info(_: web.Request) -> web.Response:
        return web.json_response(INFO)

    async def run() -> None:
        app = web.Application()
        app.add_routes([web.post("/tokenize", tokens), web.get("/{_}", info)])
        async with TestServer(app) as server:
            engine = RemoteEngine(load(engine_url=str(server.make_url("/"))))
            try:
                await engine.start()
                await engine.check_tokenizer(prompts.plain_ids)
            finally:
                await engine.close()

    asyncio.run(run())


def test_the_engines_own_tokenizer_passes(prompts: PromptBuilder) -> None:
    check(prompts, lambda text: web.json_response({"tokens": prompts.plain_ids(text)}))


def test_another_tokenizer_is_refused(prompts: PromptBuilder) -> None:
    """Its ids may be none of the model's, which ends a plain SGLang."""
    with pytest.raises(InvalidRequest, match="--tokenizer") as refused:
        check(prompts, lambda text: web.json_response({"tokens": prompts.plain_ids(text)[1:]}))
    assert refused.value.code == "other_tokenizer"


@pytest.mark.parametrize(
    "answer",
    [lambda: web.Response(status=404), lambda: web.json_response([]), web.Response],
    ids=["not found", "a list", "nothing"],
)
def test_an_engine_that_does_not_tell_passes(
    prompts: PromptBuilder, answer: Callable[[], web.Response]
) -> None:
    check(prompts, lambda text: answer())
