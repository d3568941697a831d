"""A KV pool of 8 bits on the real engine: prefill, dense and sparse decode steps compared with transformers
on quantised KV. And what needs a server with an API key or a short context."""

from __future__ import annotations

from typing import Any

import pytest

from ragserve.client import Client
from ragserve.errors import Forbidden
from ragserve.tenants.key_file import KeyFile
from sglang_ext.wire.protocol import DECODE_FIELD, DecodeOptions, DecodeReport, prefix_key
from tests.conftest import EXHAUSTIVE
from tests.integration.context_client import generate, plan_of, result
from tests.integration.exactness import asked, by_decoding, check, worst
from tests.integration.prompts import some_ids
from tests.integration.reference import Generated, Reference
from tests.integration.sparse_reference import SparseReference

PAGE, LOGICAL, CHUNK = 64, 16, 256  # as in the fixture
NEW = 6
# Quantising changes log-probabilities by about 0.01 here. Rounding noise that moves a number to the next code
# changes them by 0.002.
TOLERANCE = 4e-3
# Rounding moves numbers to their next codes, in one layer after the other. In transformers, too, noise of
# 1e-8 in the embeddings then changes log-probabilities by up to 5e-2, depending on the prompt: by 4e-3 with
# those below. KV of hierarchical steps changes them by 8e-2 and more.
QUANTISED = 1.5e-2


@pytest.fixture(scope="module")
def reference(locked_server: Any) -> SparseReference:
    return SparseReference(locked_server.model, PAGE, LOGICAL, bits=8)


@pytest.fixture(scope="module")
def plain(locked_server: Any) -> Reference:
    return Reference(locked_server.model)


def ask(client: Any, ids: list[int], **decode: Any) -> dict[str, Any]:
    return generate(client, ids, n_new=NEW, decode=decode)


def distance(got: Generated, want: Generated) -> float:
    """Largest difference of a log-probability before the first token that differs; 1 if that is among the
    first three."""
    same = next((i for i, (a, b) in enumerate(zip(got.ids, want.ids, strict=True)) if a != b), len(want.ids))
    return (
        1.0 if same < 3 else max(abs(a - b) for a, b in zip(got.logprobs[:same], want.logprobs, strict=False))
    )


@pytest.mark.parametrize(
    ("decode", "tokens", "seed"),
    [
        ({}, 650, 7),
        ({"mode": "hierarchical", "budget": 192, "reuse": 2}, 650, 17),
        ({"mode": "progressive", "threshold": 0.4}, 1300, 27),  # more than the 16 pages of a first round
    ],
    ids=["dense", "hierarchical", "progressive"],
)
def test_answers_are_those_of_quantised_kv(
    locked_server: Any,
    plain: Reference,
    reference: SparseReference,
    decode: dict[str, Any],
    tokens: int,
    seed: int,
) -> None:
    """Prompts are prefilled in chunks; later chunks read the quantised KV of earlier ones."""
    reference.starts = list(range(0, tokens, CHUNK))
    ids = some_ids(tokens, seed)
    answer = ask(locked_server.client, ids, **decode)
    assert answer["meta_info"]["cached_tokens"] == 0
    reference.decode = DecodeOptions(**{"mode": "dense"} | decode, dense_below=0)
    assert distance(result(answer), reference.plain(ids, NEW)) < TOLERANCE
    if decode:
        said = DecodeReport.from_json(answer["meta_info"][DECODE_FIELD][-1])
        assert said.sparse_steps == said.steps == NEW - 1
        assert said.share < 1
        reference.decode = DecodeOptions(mode="dense")
        other = reference.plain(ids, NEW)
    else:
        other = plain.plain(ids, NEW)
    assert distance(result(answer), other) > TOLERANCE, (
        "the test must tell sparse from dense, and quantised KV from plain"
    )


def test_a_cached_prefix_is_read_as_it_was_stored(locked_server: Any, reference: SparseReference) -> None:
    shared, first, second = some_ids(200, 116), some_ids(90, 117), some_ids(120, 118)
    ask(locked_server.client, shared + first)
    answer = ask(locked_server.client, shared + second)
    cached = answer["meta_info"]["cached_tokens"]
    assert cached == len(shared) // PAGE * PAGE
    reference.decode, reference.starts = DecodeOptions(mode="dense"), [0, cached]
    # Rounding in earlier layers moves further numbers in later ones, which changes this prompt's by 7e-3;
    # a chunk that read itself unquantised would change them by 2e-2.
    assert distance(result(answer), reference.plain(shared + second, NEW)) < 3 * TOLERANCE
    verified = locked_server.client.post("/rag/cache/verify", json={})
    assert verified.status_code == 200, verified.text


def test_the_pool_takes_less_than_plain_kv(locked_server: Any, plain: Reference) -> None:
    taken = locked_server.client.get("/rag/cache").json()["device"]["budget_bytes"]
    tokens = locked_server.client.get("/server_info").json()["max_total_num_tokens"]
    config = plain.model.config
    values = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * tokens
    assert taken < 0.55 * 4 * values, (
        "a byte instead of four, two halves of scale for 64 of them, and one layer of four as it is"
    )


def test_a_prompt_may_fill_the_context_to_its_end(locked_server: Any) -> None:
    limit = locked_server.client.get("/info").json()["limits"]["max_context_tokens"]
    documents = [{"title": str(i), "text": "The quick brown fox. " * 25} for i in range(64)]
    body = {"query": "What is quick?", "documents": documents, "documents_overflow": "drop"}
    answer = locked_server.client.post("/rag/query", json={**body, "max_new_tokens": 16}).json()
    assert answer["finish_reason"] in ("stop", "length"), answer
    assert limit - 300 < answer["usage"]["prompt"] <= limit - 16
    assert 0 < answer["context"]["documents_kept"] < 64
    assert "did not fit" in answer["context"]["notes"][0]


def test_composed_contexts_are_refused(locked_server: Any) -> None:
    ids = some_ids(60, 31)
    for plan in (plan_of([(0, 20), (20, 50)]), plan_of([(0, 20)], "epic", first=4)):
        refused = generate(locked_server.client, ids, plan)
        assert "--kv-bits 16" in refused["error"]["message"]
    question = {"query": "Who?", "documents": [{"text": "Nobody knows."}], "max_new_tokens": 4}
    refused = locked_server.client.post("/rag/query", json=question | {"strategy": "concat"})
    assert refused.status_code == 400
    assert "'prefix' or 'full'" in refused.json()["error"]["message"]
    assert locked_server.client.post("/rag/query", json=question | {"strategy": "full"}).status_code == 200


def test_keys_share_no_cached_prompts(locked_server: Any) -> None:
    """They are made while the server runs. A key shares the cache of a namespace that it may read."""
    keys = KeyFile(locked_server.data_dir)
    one, two = (keys.create(name, [name], ["read"])[1] for name in ("tenant-one", "tenant-two"))
    prompt = "The lighthouse keeper counts the ships that pass at night. " * 20

    def cached(key: str, extra_key: str | None = None) -> int:
        with Client(locked_server.url, api_key=key) as client:
            body = {"text": prompt, "extra_key": extra_key, "sampling_params": {"max_new_tokens": 1}}
            return int(client.call("POST", "/generate", json=body)["meta_info"]["cached_tokens"])

    assert cached(one) == 0
    assert cached(one) > 0
    assert cached(two) == 0
    assert cached("secret") == 0
    assert cached(one, "namespace:tenant-one") == 0
    assert cached(two, "namespace:tenant-one") == 0
    assert cached(one, "namespace:tenant-one") > 0
    with Client(locked_server.url, api_key=one) as client, pytest.raises(Forbidden, match="'admin'"):
        client.call("GET", "/server_info")


def test_a_pool_of_8_bits_hosts_no_requests_and_says_so(locked_server: Any) -> None:
    answer = ask(locked_server.client, some_ids(80, 3), mode="hierarchical", offloaded=True)
    assert "needs a KV pool of 16 bits, and this server's has 8" in answer["error"]["message"]


def test_an_exact_request_finds_nothing_approximate(locked_server: Any) -> None:
    check(locked_server.client, by_decoding(192), QUANTISED, both=EXHAUSTIVE)


def test_a_pool_of_8_bits_answers_alike_wherever_a_prompt_is_cut(locked_server: Any) -> None:
    """What is cached is read as it is stored, and so is what a prompt's own chunk writes."""
    ids, client = some_ids(400, 61), locked_server.client
    whole = result(asked(client, ids, prefix_key("whole")))
    for cut in (64, 130, 320):
        asked(client, ids[:cut], prefix_key(f"cut-{cut}"))
        answer = asked(client, ids, prefix_key(f"cut-{cut}"))
        assert answer["meta_info"]["cached_tokens"] == cut // 64 * 64
        assert worst(result(answer), whole) < QUANTISED
