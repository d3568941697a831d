"""The figures of the campaigns: benchmarks/results/reliability.json, and the table of its reliability.md."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.lib.places import RESULTS as FOLDER
from benchmarks.lib.tables import rewritten
from ragserve.files import write_json
from ragserve.verification.report import environment
from tests.campaigns.progress import Progress

RESULTS = FOLDER / "reliability.json"
PAGE = FOLDER / "reliability.md"
_SHOWN_VIOLATIONS = 5


def row_of(progress: Progress, command: str) -> dict[str, Any]:
    """A campaign's entry."""
    ran = environment()
    return {
        "campaign": f"{progress.name}, {ran['gpu']}" if ran["gpu"] else progress.name,
        "operations": progress.operations,
        "of": progress.target,
        "minutes": round(progress.seconds / 60, 1),
        "violations": progress.n_violations,
        "command": command,
        "seed": progress.seed,
        "kinds": dict(sorted(progress.counts.items())),
        "figures": progress.data.get("figures", {}),
        "first violations": progress.violations[:_SHOWN_VIOLATIONS],
        "machine": f"{ran['cpu']}, {ran['cores']} cores, GPU: {ran['gpu'] or 'none'}",
        "versions": ran["versions"],
        "date": ran["date"],
    }


def joined(rows: list[dict[str, Any]], command: str) -> dict[str, Any]:
    """The sum of entries of one campaign that ran at the same time."""
    kinds: Counter[str] = Counter()
    for row in rows:
        kinds.update(row["kinds"])
    targets = [row["of"] for row in rows]
    return rows[0] | {
        "operations": sum(row["operations"] for row in rows),
        "of": None if None in targets else sum(targets),
        "minutes": max(row["minutes"] for row in rows),
        "violations": sum(row["violations"] for row in rows),
        "command": command,
        "kinds": dict(sorted(kinds.items())),
        "figures": {str(row["seed"]): row["figures"] for row in rows if row["figures"]},
        "first violations": [text for row in rows for text in row["first violations"]][:_SHOWN_VIOLATIONS],
    }


def record(row: dict[str, Any], results: Path = RESULTS, page: Path = PAGE) -> None:
    """Put a campaign's entry in place of its earlier one, and regenerate the table."""
    try:
        earlier = json.loads(results.read_text(encoding="utf-8"))["rows"]
    except FileNotFoundError:
        earlier = []
    rows = [each for each in earlier if each["campaign"] != row["campaign"]] + [row]
    report = {
        "benchmark": "reliability",
        "workload": {"command": "scripts/campaign NAME"},
        "environment": environment(),
        "rows": sorted(rows, key=lambda each: str(each["campaign"])),
        "note": "Machine and versions of each campaign are in the JSON.",
    }
    write_json(results, report)
    text = page.read_text(encoding="utf-8")
    page.write_text(rewritten(text, results.parent), encoding="utf-8")
