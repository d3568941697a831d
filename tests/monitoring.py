"""The queries of examples/monitoring, and the names in them."""

from __future__ import annotations

import json
import re

import yaml

from tests.conftest import REPO

FOLDER = REPO / "examples" / "monitoring"
FUNCTIONS = {"and", "histogram_quantile", "increase", "max", "min", "rate", "sum"}
_SUFFIXES = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
    "summary": ("", "_sum", "_count"),
}


def panels() -> dict[str, str]:
    """The dashboard's queries by panel and letter."""
    dashboard = json.loads((FOLDER / "grafana.json").read_text(encoding="utf-8"))
    return {
        f"{panel['id']} {panel['title']} {target['refId']}": target["expr"]
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    }


def alerts() -> dict[str, str]:
    """The rules' expressions by alert."""
    rules = yaml.safe_load((FOLDER / "alerts.yml").read_text(encoding="utf-8"))
    return {rule["alert"]: rule["expr"] for group in rules["groups"] for rule in group["rules"]}


def words(query: str) -> set[str]:
    """The metrics and functions of a PromQL query: no labels, ranges, numbers and strings."""
    without = re.sub(
        r'"[^"]*"|\{[^}]*\}|\[[^\]]*\]|\b(by|without)\s*\([^)]*\)', " ", query.replace('\\"', "")
    )
    return set(re.findall(r"[a-zA-Z_:][\w:]*", without))


def exposed(text: str) -> set[str]:
    """The names of the samples that the families in a text of /metrics may have."""
    kinds = re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE)
    return {
        f"{name.removesuffix('_total') if kind == 'counter' else name}{suffix}"
        for name, kind in kinds
        for suffix in _SUFFIXES[kind]
    }
