"""Documents behind a prefix on the real engine: where prompts begin with the prefix, composing is exact."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from sglang_ext.analysis.texts import prefix_of
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
    flags = {"kv_prefix": folder / "prefix.txt", "control_routes": True}
    flags["engine_args"] = json.dumps({"chunked_prefill_size": CHUNK})
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


def test_documents_computed_beside_a_question_are_behind_the_prefix(
    client: httpx.Client, prefix: list[int]
) -> None:
    """One request with both, so that they share a batch, which SGLang computes as well."""
    document, question = some_ids(40, 31), some_ids(9, 3)
    ids, n = [*prefix, *document, *question], len(prefix)
    plan = ContextPlan("document", SPACE).to_json()
    body = {
        "input_ids": [document, some_ids(12, 32)],
        "sampling_params": [
            {"max_new_tokens": 1, "custom_params": {PLAN_FIELD: plan}},
            {"max_new_tokens": 1},
        ],
    }
    assert client.post("/generate", json=body).status_code == 200
    generate(client, prefix, document_plan(SPACE, 0), n_new=1)
    answer = generate(client, ids, plan_of([(0, n), (n, n + 40)], namespace=SPACE, recompute="none"))
    assert_same(result(answer), result(generate(client, ids, extra_key="beside")))
