"""Documents behind a prefix on the real engine: where prompts begin with the prefix, composing is exact."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from sglang_ext.analysis.texts import prefix_of
from sglang_ext.stages.stages import FAULTS_VARIABLE
from sglang_ext.wire.protocol import PLAN_FIELD, ContextPlan
from tests.conftest import MODEL
from tests.integration import engines
from tests.integration.context_client import assert_same, composed, document_plan, generate, plan_of, result
from tests.integration.prompts import some_ids

TEXT = "The ferry leaves Oban at nine. It calls at Craignure, and goes on to Coll and Tiree in summer. " * 6
CHUNK = 64
SPACE = "prefix"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("prefix")
    (folder / "prefix.txt").write_text(TEXT)
    flags: dict[str, Any] = {"model": engines.random_model(folder), "kv_prefix": folder / "prefix.txt"}
    flags |= {"control_routes": True, "engine_args": json.dumps({"chunked_prefill_size": CHUNK})}
    flags["env"] = {"DUMPER_SERVER_PORT": "reuse", FAULTS_VARIABLE: "1"}
    with engines.started(folder / "data", **flags) as server:
        yield server.client


@pytest.fixture(scope="module")
def prefix() -> list[int]:
    from transformers import AutoTokenizer

    return prefix_of(AutoTokenizer.from_pretrained(MODEL), TEXT)


@pytest.mark.parametrize("analyse", [True, False], ids=["analysed", "not analysed"])
@pytest.mark.parametrize("tokens", [50, 3 * CHUNK + 7], ids=["short", "in chunks"])
def test_a_document_behind_the_prompts_own_beginning_is_exact(
    client: httpx.Client, prefix: list[int], tokens: int, analyse: bool
) -> None:
    document, question = some_ids(tokens, tokens + analyse), some_ids(9, 3)
    ids, n = [*prefix, *document, *question], len(prefix)
    spans = [(0, n), (n, n + tokens)]
    generate(client, document, ContextPlan("document", SPACE, options={"analyse": analyse}), n_new=1)
    exact = generate(client, ids, extra_key=f"{tokens}{analyse}")
    assert_same(result(composed(client, ids, spans, namespace=SPACE, recompute="none")), result(exact))


def sent_together(client: httpx.Client, texts: list[list[int]], plans: list[ContextPlan | None]) -> Any:
    """Send requests as one message, so that the scheduler gets them in one step; the answer."""
    sampling: list[dict[str, Any]] = [
        {"max_new_tokens": 1} | ({} if plan is None else {"custom_params": {PLAN_FIELD: plan.to_json()}})
        for plan in plans
    ]
    return client.post("/generate", json={"input_ids": texts, "sampling_params": sampling})


def assert_exact(client: httpx.Client, prefix: list[int], documents: list[list[int]], name: str) -> None:
    """Each document alone, composed behind the prefix from what is cached, answers as a prefill does."""
    generate(client, prefix, document_plan(SPACE, 0), n_new=1)
    question, n = some_ids(9, 3), len(prefix)
    for number, document in enumerate(documents):
        ids = [*prefix, *document, *question]
        spans = [(0, n), (n, n + len(document))]
        answer = generate(client, ids, plan_of(spans, namespace=SPACE, recompute="none"))
        assert_same(result(answer), result(generate(client, ids, extra_key=f"{name}{number}")))


def test_documents_computed_beside_a_question_are_behind_the_prefix(
    client: httpx.Client, prefix: list[int]
) -> None:
    """One message with both: the scheduler keeps them in steps of their own."""
    document = some_ids(40, 31)
    answer = sent_together(client, [document, some_ids(12, 32)], [ContextPlan("document", SPACE), None])
    assert answer.status_code == httpx.codes.OK
    assert_exact(client, prefix, [document], "beside")


@pytest.mark.parametrize("analyse", [True, False], ids=["analysed", "not analysed"])
def test_several_documents_in_few_passes_are_exact(
    client: httpx.Client, prefix: list[int], analyse: bool
) -> None:
    """Sizes that fill a step, do not fit beside others, or have one token."""
    sizes = (17, 1, 33, CHUNK, 2 * CHUNK + 5, 7, 40)
    documents = [some_ids(n, 500 + n + 1000 * analyse) for n in sizes]
    plan = ContextPlan("document", SPACE, options={"analyse": analyse})
    answer = sent_together(client, documents, [plan] * len(documents))
    assert answer.status_code == httpx.codes.OK
    assert_exact(client, prefix, documents, f"several{analyse}")


def test_a_pass_that_fails_is_repeated_one_by_one(client: httpx.Client, prefix: list[int]) -> None:
    documents = [some_ids(n, 700 + n) for n in (20, 31)]
    plans: list[ContextPlan | None] = [ContextPlan("document", SPACE)] * 2
    fault = {"op": "fault", "stage": "document", "kind": ""}
    assert client.post("/dumper/ragserve", json=fault).status_code == httpx.codes.OK
    assert sent_together(client, documents, plans).status_code == httpx.codes.OK
    assert_exact(client, prefix, documents, "repeated")


def test_documents_that_are_cancelled_leave_nothing_wrong(client: httpx.Client, prefix: list[int]) -> None:
    documents = [some_ids(n, 800 + n) for n in (5 * CHUNK, 29, 6 * CHUNK)]
    plans: list[ContextPlan | None] = [ContextPlan("document", SPACE)] * 3
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(sent_together, client, documents, plans)
        client.post("/abort_request", json={"rid": "", "abort_all": True})
        sent.result()
    assert sent_together(client, documents, plans).status_code == httpx.codes.OK
    assert_exact(client, prefix, documents, "cancelled")
