"""The README's tables are made from files; here from ones made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.lib import tables as readme
from ragserve.errors import InvalidRequest
from ragserve.verification import report


def test_a_section_shows_the_chosen_columns_of_a_report(tmp_path: Path) -> None:
    rows = [
        {"system": "a|b", "qps": 12.5, "n": 1000, "more": 1},
        {"system": "rival", "qps": 1234.5, "n": None, "more": 2},
    ]
    report.write("speed", {"clients": 4}, rows, out=tmp_path / "speed.json", note="Twice.")
    text = "before\n<!-- table: speed system, qps, n -->\nold\n<!-- /table -->\nafter\n"
    made = readme.rewritten(text, tmp_path)
    lines = made.splitlines()
    assert lines[0] == "before"
    assert lines[2:6] == [
        "| system | qps | n |",
        "|---|---|---|",
        "| a\\|b | 12.5 | 1,000 |",
        "| rival | 1,234 |  |",
    ]
    assert "clients: 4" in lines[7]
    assert "Twice." in lines[7]
    assert lines[-1] == "after"
    assert readme.rewritten(made, tmp_path) == made


def test_all_columns_without_a_choice_and_a_line_where_nothing_was_measured(tmp_path: Path) -> None:
    report.write("speed", {}, [{"a": 1, "b": True}], out=tmp_path / "speed.json")
    text = "<!-- table: speed -->\n<!-- /table -->\n<!-- table: other -->\n<!-- /table -->\n"
    made = readme.rewritten(text, tmp_path)
    assert "| a | b |" in made
    assert "| 1 | yes |" in made
    assert "Not measured yet: no `other.json`" in made


WIDE = [{"strategy": "concat:recompute=0.15", "ttft ms": 12.5} | {f"stage {i} ms": i for i in range(30)}]


def test_a_file_has_every_column_of_a_wide_table(capsys: pytest.CaptureFixture[str]) -> None:
    report.write("speed", {}, WIDE, out=None, narrow=("strategy", "ttft ms"))
    printed = capsys.readouterr().out
    assert all(name in printed for name in WIDE[0])
    assert "concat:recompute=0.15" in printed


def test_a_narrow_terminal_shows_the_columns_that_matter(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    report.write("speed", {}, WIDE, out=None, narrow=("strategy", "ttft ms"))
    printed = capsys.readouterr().out
    assert "concat:recompute=0.15" in printed
    assert "ttft ms" in printed
    assert "stage 3" not in printed
    assert "2 of 32 columns" in printed
    monkeypatch.setenv("COLUMNS", "900")
    report.write("speed", {}, WIDE, out=None, narrow=("strategy", "ttft ms"))
    assert "stage 29 ms" in capsys.readouterr().out


def test_bad_reports_and_columns(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(InvalidRequest, match="not a benchmark's report"):
        readme.result_table(tmp_path / "broken.json")
    report.write("speed", {}, [{"a": 1}], out=tmp_path / "speed.json")
    with pytest.raises(InvalidRequest, match="no column 'b'"):
        readme.result_table(tmp_path / "speed.json", ["b"])


def test_check_says_so_and_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "README.md"
    path.write_text("<!-- table: settings -->\n<!-- /table -->\n")
    assert readme.main([str(path), "--check"]) == 1
    assert "readme-tables" in capsys.readouterr().err
    assert path.read_text() == "<!-- table: settings -->\n<!-- /table -->\n"
    assert readme.main([str(path)]) == 0
    assert readme.main([str(path), "--check"]) == 0
    assert "`top_k` | `5`" in path.read_text()


def test_a_settings_section_may_name_its_settings(tmp_path: Path) -> None:
    made = readme.rewritten("<!-- table: settings top_k, port -->\n<!-- /table -->\n", tmp_path)
    assert [line.split("|")[1].strip() for line in made.splitlines()[3:5]] == ["`top_k`", "`port`"]
    with pytest.raises(InvalidRequest, match="no setting 'top'"):
        readme.settings_table(["top"])
