"""Presets of `ragserve eval`: what they fix, and what a run of them reports. No engine is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from ragserve.commands import evaluate
from ragserve.errors import InvalidRequest
from ragserve.eval.parallel import Plan
from ragserve.eval.presets import BENCHMARKS, RIVALS, expanded
from ragserve.strategy_spec import parse

SERVED = {
    "engine": {"device": "cpu", "attention_backend": "torch"},
    "environment": {"cpu": "c", "cores": 1, "gpu": None, "versions": {}},
}


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plans that were run; every strategy answers every question in the same way."""
    seen: list[Plan] = []

    def run(plan: Plan, *_: object) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        seen.append(plan)
        figures = {"em": 1.0, "f1": 1.0, "kl": None, "agrees": None, "fallback": None, "error": None}
        tokens = {"document_tokens": 8, "kept": 8, "recomputed": 8, "prompt_tokens": 9}
        row = figures | tokens | {"ttft_ms": 1.0, "documents_dropped": 0, "contains": True, "refused": False}
        return [{"set": "s", "id": "1", "strategy": spec.label, **row} for spec in plan.strategies], SERVED

    monkeypatch.setattr("ragserve.eval.parallel.run", run)
    return seen


def invoked(folder: Path, *arguments: str) -> dict[str, Any]:
    data, out = folder / "s.jsonl", folder / "report.json"
    row = {"question": "q", "answers": ["a"], "docs": [["t", "a"]]}
    data.write_text(json.dumps(row) + "\n")
    app = typer.Typer()
    evaluate.register(app)
    app.command("other")(lambda: None)  # a Typer app with one command takes no command name
    done = CliRunner().invoke(app, ["eval", "--data", str(data), "--json", str(out), *arguments])
    if done.exception is not None:
        raise done.exception
    return dict(json.loads(out.read_text()))


def test_a_benchmark_fixes_what_figures_depend_on(tmp_path: Path, plans: list[Plan]) -> None:
    report = invoked(tmp_path, "--benchmark", "short-answers", "--half", "second", "--tier", "host")
    [plan] = plans
    fixed = BENCHMARKS["short-answers"]
    assert plan.settings.system_prompt == fixed.system_prompt == report["workload"]["system text"]
    assert (plan.max_new_tokens, plan.half, plan.tier, plan.compare) == (24, "second", "host", False)
    assert [spec.label for spec in plan.strategies] == [spec.label for spec in parse(RIVALS)]
    assert report["workload"]["benchmark"] == "short-answers"
    assert [line["strategy"] for line in report["pooled"]] == [line["strategy"] for line in report["rows"]]


def test_what_a_benchmark_fixes_cannot_be_changed(tmp_path: Path, plans: list[Plan]) -> None:
    benchmark = ("--benchmark", "short-answers")
    with pytest.raises(InvalidRequest, match="--max-new-tokens"):
        invoked(tmp_path, *benchmark, "--max-new-tokens", "5")
    with pytest.raises(InvalidRequest, match="--system-prompt"):
        invoked(tmp_path, *benchmark, "--system-prompt", "Be brief.")
    with pytest.raises(InvalidRequest, match="No benchmark 'long-answers'"):
        invoked(tmp_path, "--benchmark", "long-answers")
    invoked(tmp_path, *benchmark, "--strategies", "full,concat")
    assert [spec.label for spec in plans[0].strategies] == ["full", "concat"]


def test_the_best_passages_need_a_ranking(tmp_path: Path, plans: list[Plan]) -> None:
    with pytest.raises(InvalidRequest, match="choice of passages needs the search's order"):
        invoked(tmp_path, "--strategies", "passages", "--url", "http://localhost:1")
    with pytest.raises(InvalidRequest, match="choice of passages needs the search's order"):
        invoked(tmp_path, "--strategies", "concat:passages.keep=0.5", "--mode", "multiturn")
    assert not plans


def test_without_a_benchmark_the_settings_system_text_is_asked_with(
    tmp_path: Path, plans: list[Plan]
) -> None:
    invoked(tmp_path, "--system-prompt", "Be brief.")
    [plan] = plans
    assert (plan.settings.system_prompt, plan.compare) == ("Be brief.", True)
    assert [spec.label for spec in plan.strategies] == ["full", "prefix"]


def test_rivals_stand_for_published_rules() -> None:
    labels = [spec.label for spec in parse(expanded("rivals, samkv:keep=0.3"))]
    assert labels[-1] == "samkv:keep=0.3"
    assert {"passages:keep=0.15", "passages:keep=0.25"} < set(labels)
    assert {"full", "concat", "cacheblend:share=0.15", "epic:first=16", "random:share=0.15"} < set(labels)
    assert {f"concat:recompute={rule},share=0.15" for rule in ("question", "anchors")} < set(labels)


@pytest.mark.parametrize(
    "arguments",
    [(), ("--url", "http://localhost:1"), ("--mode", "retrieved"), ("--mode", "multiturn"), ("-n", "papers")],
    ids=["given", "REST", "retrieved", "multiturn", "own documents"],
)
def test_two_sets_of_one_name_are_refused_in_every_mode(
    tmp_path: Path, plans: list[Plan], arguments: tuple[str, ...]
) -> None:
    with pytest.raises(InvalidRequest, match="Two sets have the same name, 's'"):
        invoked(tmp_path, "--data", f"{tmp_path}/more/s.test.jsonl", *arguments)
    assert not plans


@pytest.mark.parametrize(
    ("arguments", "unused"),
    [
        (("--work", "work", "--url", "http://localhost:1"), "--work"),
        (("--work", "work", "--mode", "retrieved"), "--work"),
        (("--work", "work", "--mode", "multiturn"), "--work"),
        (("--tier", "host", "--workers", "2", "--mode", "multiturn"), "--workers and --tier"),
        (("--tier", "host", "-n", "papers"), "--tier"),
        (("--turns", "3", "--asked-at", "middle", "--ahead", "2"), "--turns and --asked-at and --ahead"),
        (("--decode-budget", "512", "--session-budget", "99"), "--decode-budget and --session-budget"),
        (("--refresh-turns", "2"), "--refresh-turns"),
        (("--refresh-turns", "2", "--mode", "multiturn", "--url", "http://localhost:1"), "--refresh-turns"),
        (("--concurrency", "2", "--mode", "multiturn"), "--concurrency"),
        (("--k", "3"), "--k"),
        (("--mode", "retrieved", "-n", "papers"), "--mode"),
    ],
)
def test_options_that_a_run_would_ignore_are_refused(
    tmp_path: Path, plans: list[Plan], arguments: tuple[str, ...], unused: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"^{unused} would change nothing"):
        invoked(tmp_path, *arguments)
    assert not plans
