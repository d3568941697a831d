"""The dashboard and the alert rules name metrics that the server has."""

from __future__ import annotations

import re

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ragserve.metrics import metrics
from sglang_ext.attention.metrics import decode_metrics, prefill_metrics
from sglang_ext.context.scheduler.metrics import context_metrics
from sglang_ext.documents.pages.metrics import kv_metrics, remote_metrics
from tests.monitoring import FUNCTIONS, alerts, exposed, panels, words

QUERIES = {**panels(), **alerts()}


@pytest.fixture(scope="module")
def families() -> None:
    """Metrics are made on first use: use those of the engine's processes, too."""
    for make in (metrics, kv_metrics, remote_metrics, context_metrics, decode_metrics, prefill_metrics):
        make()


def test_every_query_names_metrics_of_the_server(families: None, client: httpx.Client) -> None:
    names = exposed(client.get("/metrics").text)
    assert len(QUERIES) > 30
    for title, query in QUERIES.items():
        found = words(query) - FUNCTIONS
        assert found, title
        unknown = {name for name in found - names if not name.startswith("sglang:")}
        assert not unknown, (title, unknown)


def test_every_metric_of_ours_is_on_the_dashboard(families: None, client: httpx.Client) -> None:
    shown = {name for query in panels().values() for name in words(query)}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        if family.name.startswith("ragserve_") and not family.name.endswith("_created"):
            assert shown & exposed(f"# TYPE {family.name} {family.type}\n"), family.name


def test_labels_that_a_query_chooses_by_are_the_metrics_own(families: None, client: httpx.Client) -> None:
    kv_metrics().faults.labels("io").inc(0)
    metrics().requests.labels("/x", "500").inc(0)
    metrics().query_stage.labels("ttft")
    context_metrics().tokens.labels("epic", "kept").inc(0)
    decode_metrics().pages.labels("hierarchical", "read").inc(0)
    metrics().ingested.labels("failed").inc(0)
    text = client.get("/metrics").text
    labels = {
        sample.name: set(sample.labels)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    checked = 0
    for title, query in QUERIES.items():
        for name, chosen in selectors(query):
            if name in labels:
                assert chosen <= labels[name], (title, name)
                checked += 1
    assert checked > 10


def selectors(query: str) -> list[tuple[str, set[str]]]:
    return [
        (name, set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", inside)))
        for name, inside in re.findall(r"([\w:]+)\{([^}]*)\}", query)
    ]


def test_a_wrong_name_is_seen() -> None:
    assert words('sum by (le) (rate(ragserve_tokns_total{kind="a"}[5m]))') - FUNCTIONS == {
        "ragserve_tokns_total"
    }
