"""The map of `ragserve tune`, and what `ragserve calibrate` refuses before anything is started."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from ragserve.commands import calibrate, evaluate, serve_checks, tune
from ragserve.config import Settings
from ragserve.engine.document_prefix import prefix_text
from ragserve.engine.server_args import sparse_defaults
from ragserve.errors import InvalidRequest
from ragserve.eval import tune_map
from ragserve.eval.tune_map import map_of, page
from ragserve.profiles.prefill_crossover import options_of
from ragserve.profiles.retriever_name import UsualSearch
from ragserve.verification.calibration import tune_process
from ragserve_index import IndexStore
from tests.conftest import MODEL
from tests.unit.no_room import no_room
from tests.unit.verification.idle_engine import fill


def test_costs_of_strategies_that_choose_passages_are_not_measured_on_one_prompt(tmp_path: Path) -> None:
    app = typer.Typer()
    calibrate.register(app)
    app.command("other")(lambda: None)  # a Typer app with one command takes no command name
    arguments = ["calibrate", "--strategies", "concat:passages.keep=0.25", "--data-dir", str(tmp_path)]
    with pytest.raises(
        InvalidRequest, match=r"Strategy concat:passages\.keep=0\.25 reads the best passages alone"
    ):
        CliRunner().invoke(app, arguments, catch_exceptions=False, standalone_mode=False)


RESULT: dict[str, Any] = {
    "namespace": "notes",
    "model": "tiny",
    "retriever": "words, dense, k 20",
    "margin": 5.0,
    "full": {"score": (55.0, 53.0, 57.0), "ttft_ms": 640.0, "probes": 350},
    "verdicts": [
        {
            "label": label,
            "decision": decision,
            "line": line,
            "score": (score, score - 2, score + 2),
            "ttft_ms": ms,
            "figures": {"kept": 25.0, "recomputed": 5.0, "score_vs_full": score - 55, "margin": 3.0},
        }
        for label, decision, line, score, ms in (
            ("concat:passages.count=5,share=0.2", "verified", "verified by 350 questions", 61.0, 60.0),
            ("passages:count=5", "verified", "verified by 350 questions", 60.0, 170.0),
            ("passages:keep=0.5", "passed over", "passed over: <later>", 60.0, 300.0),
            ("passages:count=1", "refused", "refused because it loses", 40.0, 50.0),
        )
    ],
}


def test_the_map_has_the_front_the_chosen_point_and_why() -> None:
    found = map_of(RESULT)
    assert found["chosen"] == "concat:passages.count=5,share=0.2"
    front = [each["strategy"] for each in found["points"] if each["front"]]
    assert front == ["passages:count=1", "concat:passages.count=5,share=0.2"]
    taken = "the best 5 passages from stored KV (concat, 20% recomputed): 61 ± 2 at 60 ms"
    beside = "the best 1 passages, exact: 40 ± 2 at 50 ms; all passages, exact: 55 ± 2 at 640 ms"
    verified = f"The best that auto may take is {taken}, verified by 350 questions."
    assert found["why"] == f"{verified} Beside it, {beside}."
    drawn = page(found)
    assert drawn.count("<circle") == 5
    assert "&lt;later&gt;" in drawn
    assert "<script" not in drawn
    assert json.loads(json.dumps(found)) == found
    hybrid = map_of(RESULT | {"retriever": "words, hybrid, k 20"}, found["points"])
    assert len(hybrid["points"]) == 10, "beside those of the other search"
    assert len(map_of(RESULT, hybrid["points"])["points"]) == 10, (
        "which are replaced when it is measured anew"
    )
    assert "words, dense, k 20" in page(hybrid)
    nothing = map_of(RESULT | {"verdicts": []})
    assert nothing["chosen"] is None
    assert "auto stays with prefix" in nothing["why"]


def test_a_map_without_room_names_its_file_and_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with IndexStore(tmp_path) as store:
        fill(store, "notes", 1)
    shown = tmp_path / "tune" / "tune-notes.html"
    shown.parent.mkdir()
    shown.write_text("the one before")
    more = {"questions": {}, "tried": 0, "costs": "", "decode": None, "failures": {}, "kept": []}
    more |= {"finished": False, "settled": False}
    monkeypatch.setattr(tune_process, "tune", lambda *_, **__: RESULT | more)
    monkeypatch.setattr(serve_checks, "check_engine", lambda _: None)
    monkeypatch.setattr(tune_map, "page", lambda _: "x" * 2**21)
    app = typer.Typer()
    tune.register(app)
    with no_room(2**20):
        ran = CliRunner().invoke(app, ["--namespace", "notes", "--data-dir", str(tmp_path)])
    assert re.search(f"'{re.escape(str(shown))}'", str(ran.exception)), ran.output
    [row] = [line for line in ran.output.splitlines() if "│ concat:passages.count=5,share=0.2 " in line]
    assert "verified" in row, "in a file each strategy has one line"
    assert shown.read_text() == "the one before"


class Read:
    """Settings that note which of them are read."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self.names = settings, set[str]()

    def __getattr__(self, name: str) -> Any:
        self.names.add(name)
        return getattr(self._settings, name)


def test_a_run_can_be_like_any_server(tmp_path: Path) -> None:
    """What verdicts depend on are flags: the search, the text before documents, and sparse attention."""
    names, searched = set[str](), set[str]()
    for mode in ("progressive", "hierarchical"):
        for prefill, below in (("vertical_slash", 512), ("block_sparse", None)):
            options = {"decode_mode": mode, "prefill_mode": prefill, "prefill_dense_below": below}
            settings = Settings(data_dir=tmp_path, model=str(MODEL), sparse_attention="on", **options)  # type: ignore[arg-type]
            given: Any = Read(settings)
            UsualSearch.of(given)
            searched |= given.names
            prefix_text(given)
            sparse_defaults(given)
            options_of(given)
            names |= given.names
    names -= {"follow_ups", "not_found"}  # of dialogues, and of what is done with what is found
    assert names > {"neighbours", "kv_prefix", "prefill_mode"}
    assert names <= set(tune.SETTINGS)
    assert "kv_prefix" in calibrate.SETTINGS
    own = inspect.signature(evaluate.evaluate).parameters
    assert names - searched <= {*evaluate.SETTINGS, *own}, "eval --write-gate searches for nothing"


@pytest.mark.parametrize(
    ("flags", "searched"),
    [
        ([], (20, "hybrid", 0.3)),
        (["--min-score", "0.1", "--neighbours", "1"], (20, "hybrid", 0.1)),
        (["--top-k", "40"], (40, "hybrid", 0.3)),
        (["--retrieval", "dense"], (20, "dense", 0.3)),
    ],
)
def test_tune_searches_by_the_namespaces_own_settings_but_for_its_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], searched: tuple[Any, ...]
) -> None:
    with IndexStore(tmp_path) as store:
        store.ensure_namespace("notes", embedder="words", dim=4)
        store.set_settings("notes", {"k": 20, "retrieval": "hybrid", "min_score": 0.3})
    seen: list[Any] = []

    def run(settings: Settings, namespace: str, labels: list[str], **_: Any) -> None:
        seen.append(((settings.top_k, settings.retrieval, settings.min_score), labels))
        raise InvalidRequest("It ends here.")

    monkeypatch.setattr(tune_process, "tune", run)
    monkeypatch.setattr(serve_checks, "check_engine", lambda settings: None)
    app = typer.Typer()
    tune.register(app)
    app.command("other")(lambda: None)
    arguments = ["tune", "-n", "notes", "--data-dir", str(tmp_path), "--model", str(MODEL), *flags]
    with pytest.raises(InvalidRequest, match="It ends here"):
        CliRunner().invoke(app, arguments, catch_exceptions=False, standalone_mode=False)
    ((asked, labels),) = seen
    assert asked == searched
    assert "passages:by=score,count=10" in labels, "fewer of the passages that are found"
