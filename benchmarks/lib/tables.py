"""The tables of README files and documents, generated from the settings and the benchmarks' JSON.

A section stands between ``<!-- table: NAME COLUMNS -->`` and ``<!-- /table -->``. NAME ``settings`` is
generated from `ragserve.config.Settings`, for the settings named as columns. Any other NAME is a file
``NAME.json`` of benchmarks/results, as `ragserve.verification.report.write` leaves it. Without COLUMNS,
separated by commas, a table has all."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib import curves
from benchmarks.lib.places import REPO, RESULTS
from ragserve.config import Settings
from ragserve.errors import InvalidRequest
from ragserve.files import write_text

_SECTION = re.compile(
    r"(<!-- table: (?P<name>[\w-]+)(?: (?P<columns>[^>]*?))? -->\n).*?(<!-- /table -->)", re.DOTALL
)


def rewritten(text: str, results: Path) -> str:
    """Regenerate every marked section of ``text``. Raises InvalidRequest for a file that is no report, or an
    unknown column or setting."""

    def section(found: re.Match[str]) -> str:
        columns = [column.strip() for column in (found["columns"] or "").split(",") if column.strip()]
        source = results / f"{found['name']}.json"
        body = settings_table(columns) if found["name"] == "settings" else result_table(source, columns)
        return f"{found[1]}{body}{found[4]}"

    return _SECTION.sub(section, text)


def settings_table(names: Sequence[str] = ()) -> str:
    """A row per setting: name, default, description. Raises InvalidRequest for an unknown name."""
    fields = Settings.model_fields
    if unknown := [name for name in names if name not in fields]:
        raise InvalidRequest(f"There is no setting {unknown[0]!r}.", hint=f"There are: {', '.join(fields)}.")
    rows = []
    for name in names or fields:
        default = fields[name].get_default(call_default_factory=True)
        shown = "" if default is None or default == {} else f"`{_default(name, default)}`"
        rows.append([f"`{name}`", shown, fields[name].description or ""])
    return _table(["setting", "default", "what it is"], rows)


def result_table(path: Path, columns: Sequence[str] = ()) -> str:
    """The rows of a benchmark, with its workload, machine and note below; a line that says so if it was not
    run yet."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        rows, environment = report["rows"], report["environment"]
    except FileNotFoundError:
        return f"Not measured yet: no `{path.name}` in `benchmarks/results`.\n"
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"{path} is not a benchmark's report: {error!r}.") from error
    known = list(dict.fromkeys(key for row in rows for key in row))
    if missing := [column for column in columns if column not in known]:
        raise InvalidRequest(
            f"{path.name} has no column {missing[0]!r}.", hint=f"It has: {', '.join(known)}."
        )
    chosen = list(columns) or known
    table = _table(chosen, [[_cell(row.get(column)) for column in chosen] for row in rows])
    workload = ", ".join(f"{key}: {value}" for key, value in report["workload"].items())
    machine = (
        f"{environment['cpu']}, {environment['cores']} cores, "
        f"GPU: {environment['gpu'] or 'none'}, {environment['date']}"
    )
    note = f" {report['note']}" if report.get("note") else ""
    return f"{table}\n{workload}. {machine}.{note}\n"


def _default(name: str, default: Any) -> str:
    if name == "model":
        return str(Path(default).relative_to(REPO))  # bundled with the project, wherever that is
    return str(default)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += [
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in rows
    ]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "" if value is None else ("yes" if value else "no")
    if isinstance(value, float):
        return f"{value:,.3f}".rstrip("0").rstrip(".") if abs(value) < 100 else f"{value:,.0f}"
    if isinstance(value, int):
        return f"{value:,}"
    return json.dumps(value) if isinstance(value, (dict, list)) else str(value)


def main(arguments: Sequence[str]) -> int:
    """``FILE ... [--check]``: rewrite the files' tables and the evaluation's picture; with ``--check`` only
    return 1 if one is out of date."""
    results = RESULTS
    paths = [Path(argument) for argument in arguments if argument != "--check"]
    wanted = {path: rewritten(path.read_text(encoding="utf-8"), results) for path in paths}
    if (svg := curves.picture(results)) is not None:
        wanted[results / curves.PICTURE] = svg
    stale = [
        place
        for place, text in wanted.items()
        if not place.exists() or place.read_text(encoding="utf-8") != text
    ]
    if stale and "--check" in arguments:
        print(f"{', '.join(map(str, stale))} out of date: run scripts/readme-tables", file=sys.stderr)
        return 1
    for place in stale:
        write_text(place, wanted[place])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
