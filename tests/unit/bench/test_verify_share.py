"""`ragserve bench verify-share`, whole, at a size that proves nothing but that it works."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ragserve.bench import verify_share
from ragserve.profiles.gate import FILE_NAME, Entry, Figures, record
from tests.conftest import EXHAUSTIVE
from tests.unit.api.scripted_server import serving

GOOD = Figures(n=500, f1=99.0, f1_vs_full=0.0, kl=0.01, kept=100.0, recomputed=10.0)


@pytest.mark.skipif(not EXHAUSTIVE, reason="two servers, 14 s: in the exhaustive form")
def test_the_same_arrivals_are_asked_of_both_servers(
    tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_share, "QUIET_S", 0.02)  # of the arrivals; the servers keep theirs
    folders = [tmp_path / "none", tmp_path / "all"]
    for folder in folders:
        entry = Entry({"s": GOOD}, "tiny", "d", "h", "float32")
        folder.mkdir()
        record(folder / FILE_NAME, "print", {"epic:first=8": entry})
    with (
        serving(folders[0], model_path) as none,
        serving(folders[1], model_path, verify_share=1.0) as every,
    ):
        urls = (none.url, every.url)
        report = verify_share.run(tmp_path, quick=True, urls=urls, strategies="epic:first=8")
        assert json.loads((tmp_path / "verify-share.json").read_text()) == report
        plain, compared = report["rows"]
        assert (plain["verify_share"], plain["compared"], plain["between arrivals"]) == (0.0, 0, 0)
        assert (compared["verify_share"], compared["compared"] > 0) == (1.0, True)
        for row in (plain, compared):
            assert (row["answers"], row["failed"]) == (6, 0)
            assert 0 < row["ttft ms p50"] <= row["ttft ms p99"]
            assert row["ttft ms p50"] <= row["answer ms p50"]
        asked = [
            [each.input_ids for each in live.engine.requests if not each.forced] for live in (none, every)
        ]
        assert asked[0] == asked[1], "the same questions in the same order"
        assert none.services.store.namespaces() == [], "nothing is left"
