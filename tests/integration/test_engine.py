"""The real SGLang engine behind the product: what strategies promise, SGLang's routes, failures to start."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from ragserve.answering.prompt import PromptBuilder
from tests.conftest import EXHAUSTIVE, MODEL
from tests.integration.forked_starts import fork_parent, forked_server
from tests.integration.prompts import built, rows


def body(row: dict[str, Any], **fields: Any) -> dict[str, Any]:
    documents = [{"title": title, "text": text} for title, text in row["docs"]]
    return {"query": row["question"], "documents": documents, "max_new_tokens": 24, **fields}


def ask(client: Any, row: dict[str, Any], **fields: Any) -> dict[str, Any]:
    response = client.post("/rag/query", json=body(row, **fields))
    assert response.status_code == 200, response.text
    return dict(response.json())


@pytest.mark.parametrize("ids", [[999_999_999, 5], [5, -1], [2**63, 5], [5] * 500 + [1_000_000]])
def test_a_token_id_that_the_model_does_not_have_ends_its_request_only(server: Any, ids: list[int]) -> None:
    answer = server.client.post(
        "/generate", json={"input_ids": ids, "sampling_params": {"max_new_tokens": 2}}
    )
    assert answer.status_code == 400, answer.text
    good = server.client.post(
        "/generate", json={"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2}}
    )
    assert good.status_code == 200, good.text


@pytest.mark.parametrize("name", ["onehop", "crossdoc"])
def test_answers_come_from_the_model_and_are_right(server: Any, name: str) -> None:
    right, asked = 0, rows(name)[: 8 if EXHAUSTIVE else 2]
    for row in asked:
        answer = ask(server.client, row)
        assert answer["usage"]["prompt"] > 500, "the documents must be in the prompt"
        right += answer["answer"].strip() in row["answers"]
    assert right >= len(asked) - 1, "the model's README says 100 and 98 % of 200"


def test_full_recomputes_and_equals_prefix_token_for_token(server: Any) -> None:
    for i, row in enumerate(rows("onehop")[: 3 if EXHAUSTIVE else 1]):
        namespace = f"strategies-{i}"
        cold = ask(server.client, row, namespace=namespace, strategy="prefix")
        warm = ask(server.client, row, namespace=namespace, strategy="prefix")
        full = ask(server.client, row, namespace=namespace, strategy="full")
        again = ask(server.client, row, namespace=namespace, strategy="full")
        assert {a["answer"] for a in (cold, warm, full, again)} == {cold["answer"]}
        assert cold["usage"]["cached"] == full["usage"]["cached"] == again["usage"]["cached"] == 0
        assert warm["usage"]["cached"] > 0.9 * warm["usage"]["prompt"]
        assert warm["context"]["tokens_recomputed"] == 0 < full["context"]["tokens_recomputed"]
        assert full["context"]["tokens_recomputed"] == full["context"]["tokens_kept"]


def test_namespaces_share_no_cached_tokens(quick_server: Any) -> None:
    row = rows("crossdoc")[0]
    ask(quick_server.client, row, namespace="tenant-a")
    assert ask(quick_server.client, row, namespace="tenant-b")["usage"]["cached"] == 0
    assert ask(quick_server.client, row, namespace="tenant-a")["usage"]["cached"] > 0


def test_product_equals_plain_sglang_on_the_same_ids(quick_server: Any, builder: PromptBuilder) -> None:
    row = rows("onehop")[5]
    ids, _ = built(builder, row["question"], row["docs"])
    plain = quick_server.client.post(
        "/generate", json={"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 24}}
    ).json()
    ours = ask(quick_server.client, row)
    assert plain["text"].strip() == ours["answer"].strip()
    assert plain["meta_info"]["prompt_tokens"] == ours["usage"]["prompt"]
    assert plain["meta_info"]["completion_tokens"] == ours["usage"]["completion"]


def test_sglang_routes_stay_reachable(server: Any) -> None:
    client = server.client
    assert client.get("/model_info").json()["architectures"] == ["LlamaForCausalLM"]
    assert client.get("/server_info").json()["version"] == version("sglang")
    assert client.get("/health").status_code == 200
    text = client.post(
        "/v1/completions",
        json={"model": str(MODEL), "prompt": "<|bos|>The", "max_tokens": 4, "temperature": 0},
    ).json()
    assert text["choices"][0]["text"]
    tokens = client.post("/v1/tokenize", json={"model": str(MODEL), "prompt": "a b"}).json()
    assert tokens["count"] > 0
    metrics = client.get("/metrics").text
    assert "sglang:prompt_tokens_total" in metrics
    assert "ragserve_queries" in metrics


def test_the_engine_reports_its_timings(quick_server: Any) -> None:
    timings = ask(quick_server.client, rows("onehop")[6], strategy="full")["timings"]
    assert timings["queue_ms"] > 0, "SGLang measures the queue on every request"
    assert 0 < timings["prefill_ms"] <= timings["ttft_ms"] <= timings["total_ms"]


def test_in_front_of_a_remote_engine(server: Any, tmp_path: Path) -> None:
    row = rows("crossdoc")[1]
    with (
        forked_server(data_dir=tmp_path / "data", engine_url=server.url, api_key="sesame") as front,
        front.client() as client,
    ):
        assert client.get("/info").json()["engine"]["kind"] == "remote"
        assert ask(client, row)["answer"] == ask(server.client, row)["answer"]
        assert client.post(
            "/generate", json={"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 2}}
        ).json()["output_ids"]
        assert client.get("/model_info").json()["model_path"] == str(MODEL)
        with client.stream(
            "POST", "/generate", json={"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 3}}
        ) as stream:
            assert "[DONE]" in "".join(stream.iter_text())
        assert "ragserve_" in client.get("/metrics").text
        client.headers.pop("Authorization")
        assert client.get("/model_info").status_code == 401


def served(folder: Path, *arguments: str) -> tuple[int, str]:
    """The exit status of `ragserve serve`, and what it says."""
    said = folder / "said.txt"
    with said.open("wb") as output:
        command = fork_parent().start(
            "ragserve.cli", ["serve", *arguments, "--data-dir", str(folder)], {}, output
        )
        return command.wait(240), said.read_text()


def test_unreachable_engine_is_a_clear_failure(tmp_path: Path) -> None:
    status, said = served(tmp_path, "--engine-url", "http://127.0.0.1:9", "--port", "0")
    assert status != 0
    assert "--engine-url" in said


def test_sparse_decoding_must_be_switched_on(server: Any) -> None:
    question = {"query": "Who?", "documents": [{"text": "Nobody knows."}], "max_new_tokens": 4}
    refused = server.client.post("/rag/query", json=question | {"decode": {"mode": "dense"}})
    assert refused.status_code == 400
    assert "--sparse-attention on" in refused.json()["error"]["message"]


def test_the_log_says_when_the_server_was_ready(server: Any) -> None:
    log = server.running.log.read_text()
    assert re.search(
        rf"ragserve: ready on {server.url} \(engine started in \d+\.\d s, \d+\.\d s of them warming up\); "
        rf"playground: {server.url}/playground, API: {server.url}/docs\n",
        log,
    )


def test_taken_port_is_refused_before_anything_starts(server: Any, tmp_path: Path) -> None:
    status, said = served(tmp_path, "--port", server.url.rsplit(":", 1)[1])
    assert status == 1
    assert "--port" in said
