"""Every stage on the scheduler's thread fails once in a real engine: its request ends with an error, the next
one is right, and nothing is lost.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from ragserve.answering.prompt import PromptBuilder
from sglang_ext.stages.stages import STAGES
from sglang_ext.wire.protocol import DISTRIBUTION_FIELD, PLAN_FIELD, PREFILL_FIELD, ContextPlan
from tests.integration.context_client import assert_same, composed, generate, plan_of, result
from tests.integration.engines import Server
from tests.integration.prompts import prompt, rows

SPACE = "faults"
LINES = '{"mode": "vertical_slash", "dense_below": 0}'
Ask = Callable[["Bench"], dict[str, Any]]


class Bench:
    """A composed prompt whose documents are cached, and what may be asked of it."""

    def __init__(self, client: httpx.Client, builder: PromptBuilder) -> None:
        self.client = client
        self.ids, self.spans = prompt(builder, rows("crossdoc")[3], 3)
        self._numbers = itertools.count()

    def composed(self, strategy: str = "concat", **options: Any) -> dict[str, Any]:
        return composed(self.client, self.ids, self.spans, strategy, SPACE, **options)

    def ask(self, strategy: str = "concat", **options: Any) -> dict[str, Any]:
        plan = plan_of(self.spans, strategy, SPACE, **options)
        return generate(self.client, self.ids, plan)

    def plain(self, **fields: Any) -> dict[str, Any]:
        """A prompt that nobody has sent before."""
        return generate(self.client, self.ids, extra_key=f"faults:{next(self._numbers)}", **fields)

    def document(self) -> dict[str, Any]:
        """Prefill a document that is in no tier."""
        fresh = [*self.ids[:100], 10 + next(self._numbers)]
        return generate(self.client, fresh, ContextPlan("document", SPACE), n_new=1)

    def sampling(self, **fields: Any) -> dict[str, Any]:
        return self.plain(sampling_params={"temperature": 0, "max_new_tokens": 6, **fields})

    def control(self, operation: str, **arguments: Any) -> httpx.Response:
        return self.client.post("/dumper/ragserve", json={"op": operation, **arguments})


def sparse(bench: Bench) -> dict[str, Any]:
    return bench.plain(decode={"mode": "hierarchical", "budget": 64, "dense_below": 0})


def offloaded(bench: Bench) -> dict[str, Any]:
    options = {"budget": 32, "reuse": 1, "dense_below": 0, "offloaded": True}
    return generate(bench.client, bench.ids, n_new=16, decode={"mode": "hierarchical", **options})


def segmented(bench: Bench) -> dict[str, Any]:
    """A prompt larger than the pool."""
    options = {"mode": "hierarchical", "budget": 64, "dense_below": 0, "offloaded": True}
    return generate(bench.client, (bench.ids * 100)[:6200], n_new=2, decode=options)


def selecting(bench: Bench) -> dict[str, Any]:
    return bench.ask("samkv", selection="shared")


def unanalysed(bench: Bench) -> dict[str, Any]:
    """With blocks of a size that nobody has asked for before: the analysis is computed. It is one, since
    those of several documents are tried again one by one."""
    ids = [*bench.ids[: bench.spans[1][1]], *bench.ids[bench.spans[-1][1] :]]
    options = {"keep": 0.3, "block_size": 8, "local_blocks": 3}
    return generate(bench.client, ids, plan_of(bench.spans[:2], "samkv", SPACE, **options))


def seeded(bench: Bench) -> dict[str, Any]:
    return bench.sampling(temperature=1, sampling_seed=7)


REQUESTS: dict[str, Ask] = {
    "request": Bench.ask,
    "decode options": sparse,
    "admission": Bench.ask,
    "accounting": Bench.ask,
    "load": Bench.ask,
    "analysis": selecting,
    "stored analysis": selecting,
    "new analysis": unanalysed,
    "query": selecting,
    "selection": selecting,
    "decode plan": sparse,
    "offsets": Bench.ask,
    "composition": Bench.ask,
    "gather": Bench.ask,
    "question": lambda bench: bench.ask(recompute="sentences", share=0.1),
    "recompute": lambda bench: bench.ask("cacheblend", share=0.2),
    "unlock": Bench.ask,
    "positions": Bench.ask,
    "forward": Bench.ask,
    "distribution": lambda bench: bench.sampling(custom_params={DISTRIBUTION_FIELD: True}),
    "seed": seeded,
    "seeded draw": seeded,
    "stop strings": lambda bench: bench.sampling(max_new_tokens=64, ignore_eos=True, stop=["never"]),
    "graph": sparse,
    "grammar": lambda bench: bench.sampling(regex="No[.] [0-9]{4}"),
    "extended": Bench.ask,
    "document": Bench.document,
    "segments": segmented,
    "offload admission": Bench.ask,
    "offloading": offloaded,
    "sparse prefill": lambda bench: bench.sampling(custom_params={PREFILL_FIELD: LINES}),
    "statistics": sparse,
    "report": Bench.ask,
    "release": sparse,
    "save": Bench.document,
}
GOES_ON: dict[str, Ask] = {  # stages whose failure takes nothing from a request
    "queue": Bench.ask,
    "offload plan": Bench.ask,
    "usage": Bench.ask,
    "output": lambda bench: bench.ask(recompute="all"),
    "lines": lambda bench: bench.sampling(custom_params={PREFILL_FIELD: LINES}),
    "ended": Bench.ask,
}
NOT_HERE = {"control"}  # has a test of its own
# SGLang replays decode steps as CUDA graphs; tests/unit/process/test_hooks.py runs the stage.
ONLY_ON_GPU = {"graph"}


def test_every_stage_has_a_request() -> None:
    assert {*REQUESTS, *GOES_ON, *NOT_HERE} == set(STAGES)
    assert not set(REQUESTS) & set(GOES_ON)


@pytest.fixture(scope="module")
def bench(stress_server: Server, builder: PromptBuilder) -> Bench:
    bench = Bench(stress_server.client, builder)
    bench.composed()
    bench.composed("samkv", selection="shared")
    return bench


@pytest.fixture(scope="module")
def right(bench: Bench) -> dict[str, Any]:
    """Answers before anything has failed, by strategy."""
    return {strategy: result(bench.composed(strategy)) for strategy in ("concat", "cacheblend")}


@pytest.fixture(autouse=True)
def reached(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every injected fault must be met by the test that injected it."""
    yield
    if "bench" in request.fixturenames:
        answer = request.getfixturevalue("bench").control("fault")
        assert answer.json()[0]["withdrawn"] == []


def settled(bench: Bench, server: Server) -> None:
    """No slot, lock or pin is left, and all accounts are right."""
    deadline = time.monotonic() + 240
    while True:
        assert server.running.process.poll() is None, server.running.log.read_text()[-4000:]
        figures = bench.control("stat").json()[0]
        slots = bench.control("slots").json()[0]["now"]
        held = figures["device"]["locked_tokens"], figures["host"]["pinned_documents"], slots
        if held == (0, 0, 0):
            break
        assert time.monotonic() < deadline, f"locked tokens, pinned documents, slots: {held}"
        time.sleep(0.05)
    assert bench.control("check").status_code == 200
    assert bench.client.post("/rag/cache/verify", json={}).json()["bad"] == []


def inject(bench: Bench, stage: str, kind: str = "") -> None:
    assert bench.control("fault", stage=stage, kind=kind).status_code == httpx.codes.OK


def error_of(answer: dict[str, Any]) -> str:
    """The message of an answer with status 500, in SGLang's form."""
    assert answer.get("object") == "error", answer
    assert answer["type"] == "500"
    return str(answer["message"])


def assert_right(bench: Bench, right: dict[str, Any]) -> None:
    for strategy, want in right.items():
        assert_same(result(bench.composed(strategy)), want)


@pytest.mark.parametrize(
    "stage", [pytest.param(each, marks=pytest.mark.gpu if each in ONLY_ON_GPU else ()) for each in REQUESTS]
)
def test_a_failing_stage_ends_its_request_with_an_error(
    bench: Bench, right: dict[str, Any], stress_server: Server, stage: str
) -> None:
    inject(bench, stage)
    message = error_of(REQUESTS[stage](bench))
    assert message.startswith("ragserve: stage '")
    assert f"InjectedFault: injected at {stage!r}" in message
    assert_right(bench, right)
    settled(bench, stress_server)


@pytest.mark.parametrize("stage", GOES_ON)
def test_a_stage_that_takes_nothing_from_a_request_costs_it_nothing(
    bench: Bench, right: dict[str, Any], stress_server: Server, stage: str
) -> None:
    want = result(GOES_ON[stage](bench))
    inject(bench, stage)
    assert_same(result(GOES_ON[stage](bench)), want)
    assert_right(bench, right)
    settled(bench, stress_server)


@pytest.mark.parametrize("stage", ["load", "query", "recompute", "forward", "document", "save"])
def test_a_device_without_memory_ends_the_request(
    bench: Bench, right: dict[str, Any], stress_server: Server, stage: str
) -> None:
    inject(bench, stage, "memory")
    assert "out of memory" in error_of(REQUESTS[stage](bench))
    assert_right(bench, right)
    settled(bench, stress_server)


def test_a_failing_control_operation_says_so(bench: Bench, stress_server: Server) -> None:
    inject(bench, "control")
    answer = bench.control("stat")
    assert answer.status_code != httpx.codes.OK or "InjectedFault" in answer.text
    settled(bench, stress_server)


def test_a_request_with_a_plan_that_streams_ends_with_the_error(bench: Bench, stress_server: Server) -> None:
    inject(bench, "gather")
    plan = plan_of(bench.spans, "concat", SPACE)
    body = {
        "input_ids": bench.ids,
        "stream": True,
        "sampling_params": {"max_new_tokens": 4, "custom_params": {PLAN_FIELD: plan.to_json()}},
    }
    text = bench.client.post("/generate", json=body).text
    assert "injected at 'gather'" in text
    settled(bench, stress_server)
