"""SamKV on the real engine: exact when it keeps everything, loads only what it reports, and handles odd
plans."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from ragserve.answering.prompt import PromptBuilder
from ragserve_kernels.block_summary import BlockPlan, block_summary_naive, default_block_tokens
from sglang_ext.analysis.document_analysis import Analysis
from sglang_ext.analysis.texts import Texts
from sglang_ext.context.selection.samkv import KEEP
from sglang_ext.documents.disk.page_files import DocumentFiles
from sglang_ext.wire.protocol import ContextPlan
from sglang_ext.wire.request_options import MIN_TOKENS
from tests.analyses import local_queries, mean_keys
from tests.conftest import MODEL
from tests.integration.context_client import NEW, assert_same, composed, generate, report, result
from tests.integration.prompts import built, prompt, rows
from tests.integration.reference import Reference

TOLERANCE = 1e-3  # twice as many kernels as a plain prefill stand between the two


def long_prompt(
    builder: PromptBuilder, texts: list[str], question: str = "Who founded it?"
) -> tuple[list[int], list[tuple[int, int]]]:
    return built(builder, question, [(f"Part {i}", text) for i, text in enumerate(texts)])


def test_everything_kept_and_recomputed_equals_full(
    quick_server: Any, builder: PromptBuilder, quick_reference: Reference
) -> None:
    ids, spans = prompt(builder, rows("crossdoc")[2], 4)
    answer = composed(quick_server.client, ids, spans, "samkv", keep=1.0, recompute="all")
    assert_same(result(answer), quick_reference.plain(ids, NEW), TOLERANCE)
    said = report(answer)
    assert said["kept"] == said["recomputed"] == said["document_tokens"]
    assert said["query_ms"] == 0, "nothing is left to choose"


def moved(client: Any) -> int:
    """Bytes of pages read from disk so far."""
    return int(client.get("/rag/cache").json()["moved_bytes"]["from_disk"])


def test_blocks_that_are_not_chosen_are_never_loaded(quick_server: Any, builder: PromptBuilder) -> None:
    """Pages and blocks of these documents hold 16 tokens each: only pages of fixed and chosen blocks are read
    from disk.
    """
    texts = [
        " ".join(f"The {name} of town {i} measured {i * 7 + j} spans in {1900 + j}." for j in range(16))
        for i, name in enumerate("abc")
    ]
    ids, spans = long_prompt(builder, texts)
    quick_server.analysed()  # or it would read pages meanwhile
    client, options = quick_server.client, {"block_size": 16, "recompute": "none", "keep": 0.3}
    first = composed(client, ids, spans, "samkv", "loads", selection="shared", **options)
    page = 2 * 2 * 2 * 64 * 16 * 4  # K and V, 2 heads, 2 layers, 64 values, 16 tokens, float32
    assert client.post("/rag/cache/evict", json={"tiers": ["device", "host"]}).status_code == 200
    before = moved(client)
    again = composed(client, ids, spans, "samkv", "loads", selection="shared", **options)
    said = report(again)
    assert result(again).ids == result(first).ids
    assert set(said["by_tier"]) == {"disk"}
    pages = (moved(client) - before) // page
    system = -(-(spans[0][1] - spans[0][0]) // 16)
    documents = sum(-(-(b - a) // 16) for a, b in spans[1:])
    # Every document adds at most a partial page at its end; one chosen block may be cut to fit the budget.
    assert said["kept"] / 16 <= pages - system <= said["kept"] / 16 + len(spans)
    assert pages - system < 0.4 * documents
    # In every layer its own blocks: more pages, still not all; and from host nothing is read from disk again.
    by_layer = composed(client, ids, spans, "samkv", "loads", selection="layers", **options)
    assert report(by_layer)["kept"] == said["kept"]
    assert (moved(client) - before) // page < system + documents
    before = moved(client)
    composed(client, ids, spans, "samkv", "loads", selection="layers", **options)
    assert moved(client) == before
    # Sentences, of which initial and local blocks are no part: the tokens they have in each page, and no page
    # without one.
    assert client.post("/rag/cache/evict", json={"tiers": ["device", "host"]}).status_code == 200
    before = moved(client)
    by_sentence = composed(client, ids, spans, "samkv", "loads", selection="sentences", **options)
    assert report(by_sentence)["kept"] == said["kept"]
    assert (moved(client) - before) // page < system + 0.75 * documents
    # Analyses are stored with the documents: what is forgotten in memory is read again, not computed.
    assert client.delete("/rag/namespaces/nobody").status_code in (200, 404)
    assert client.post("/rag/cache/evict", json={"tiers": ["device", "host"]}).status_code == 200
    computed = client.get("/rag/cache").json()["analyses"]["computed"]
    assert report(composed(client, ids, spans, "samkv", "loads", keep=0.3))["kept"] == said["kept"]
    assert client.get("/rag/cache").json()["analyses"]["computed"] == computed


def test_a_query_waits_for_no_analysis_that_it_does_not_need(quick_server: Any) -> None:
    """Nothing is ingested: documents come with the queries, first for strategies that need no analysis."""
    client, notes = quick_server.client, []

    def ask(strategy: str, space: str = "unanalysed", **options: Any) -> int:
        """Number of whole analyses that one query computes."""
        quick_server.analysed()
        before = client.get("/rag/cache").json()["analyses"]["whole"]
        body = {"query": "Who built the bridge of Arnholm?", "namespace": space, "strategy": strategy}
        body |= {
            "documents": [
                {"text": f"The bridge of Arnholm, part {i}. It was built by Lena Torv. " * 3}
                for i in range(3)
            ]
        }
        answer = client.post("/rag/query", json=body | {"strategy_options": {"force": True, **options}})
        assert answer.json()["context"]["strategy"] == strategy
        notes[:] = answer.json()["context"]["notes"]
        return int(client.get("/rag/cache").json()["analyses"]["whole"]) - before

    assert [ask("concat"), ask("epic"), ask("cacheblend")] == [0, 0, 0]
    ask("concat", recompute="sentences")  # an idle server may have begun by now
    assert "3 of 3 passages were not fully analysed yet" in " ".join(notes)
    assert ask("concat", "unanalysed-too", recompute="sensitivity") == 3
    assert ask("samkv", "unanalysed-as-well", keep=0.3) == 0


@pytest.mark.parametrize(
    ("n_documents", "options"),
    [
        (4, {"keep": 0.3, "kept_positions": "original"}),
        (1, {"keep": 0.15}),
        (1, {}),  # shorter than what is kept at least
        (8, {}),  # longer
        (2, {"keep": 0.4, "update": "fusion"}),
        (4, {"lexical_weight": 0, "min_tokens": 100}),
        (4, {"lexical_weight": 0.5, "scoring": "attention", "title_weight": 0, "min_tokens": 0}),
        (8, {"lexical_weight": 1, "recompute": "sentences", "share": 0.6, "keep": 0.15, "min_tokens": 300}),
        (1, {"selection": "shared", "keep": 0.5}),
        (3, {"block_size": 64, "selection": "shared"}),  # no longer than initial and local blocks: kept whole
        (8, {"selection": "none"}),
        (8, {"selection": "layers", "scoring": "zscore", "question_query": "mean"}),
        (8, {"recompute": "deviation", "share": 0.3, "selection": "shared"}),
        (8, {"recompute": "sensitivity", "share": 0.2, "keep": 0.5}),
        (8, {"recompute": "sentences", "share": 0.2, "keep": 0.15}),
        (
            8,
            {
                "recompute": "deviation",
                "personalised": False,
                "scoring": "raw",
                "score_positions": "adjacent",
                "selection": "layers",
            },
        ),
    ],
)
def test_every_variant_answers_within_its_budget(
    quick_server: Any, builder: PromptBuilder, n_documents: int, options: dict[str, Any]
) -> None:
    ids, spans = prompt(builder, rows("onehop")[5], n_documents)
    answer = composed(quick_server.client, ids, spans, "samkv", **options)
    assert len(result(answer).ids) == NEW
    said = report(answer)
    tokens, least = said["document_tokens"], options.get("min_tokens", 0 if "keep" in options else MIN_TOKENS)
    if "selection" in options:
        assert (said["kept"] == tokens) == (options.get("block_size") == 64)
    else:
        assert said["kept"] == min(tokens, max(round(options.get("keep", KEEP) * tokens), least))
    whole = said["kept"] == tokens
    assert 0 < said["recomputed"] <= said["kept"]
    assert (said["query_ms"] > 0) == (
        options.get("lexical_weight") != 1 and options.get("selection") != "none" and not whole
    )
    assert result(composed(quick_server.client, ids, spans, "samkv", **options)) == result(answer), (
        "the same request, the same answer"
    )


def test_odd_documents_and_questions(quick_server: Any, builder: PromptBuilder) -> None:
    text = "The mill at Orwen was built in 1820 by Tam Reed and burnt down in 1871. " * 4
    for texts, question in (
        ([text] * 4, "Who built the mill?"),  # one document several times
        (["Yes."] * 3, "Why? " * 60),  # documents shorter than three blocks, and than the question
        (["Short.", text * 3, "Short.", text], "When?"),
        ([f"Note {i}: the key hangs on hook {i * 3}." for i in range(9)], "Which hook?"),
    ):
        ids, spans = long_prompt(builder, texts, question)
        assert len(result(composed(quick_server.client, ids, spans, "samkv", "odd")).ids) == NEW


@pytest.mark.parametrize("strategy", ["concat", "epic", "random", "cacheblend"])
def test_every_strategy_takes_every_rule(quick_server: Any, builder: PromptBuilder, strategy: str) -> None:
    ids, spans = prompt(builder, rows("crossdoc")[6], 3)
    shares = {}
    for rule in ("none", "sensitivity", "sentences", "question", "outliers", "all"):
        answer = composed(quick_server.client, ids, spans, strategy, recompute=rule, share=0.1)
        said = report(answer)
        shares[rule] = said["recomputed"] / said["document_tokens"]
        assert len(result(answer).ids) == NEW
    assert shares["none"] == 0
    assert shares["sensitivity"] == shares["sentences"] == pytest.approx(0.1, abs=0.01)
    assert shares["question"] == pytest.approx(0.1, abs=0.01)
    assert shares["outliers"] < 1 == shares["all"]


def stored(data_dir: Path, namespace: str, ids: list[int]) -> Analysis:
    """Wait for the analysis of a document on disk, found by its token ids."""
    folder = data_dir / "kv" / "rank-0-of-1" / namespace
    files = DocumentFiles(data_dir / "kv", rank=0, world=1)
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        for path in folder.glob("*.pages"):
            record = files.read_record(namespace, path.stem, None)
            if list(record.token_ids) == ids:
                return Analysis.decode(files.read_summary(record), len(ids))
        time.sleep(0.1)
    raise AssertionError("the document is not on disk")


def test_an_analysis_is_what_transformers_computes(
    server: Any, builder: PromptBuilder, reference: Reference
) -> None:
    ids, spans = prompt(builder, rows("crossdoc")[7], 6)
    document = ids[spans[1][0] : spans[-1][1]]  # the five together as one: long enough for its fit
    generate(server.client, document, ContextPlan("document", "analysis"), n_new=1)
    found = stored(server.data_dir, "analysis", document)
    n, block = len(document), found.block
    assert block == default_block_tokens(n)
    queries, (cos, sin) = [], reference.model.model.rotary_emb(torch.zeros(1), torch.arange(n)[None])
    heads = (reference.model.config.num_attention_heads, reference.model.config.head_dim)
    hooks = [
        layer.self_attn.q_proj.register_forward_hook(
            lambda _, __, out: queries.append(out[0].unflatten(-1, heads))
        )
        for layer in reference.model.model.layers
    ]
    alone = reference.document(document)
    for hook in hooks:
        hook.remove()
    plan = BlockPlan.build([n], block_tokens=block)
    for layer, (k, _) in enumerate(alone):
        q = queries[layer - reference.layers]  # after those of the prefix
        a, b = q.chunk(2, -1)
        q = q * cos[0, :, None] + torch.cat((-b, a), -1) * sin[0, :, None]
        want = block_summary_naive(q, k[0].transpose(0, 1), plan, scale=heads[1] ** -0.5)
        half = found.mean_k_scale[layer].float().amax() * 0.51  # of one step of its eight bits
        assert torch.allclose(mean_keys(found)[layer], want.mean_k.float(), atol=float(half))
        assert torch.allclose(
            local_queries(found)[layer],
            want.local_q[0],
            atol=float(found.local_q_scale[layer].amax() * 0.51),
        )
        assert torch.allclose(found.attention[layer], want.attention, rtol=1e-3, atol=1e-6)
        same = (
            found.token[layer] == (want.token - plan.block_start[:-1]).clamp(min=0)
        ) & want.exponent.isfinite()
        assert same.float().mean() > 0.9, "two tokens of a block may nearly tie"
        assert torch.allclose(found.exponent[layer].float()[same], want.exponent[same], atol=5e-3)
    assert found.heads.tolist() == [[11, 0]], (
        "the one of this model that finds passages of the shipped texts again most often"
    )
    whole = found.token_k.float() * found.token_k_scale.float()[..., None]
    assert torch.allclose(
        whole[:, 0],
        alone[11][0][0].transpose(0, 1)[:, 0],
        atol=float(found.token_k_scale.float().amax()) * 0.51,
    )
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    texts = Texts.of(tokenizer, reference.model.config.vocab_size)
    assert torch.equal(found.begins, texts.begins(document))
    assert torch.allclose(
        found.sensitivity, reference.sensitivity(document, texts.unrelated[0]), rtol=1e-3, atol=1e-4
    )
    size = found.nbytes / (n * 15 * 2 * 2 * 64 * 4)
    assert size <= 0.03
