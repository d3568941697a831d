"""The gate's records of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ragserve.best_passages import NOT_COMPOSED
from ragserve.profiles.figures import Figures
from ragserve.profiles.gate import Entry


def measured(report: Mapping[str, Any]) -> dict[str, Entry]:
    """Make records from an evaluation's report (`ragserve.eval.summary`), of strategies measured beside
    `full`."""
    workload, environment = report["workload"], report["environment"]
    groups: dict[str, dict[str, Figures]] = {}
    names = Figures.__dataclass_fields__
    for row in report["rows"]:
        if row["strategy"].partition(":")[0] not in NOT_COMPOSED and row["f1_vs_full"] is not None:
            figures = Figures(**{name: row[name] for name in names if name in row})
            groups.setdefault(row["strategy"], {})[row["set"]] = figures
    where = (
        workload["model"],
        environment["date"],
        environment["gpu"] or environment["cpu"],
        workload["dtype"],
        environment["versions"],
        workload.get("samkv profile", ""),
        workload.get("prefix", ""),
        workload.get("sparse attention", ""),
    )
    return {label: Entry(sets, *where) for label, sets in groups.items()}
