"""The document cache in the real engine: damaged files, a full disk, deletion at a bad moment."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest

from sglang_ext.wire.protocol import PLAN_FIELD, ContextPlan
from tests.integration.context_client import assert_same, composed, generate, missing_of, plan_of, result
from tests.integration.small_engine import DRAW, HOST_PAGES, NEW, PAGE, RECORD, TEXTS, Engine


@pytest.fixture
def fresh(small_engine: Engine) -> Engine:
    small_engine.reset()
    return small_engine


# what happens to files


def damaged(path: Path, how: str, other: Path) -> None:
    content = bytearray(path.read_bytes())
    if how == "truncated":
        path.write_bytes(content[: RECORD + 1000])  # in the middle of its pages
    elif how == "flipped":
        content[RECORD + 1000] ^= 16
        path.write_bytes(content)
    elif how == "foreign":
        shutil.copy(other, path)
    elif how == "deleted":
        path.unlink()
    elif how == "without its folder":
        shutil.rmtree(path.parent)
    else:
        shutil.rmtree(path.parent.parent)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("truncated", "truncated"),
        ("flipped", "crc"),
        ("foreign", "crc"),
        ("deleted", "missing"),
        ("without its folder", "missing"),
        ("without any folder", "missing"),
    ],
)
def test_a_damaged_document_is_a_miss_counted_logged_and_prefilled_again(
    fresh: Engine, how: str, reason: str
) -> None:
    texts = [6, 7]
    ids, spans = fresh.prompt(texts)
    fresh.right("concat", texts, result(composed(fresh.client, ids, spans, namespace="left", n_new=NEW)))
    before = fresh.control("stat")["faults"].get(reason, 0)
    fresh.control("evict", tiers=["device", "host"])
    damaged(fresh.file((0, 7)), how, fresh.file((0, 6)))
    missing = missing_of(generate(fresh.client, ids, plan_of(spans, namespace="left"), n_new=NEW))
    assert missing == ([2] if "folder" not in how else [0, 1, 2])
    fresh.right("concat", texts, result(composed(fresh.client, ids, spans, namespace="left", n_new=NEW)))
    assert fresh.control("stat")["faults"].get(reason, 0) > before
    assert f"document cache, {reason}" in fresh.server.log.read_text()
    fresh.control("evict", tiers=["device", "host"])
    answer = generate(fresh.client, ids, plan_of(spans, namespace="left"), n_new=NEW)
    fresh.right("concat", texts, result(answer))  # and it was written again
    fresh.check()


def test_a_full_disk_is_counted_and_logged_and_answers_stay_right(fresh: Engine) -> None:
    """Simulate a full disk by limiting the size of files that the scheduler may write."""
    scheduler = fresh.scheduler()
    fresh.put((0, 0))
    limits = scheduler.rlimit(psutil.RLIMIT_FSIZE)
    ids = [DRAW.randrange(10, 8000) for _ in range(600)]
    limit = fresh.server.log.stat().st_size + 100_000  # the log must still fit, the document not
    assert -(-len(ids) // 16) * PAGE > limit
    before = fresh.control("stat")["faults"].get("disk_full", 0)
    try:
        scheduler.rlimit(psutil.RLIMIT_FSIZE, (limit, limits[1]))
        generate(fresh.client, ids, ContextPlan("document", "left"), n_new=1)
        fresh.control("flush")
        figures = fresh.check()
        assert figures["faults"]["disk_full"] == before + 1
        assert figures["disk"]["documents"] == 1, "the small one"
        fresh.put((0, 1))
    finally:
        scheduler.rlimit(psutil.RLIMIT_FSIZE, limits)
    assert "document cache, disk_full" in fresh.server.log.read_text()
    texts = [1]
    prompt, spans = fresh.prompt(texts)
    fresh.right(
        "concat", texts, result(generate(fresh.client, prompt, plan_of(spans, namespace="left"), n_new=NEW))
    )
    fresh.control("evict", tiers=["device", "host"])
    assert missing_of(generate(fresh.client, [*ids, 5], plan_of([(0, 600)], namespace="left"))) == [0]


# what is removed


def removed_while_it_decodes(engine: Engine, ids: list[int], sampling: dict[str, Any], **fields: Any) -> None:
    """Send a long request and remove document 6 of the first namespace while it decodes."""
    sampling = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True, **sampling}
    body = {"input_ids": ids, "stream": True, "sampling_params": sampling, **fields}
    with engine.client.stream("POST", "/generate", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        engine.control("remove", keys=[engine.key((0, 6))], namespace="left")
        assert any("[DONE]" in line for line in lines), "it goes on with what it has"
    engine.check()


def test_a_document_removed_while_it_is_computed_is_not_cached(fresh: Engine) -> None:
    removed_while_it_decodes(
        fresh, TEXTS[6], {"custom_params": {PLAN_FIELD: ContextPlan("document", "left").to_json()}}
    )
    figures = fresh.control("stat")
    assert figures["device"]["documents"] == figures["host"]["documents"] == figures["disk"]["documents"] == 0
    ids, spans = fresh.prompt([6])
    assert missing_of(generate(fresh.client, ids, plan_of(spans, namespace="left"))) == [0, 1]


def test_an_exact_prompt_with_a_document_removed_meanwhile_is_not_cached(fresh: Engine) -> None:
    ids, _ = fresh.prompt([6])
    left = {"extra_key": "namespace:left"}
    removed_while_it_decodes(fresh, ids, {}, **left)
    answer = generate(fresh.client, ids, n_new=NEW, **left)
    fresh.right("plain", [6], result(answer))
    assert answer["meta_info"]["cached_tokens"] == 0
    assert generate(fresh.client, ids, n_new=NEW, **left)["meta_info"]["cached_tokens"] > 0, (
        "asked for after the removal, it is"
    )


def test_nothing_is_kept_of_what_strategy_full_computes(fresh: Engine) -> None:
    ids, _ = fresh.prompt([5])
    for _ in range(2):
        answer = generate(fresh.client, ids, n_new=NEW, extra_key="full:same")
        fresh.right("plain", [5], result(answer))
        assert answer["meta_info"]["cached_tokens"] == 0
    fresh.check()


def test_identical_texts_of_two_namespaces_are_two_documents(fresh: Engine) -> None:
    texts = [5, 6]
    ids, spans = fresh.prompt(texts)
    composed(fresh.client, ids, spans, namespace="left")
    assert missing_of(generate(fresh.client, ids, plan_of(spans, namespace="right"))) == [0, 1, 2]
    composed(fresh.client, ids, spans, namespace="right")
    fresh.control("flush")
    fresh.control("remove", keys=[fresh.key((0, 6))], namespace="left")
    assert not fresh.file((0, 6)).exists()
    assert fresh.file((1, 6)).exists()
    assert missing_of(generate(fresh.client, ids, plan_of(spans, namespace="left"))) == [2]
    assert missing_of(generate(fresh.client, ids, plan_of(spans, namespace="right"))) == []
    fresh.control("remove_namespace", namespace="left")
    assert missing_of(generate(fresh.client, ids, plan_of(spans, namespace="left"))) == [0, 1, 2]
    fresh.control("evict", tiers=["device", "host"])
    fresh.right(
        "concat", texts, result(generate(fresh.client, ids, plan_of(spans, namespace="right"), n_new=NEW))
    )


def test_documents_on_the_device_do_not_keep_a_context_out(fresh: Engine) -> None:
    """With 700 slots, three documents of 120 tokens and their context do not fit together; the context alone
    does, loaded from host.
    """
    fresh.control("budget", host_bytes=HOST_PAGES * PAGE)
    ids = [DRAW.randrange(10, 8000) for _ in range(370)]
    spans = [(0, 120), (120, 240), (240, 360)]
    got = composed(fresh.client, ids, spans, namespace="left", n_new=NEW)
    assert_same(result(got), fresh.reference.composed(ids, spans, NEW))
    fresh.check()
