"""`benchmarks.verify_share`, whole, at a size that proves nothing but that it works."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import verify_share
from ragserve.profiles.figures import Figures
from ragserve.profiles.gate import FILE_NAME, Entry, record
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
        assert [row["load"] for row in report["rows"]] == ["light", "busy"]
        for row in report["rows"]:
            assert (row["pairs"], row["failed"]) == (6, 0)
            assert row["at least"] <= row["delay ms p50"] <= row["at most"]
            assert 0 < row["with: ttft ms p50"] <= row["with: ttft ms p99"]
            assert 0 <= row["compared"] <= 6
        asked = [
            [each.input_ids for each in live.engine.requests if not each.forced] for live in (none, every)
        ]
        assert asked[0] == asked[1], "the same questions in the same order"
        assert none.services.store.namespaces() == [], "nothing is left"


def test_the_interval_of_the_median_delay_holds_what_is_there_and_no_more() -> None:
    steady = verify_share.median_delay([0.25] * 12)
    assert steady == (0.25, 0.25, 0.25)
    shifted, low, high = verify_share.median_delay([1.0 + (number % 5 - 2) / 10 for number in range(60)])
    assert low <= shifted <= high
    assert low > 0.85
    assert high < 1.15
    assert verify_share.median_delay([3.0]) == (3.0, 3.0, 3.0)
