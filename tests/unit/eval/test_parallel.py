"""Workers that die, with a worker that needs no engine: what is kept, what is started again, what is said."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ragserve.config import Settings
from ragserve.errors import EngineError, InvalidRequest
from ragserve.eval import parallel
from ragserve.eval.parallel import Plan, known, run
from ragserve.strategy_spec import parse

WORKER = """
import json, os, sys
job = json.load(open(sys.argv[1]))
folder = job["folder"]
json.dump({"engine": {}, "environment": {}}, open(f"{folder}/engine-{job['index']}.json", "w"))
place = f"{folder}/rows-{job['index']}.jsonl"
done = len(open(place).readlines()) if os.path.exists(place) else 0
rows = [line for line in open(job["sets"][0])][job["index"] :: job["of"]]
for number, line in enumerate(rows[done:], done):
    print("worker", job["index"], "asks", number)
    with open(place, "a") as out:
        row = {"set": "s", "id": json.loads(line)["id"], "strategy": "full", "error": None}
        out.write(json.dumps(row) + "\\n")
    if number == DIES_AFTER and job["index"] == 1:
        sys.exit("the GPU fell off the bus")
"""


def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_after: str) -> Plan:
    data = tmp_path / "s.jsonl"
    data.write_text(
        "".join(
            json.dumps({"id": str(i), "question": "q", "answers": ["a"], "docs": [["t", "a"]]}) + "\n"
            for i in range(6)
        )
    )
    script = tmp_path / "worker.py"
    script.write_text(WORKER.replace("DIES_AFTER", dies_after))
    original = parallel.subprocess.Popen

    def popen(command: list[str], **options: Any) -> Any:
        return original([sys.executable, str(script), command[-1]], **options)

    monkeypatch.setattr(parallel.subprocess, "Popen", popen)
    return Plan([data], parse("full"), Settings(), workers=2)


def test_an_engine_that_ends_is_started_once_more_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    rows, _ = run(plan(tmp_path, monkeypatch, "1"), tmp_path / "work", lambda *place: seen.append(place))
    assert [row["id"] for row in rows] == list("012345")
    assert seen[-1] == (6, 6)
    assert (tmp_path / "work" / "worker-1.log").read_text().count("asks 1") == 1, "nothing is asked twice"


def test_one_that_ends_again_is_named_and_what_is_known_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying = plan(tmp_path, monkeypatch, "number")  # after each question
    with pytest.raises(EngineError, match="fell off the bus"):
        run(dying, tmp_path / "work")
    rows, _ = known(dying, tmp_path / "work")
    assert [row["id"] for row in rows if int(row["id"]) % 2] == ["1", "3"]
    rows, _ = run(plan(tmp_path, monkeypatch, "-1"), tmp_path / "work")
    assert len(rows) == 6


def test_nothing_known_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError, match="No question has been answered"):
        known(plan(tmp_path, monkeypatch, "-1"), tmp_path)


def test_engines_have_what_auto_stands_for_with_the_data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = Settings(sparse_attention="on", decode_budget=512)
    asked: list[Settings] = []

    def resolve(settings: Settings) -> tuple[Settings, str]:
        asked.append(settings)
        return resolved, ""

    monkeypatch.setattr(parallel, "resolve_sparse_attention", resolve)
    given = replace(plan(tmp_path, monkeypatch, "99"), settings=Settings(sparse_attention="auto"))
    run(given, tmp_path / "work")
    assert {each.data_dir for each in asked} == {given.settings.data_dir}
    job = json.loads((tmp_path / "work" / "job-0.json").read_text())
    assert (job["settings"]["sparse_attention"], job["settings"]["decode_budget"]) == ("on", 512)


def test_engines_keep_documents_in_no_store_that_others_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = Settings(kv_storage="shared", kv_storage_args={"folder": str(tmp_path), "bytes": 1})
    run(replace(plan(tmp_path, monkeypatch, "99"), settings=shared), tmp_path / "work")
    job = json.loads((tmp_path / "work" / "job-0.json").read_text())
    assert not Settings(**job["settings"]).shared_store


def test_two_sets_of_one_name_are_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = plan(tmp_path, monkeypatch, "99")
    other = tmp_path / "s.more.jsonl"
    other.write_text(one.sets[0].read_text())
    for asked in (run, known):
        with pytest.raises(InvalidRequest, match="'s'"):
            asked(replace(one, sets=[*one.sets, other]), tmp_path / "work")
    assert not (tmp_path / "work").exists(), "nothing is asked"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("context_length", 4096),
        ("kv_prefix", "none"),
        ("kv_page_bits", 8),
        ("kv_block_tokens", 16),
        ("query_prompt", "query: "),
        ("sparse_attention", "on"),
        ("decode_budget", 512),
        ("prefill_alpha", 0.9),
    ],
)
def test_rows_under_other_settings_are_another_run_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    one, work = plan(tmp_path, monkeypatch, "99"), tmp_path / "work"
    run(one, work)
    with pytest.raises(InvalidRequest, match=f"{name} differ"):
        run(replace(one, settings=Settings(**{name: value})), work)
    rows, _ = run(replace(one, settings=Settings(kv_host_bytes=0, log_level="error")), work)
    assert len(rows) == 6, "the sizes of caches change no answer"


def test_a_prefix_is_known_by_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "prefix.txt"
    text.write_text("Once upon a time.")
    given = replace(plan(tmp_path, monkeypatch, "99"), settings=Settings(kv_prefix=str(text)))
    run(given, tmp_path / "work")
    text.write_text("It was a dark and stormy night.")
    with pytest.raises(InvalidRequest, match="kv_prefix differ"):
        run(given, tmp_path / "work")
