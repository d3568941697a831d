"""Composed and plain requests to a server by SGLang's own route, and comparisons of their answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from sglang_ext.wire.protocol import DECODE_FIELD, MISSING_PREFIX, PLAN_FIELD, ContextPlan, Span
from sglang_ext.wire.request_options import ConcatExperiment, SamKvExperiment
from tests.integration.reference import Generated

NEW = 10
TOLERANCE = 2e-4  # of float32 log-probabilities: the engine and transformers sum in different orders


def generate(
    client: Any,
    ids: list[int],
    plan: ContextPlan | None = None,
    n_new: int = NEW,
    timeout: float = 300,
    decode: dict[str, Any] | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """Send one greedy request, with logprobs unless it computes a document. ``decode``: decode options."""
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": n_new, "ignore_eos": True}
    custom = {DECODE_FIELD: json.dumps(decode)} if decode else {}
    if plan is not None:
        custom[PLAN_FIELD] = plan.to_json()
    if custom:
        sampling["custom_params"] = custom
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
    """Indexes of the spans that the answer reports as missing from all tiers; none for a normal answer."""
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
    """Send a composed request as the product does: prefill missing documents, then send it again.

    ``on_document(namespace, ids)`` is called for each of them. Raises LookupError when the documents do not
    stay cached.
    """
    plan = plan_of(spans, strategy, namespace, **options)
    for _ in range(tries):
        answer = generate(client, ids, plan, n_new)
        missing = missing_of(answer)
        if not missing:
            return answer
        for i in missing:
            a, b = spans[i]
            generate(client, ids[a:b], document_plan(namespace, i), n_new=1)
            if on_document is not None:
                on_document(namespace, ids[a:b])
    raise LookupError("the documents do not stay cached")


def document_plan(namespace: str, number: int) -> ContextPlan:
    """The plan that computes a prompt's span: of the first, the system text."""
    return ContextPlan("document", namespace, options={"first": True} if number == 0 else {})


def report(answer: dict[str, Any]) -> dict[str, Any]:
    """The context report of a composed request's answer."""
    assert "error" not in answer, answer
    return dict(json.loads(answer["meta_info"][PLAN_FIELD][0]))


def result(answer: dict[str, Any]) -> Generated:
    assert "error" not in answer, answer
    pairs = answer["meta_info"]["output_token_logprobs"]
    return Generated([token for _, token, _ in pairs], [logprob for logprob, _, _ in pairs])


def assert_same(got: Generated, want: Generated, tolerance: float = TOLERANCE) -> None:
    """Assert the same tokens with the same log-probabilities."""
    assert got.ids == want.ids
    worst = max(abs(a - b) for a, b in zip(got.logprobs, want.logprobs, strict=True))
    assert worst < tolerance


def metrics(client: Any) -> dict[str, float]:
    """Samples of /metrics by name, or by name and the value of our label, summed over their other labels."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, float] = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            label = next(
                (sample.labels[name] for name in ("tier", "strategy", "stage") if name in sample.labels), ""
            )
            if sample.labels.get("kind", "kept") == "kept":
                key = f"{sample.name} {label}".strip()
                found[key] = found.get(key, 0.0) + sample.value
    return found
