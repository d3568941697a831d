"""An engine elsewhere: whether its tokenizer is the one that prompts are made with, and what it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from ragserve.answering.prompt import PromptBuilder
from ragserve.config import load
from ragserve.engine.base import GenerateRequest, Sampling
from ragserve.engine.remote import REFUSES_KEY, RemoteEngine, refusal
from ragserve.errors import EngineError, InvalidRequest, RagserveError, TooManyRequests, Unavailable
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


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, InvalidRequest),
        (401, EngineError),
        (403, EngineError),
        (404, InvalidRequest),
        (429, TooManyRequests),
        (500, EngineError),
        (503, Unavailable),
    ],
)
@pytest.mark.parametrize("body", ["why", {"error": "why"}, {"error": {"message": "why"}}, ["why"]])
def test_a_status_stands_for_one_error(status: int, kind: type[RagserveError], body: object) -> None:
    error = refusal("The worker at X", status, body, "It has no /worker.")
    assert type(error) is kind
    assert str(error).startswith("The worker at X ")
    assert (error.code == REFUSES_KEY) == (status in (401, 403)), "which asking another one would not change"
    assert ("why" in str(error)) == (status in (400, 500, 503))
    assert ("It has no /worker." in str(error)) == (status == 404)


@pytest.mark.parametrize("answer", ["full", '{"error": {"message": "full"}}'])
def test_a_refused_generation_raises_the_error_of_its_status(answer: str) -> None:
    statuses = iter((400, 429, 503))

    async def generate(_: web.Request) -> web.Response:
        return web.Response(status=next(statuses), text=answer)

    async def run() -> None:
        app = web.Application()
        app.add_routes([web.post("/generate", generate)])
        async with TestServer(app) as server:
            engine = RemoteEngine(load(engine_url=str(server.make_url("/"))))
            try:
                for kind in (InvalidRequest, TooManyRequests, Unavailable):
                    with pytest.raises(kind) as raised:
                        async for _ in engine.generate(GenerateRequest("r", [1, 2], "n", "full")):
                            pass
                    assert "{" not in str(raised.value), "the reason alone"
            finally:
                await engine.close()

    asyncio.run(run())


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_seed_is_refused_where_the_engine_does_not_read_it(deterministic: bool) -> None:
    """SGLang without our hooks reads seeds with deterministic inference only."""

    async def info(_: web.Request) -> web.Response:
        return web.json_response(INFO | {"enable_deterministic_inference": deterministic})

    async def asked(engine: RemoteEngine, sampling: Sampling) -> None:
        async for _ in engine.generate(GenerateRequest("q", [1, 2], "n", "full", sampling=sampling)):
            pass

    async def run() -> None:
        app = web.Application()
        app.add_routes([web.get("/{_}", info)])  # and nothing generates: 404
        async with TestServer(app) as server:
            engine = RemoteEngine(load(engine_url=str(server.make_url("/"))))
            try:
                await engine.start()
                for sampling, reads in (
                    (Sampling(seed=7, temperature=1.0), deterministic),
                    (Sampling(seed=7), True),
                ):
                    with pytest.raises(RagserveError) as refused:
                        await asked(engine, sampling)
                    assert ("does not read seeds" in str(refused.value)) is not reads
            finally:
                await engine.close()

    asyncio.run(run())
