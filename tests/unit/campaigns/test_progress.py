"""The state of a campaign and its entry in the results."""

from __future__ import annotations

import json
from pathlib import Path

from tests.campaigns import record
from tests.campaigns.progress import Progress


def test_a_killed_campaign_goes_on_and_a_finished_one_begins_anew(tmp_path: Path) -> None:
    def begun(seed: int = 1) -> Progress:
        return Progress(tmp_path, "short", seed=seed, target=10)

    first = begun()
    drawn = []
    for _ in range(4):
        drawn.append(first.random().random())
        with first.operation("some"):
            assert first.operations != 2, "the third"
    first.save()
    second = begun()
    assert second.resumed
    assert (second.operations, second.n_violations, dict(second.counts)) == (4, 1, {"some": 4})
    assert second.violations[0].startswith("operation 2, some: AssertionError: the third")
    assert second.random().random() not in drawn
    assert not begun(seed=2).resumed
    second.save(finished=True)
    assert not begun().resumed


def test_an_entry_takes_the_place_of_the_campaigns_earlier_one_and_is_in_the_table(tmp_path: Path) -> None:
    results, page = tmp_path / "reliability.json", tmp_path / "page.md"
    page.write_text("<!-- table: reliability campaign,operations,violations -->\n<!-- /table -->\n")
    for name, done in (("kill", 3), ("damage", 5), ("kill", 4)):
        progress = Progress(tmp_path / "work", name, seed=done, target=10)
        with progress.operation("some", done):
            pass
        record.record(record.row_of(progress, f"scripts/campaign {name}"), results, page)
    rows = json.loads(results.read_text())["rows"]
    assert [(row["campaign"], row["operations"], row["of"]) for row in rows] == [
        ("damage", 5, 10),
        ("kill", 4, 10),
    ]
    assert all(row["machine"] and row["versions"] and row["date"] for row in rows)
    assert "| damage | 5 | 0 |\n| kill | 4 | 0 |\n" in page.read_text()


def test_entries_of_a_campaign_that_ran_side_by_side_are_added_up(tmp_path: Path) -> None:
    rows = []
    for seed, violations in ((4, 0), (5, 2)):
        progress = Progress(tmp_path / str(seed), "kill", seed=seed, target=10)
        for kind, n in (("main", 2), (f"only {seed}", seed)):
            with progress.operation(kind, n):
                pass
        for number in range(violations):
            progress.violation(f"violation {number}")
        rows.append(record.row_of(progress, "scripts/campaign kill"))
    row = record.joined(rows, "scripts/campaign kill --side-by-side 2")
    assert (row["operations"], row["of"], row["violations"]) == (13, 20, 2)
    assert row["kinds"] == {"main": 4, "only 4": 4, "only 5": 5}
    assert row["first violations"] == rows[1]["first violations"]
    assert row["command"] == "scripts/campaign kill --side-by-side 2"
