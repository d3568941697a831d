"""Composed and plain requests to a server by SGLang's own route, and what came back."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from sglang_ext.protocol import MISSING_PREFIX, PLAN_FIELD, ContextPlan, Span
from sglang_ext.request_options import ConcatExperiment, SamKvExperiment
from tests.integration.reference import Generated

NEW = 10
TOLERANCE = 2e-4  # logprobs in float32; the engine's kernels add up in another order than transformers'


def generate(
    client: Any,
    ids: list[int],
    plan: ContextPlan | None = None,
    n_new: int = NEW,
    timeout: float = 300,
    **fields: Any,
) -> dict[str, Any]:
    """One answer, greedy; with logprobs unless the request is a document's."""
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": n_new, "ignore_eos": True}
    if plan is not None:
        sampling["custom_params"] = {PLAN_FIELD: plan.to_json()}
    body = {
        "input_ids": ids,
        "sampling_params": sampling,
        "return_logprob": plan is None or plan.operation == "compose",
        **fields,
    }
    return dict(client.post("/generate", json=body, timeout=timeout).json())


def plan_of(
    spans: list[tuple[int, int]], strategy: str = "concat", namespace: str = "context", **options: Any
) -> ContextPlan:
    return ContextPlan("compose", namespace, strategy, tuple(Span(a, b) for a, b in spans), nested(options))


def nested(options: dict[str, Any]) -> dict[str, Any]:
    """Options with the experimental ones, which tests write flat, in their place."""
    names = {*ConcatExperiment.model_fields, *SamKvExperiment.model_fields}
    experimental = {name: value for name, value in options.items() if name in names}
    rest = {name: value for name, value in options.items() if name not in names}
    return rest | ({"experimental": experimental} if experimental else {})


def missing_of(answer: dict[str, Any]) -> list[int]:
    """Numbers of the spans that are in no tier, by the answer; none when there is one."""
    message = str(answer.get("error", {}).get("message", ""))
    if not message.startswith(MISSING_PREFIX):
        assert "error" not in answer, answer
        return []
    return [int(i) for i in json.loads(message.removeprefix(MISSING_PREFIX))]


def composed(
    client: Any,
    ids: list[int],
    spans: list[tuple[int, int]],
    strategy: str = "concat",
    namespace: str = "context",
    *,
    tries: int = 3,
    n_new: int = NEW,
    on_document: Callable[[str, list[int]], None] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """As the product does: what is missing is prefilled as documents of their own, and the request sent
    again.

    ``on_document(namespace, ids)`` hears of each. Raises LookupError when the documents do not stay cached.
    """
    plan = plan_of(spans, strategy, namespace, **options)
    for _ in range(tries):
        answer = generate(client, ids, plan, n_new)
        missing = missing_of(answer)
        if not missing:
            return answer
        for i in missing:
            a, b = spans[i]
            generate(client, ids[a:b], ContextPlan("document", namespace), n_new=1)
            if on_document is not None:
                on_document(namespace, ids[a:b])
    raise LookupError("the documents do not stay cached")


def result(answer: dict[str, Any]) -> Generated:
    assert "error" not in answer, answer
    pairs = answer["meta_info"]["output_token_logprobs"]
    return Generated([token for _, token, _ in pairs], [logprob for logprob, _, _ in pairs])


def assert_same(got: Generated, want: Generated, tolerance: float = TOLERANCE) -> None:
    """The same tokens with the same logprobs."""
    assert got.ids == want.ids
    worst = max(abs(a - b) for a, b in zip(got.logprobs, want.logprobs, strict=True))
    assert worst < tolerance
