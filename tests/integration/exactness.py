"""Compare exact requests with those that find an empty cache, after a prompt was computed in other ways."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import httpx

from sglang_ext.wire.protocol import (
    DECODE_FIELD,
    PLAN_FIELD,
    PREFILL_FIELD,
    ContextPlan,
    DecodeReport,
    PrefillReport,
    SessionPart,
    Span,
    prefix_key,
    session_key,
)
from tests.integration.context_client import document_plan, generate, missing_of, result
from tests.integration.prompts import some_ids
from tests.integration.reference import Generated

PROMPT, NEW = 375, 24  # tokens; the answer completes a page of 16 and one of 64
LONG = 650  # of a sparse prefill, or it would leave nothing out
HIERARCHICAL: dict[str, Any] = {"mode": "hierarchical", "budget": 64, "reuse": 4, "dense_below": 0}
SPANS = ((0, 40), (40, 170), (170, 300))


@dataclass(frozen=True)
class Way:
    """A way to compute the KV of a prompt and of its answer."""

    decode: dict[str, Any] = field(default_factory=dict)
    prefill: dict[str, Any] = field(default_factory=dict)
    strategy: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    in_session: bool = False

    def exact(self, prompt: int) -> int:
        """How many tokens of a prompt and its answer have exact KV."""
        if self.prefill or self.strategy:
            return 0
        return max(prompt, self.decode["dense_below"]) if self.decode else prompt + NEW


def by_decoding(budget: int) -> dict[str, Way]:
    """Ways that differ in decode steps. The first steps of "late" are dense."""
    hierarchical = HIERARCHICAL | {"budget": budget}
    return {
        "dense": Way(),
        "hierarchical": Way(hierarchical),
        "late": Way(hierarchical | {"dense_below": PROMPT + 2}),
        "progressive": Way({"mode": "progressive", "threshold": 0.3, "dense_below": 0}),
    }


def computed(client: httpx.Client, way: Way, ids: list[int], key: str) -> list[int]:
    """Answer a prompt in this way, under this key where the request has one; return the answer's tokens."""
    custom = {}
    if way.decode:
        custom[DECODE_FIELD] = json.dumps(way.decode)
    if way.prefill:
        custom[PREFILL_FIELD] = json.dumps({"dense_below": 0} | way.prefill)
    fields: dict[str, Any] = {"extra_key": key}
    if way.strategy:
        session = SessionPart(key) if way.in_session and key.startswith("session:") else None
        spans = tuple(Span(*span) for span in SPANS)
        plan = ContextPlan("compose", "exact", way.strategy, spans, way.options, session=session)
        custom[PLAN_FIELD], fields = plan.to_json(), {}
    sampling = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True, "custom_params": custom}
    for _ in range(3):
        answer = generate(client, ids, sampling_params=sampling, **fields)
        if not (missing := missing_of(answer)):
            break
        for i in missing:
            generate(client, ids[slice(*SPANS[i])], document_plan("exact", i), n_new=1)
    assert "error" not in answer, answer
    meta = answer["meta_info"]
    if way.decode:
        assert DecodeReport.from_json(meta[DECODE_FIELD][-1]).sparse_steps > 0
    if way.prefill:
        assert PrefillReport.from_json(meta[PREFILL_FIELD][-1]).share < 1
    return list(answer["output_ids"])


def worst(got: Generated, want: Generated) -> float:
    """Largest difference of a log-probability; that of the first token that differs is the last to count."""
    same = next((i for i, (a, b) in enumerate(zip(got.ids, want.ids, strict=True)) if a != b), len(want.ids))
    return max(abs(a - b) for a, b in zip(got.logprobs[: same + 1], want.logprobs, strict=False))


def check(
    client: httpx.Client, ways: dict[str, Way], tolerance: float, both: bool = True, prompt: int = PROMPT
) -> None:
    """Compute a prompt in all ways, each followed by the turn that has its answer, and compare this turn with
    an empty cache, which is one under another key. ``both``: each way for a prefix and for a session, else
    for one of them: in turn, or the one that it needs."""
    cached = []
    for number, (name, way) in enumerate(ways.items()):
        ids = some_ids(LONG if way.prefill else prompt, 40)
        keys = [prefix_key(f"exact-{number}"), session_key("exact", f"talk-{number}")]
        for key in keys if both else [keys[way.in_session or number % 2]]:
            dialogue = ids + computed(client, way, ids, key) + some_ids(20, number)
            after, again, empty = (asked(client, dialogue, each) for each in (key, key, f"{key}-empty"))
            assert empty["meta_info"]["cached_tokens"] == 0
            assert worst(result(after), result(empty)) < tolerance, (name, key)
            assert worst(result(again), result(empty)) < tolerance, (name, key)
            cached.append(after["meta_info"]["cached_tokens"])
            assert cached[-1] <= way.exact(len(ids)), (name, key)
    assert cached[0] > prompt, "a dense answer is found"
    assert client.post("/rag/cache/verify", json={}).status_code == httpx.codes.OK


def asked(client: httpx.Client, ids: list[int], key: str) -> dict[str, Any]:
    """The answer of an exact request under a key."""
    return generate(client, ids, n_new=4, extra_key=key)
