"""The folder of a run: nothing is removed that the run has not made."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragserve.adapt.work_folder import check_work, remove_work
from ragserve.errors import RagserveError


def test_only_what_a_run_makes_is_removed(tmp_path: Path) -> None:
    work = tmp_path / "work"
    made = ["checkpoint-20/adapter.safetensors", "adapter/a", "merged/model.safetensors", "run.json", "lock"]
    made += ["rows.jsonl", "before.json", "latest.json", "best-20.safetensors", "best-40.part"]
    made += ["refused.json", "writing.json", "run.json.12.34.tmp"]
    theirs = ["checkpoint-old/a", "notes.txt", "model/config.json", "best.safetensors"]
    for name in [*made, *theirs]:
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text("")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("")
    (work / "checkpoint-7").symlink_to(elsewhere)
    remove_work(work)
    assert {path.relative_to(work).as_posix() for path in work.rglob("*") if path.is_file()} == {*theirs}
    assert (elsewhere / "kept").exists()


def test_the_folder_goes_with_the_last_file(tmp_path: Path) -> None:
    for name in ("lock", "run.json"):
        (tmp_path / name).write_text("")
    remove_work(tmp_path)
    assert not tmp_path.exists()


@pytest.mark.parametrize("inside", ["out", "model", "data.jsonl"])
@pytest.mark.parametrize("deep", ["", "below"])
def test_a_folder_that_has_out_or_an_input_is_refused(tmp_path: Path, inside: str, deep: str) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "run.json").write_text("{}")
    paths = {name: tmp_path / name for name in ("out", "model", "data.jsonl")}
    paths[inside] = work / deep / inside
    with pytest.raises(RagserveError, match="is in it"):
        check_work(work, paths["out"], paths["model"], paths["data.jsonl"])


def test_other_folders_that_are_refused(tmp_path: Path) -> None:
    out, file = tmp_path / "out", tmp_path / "file"
    file.write_text("")
    with pytest.raises(RagserveError, match="must not exist"):
        check_work(out / "work", out)
    with pytest.raises(RagserveError, match="no folder"):
        check_work(file, out)
    with pytest.raises(RagserveError, match="is in it"):
        check_work(out, out)


def test_a_folder_with_other_things_needs_a_run(tmp_path: Path) -> None:
    work, out = tmp_path / "work", tmp_path / "out"
    check_work(work, out)
    work.mkdir()
    check_work(work, out)
    (work / "lock").write_text("")  # of a run that was killed before it wrote run.json
    check_work(work, out)
    (work / "run.json").write_text("{}")
    (work / "notes.txt").write_text("")
    check_work(work, out)
    (work / "run.json").unlink()
    with pytest.raises(RagserveError, match="not empty, and no run"):
        check_work(work, out)
    assert {path.name for path in work.iterdir()} == {"lock", "notes.txt"}
