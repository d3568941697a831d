"""The table of stages is complete, and a stage that fails ends its requests and nothing else."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext import versions
from sglang_ext.documents.radix import TreeObserver
from sglang_ext.process import hooks
from sglang_ext.stages import stages
from sglang_ext.stages.stages import FAULTS_VARIABLE, STAGES, InjectedFault
from sglang_ext.state import current
from tests.unit.process.test_exact_only import engine, heads_pool, started

SOURCE = Path(stages.__file__).parents[1]
OUTSIDE_HOOKS = {"release", "lines", "save", "ended"}  # called by the tree: see `TreeObserver`
AT_START = {  # where an error must end the process
    "around_capture",
    "after_backend",
    "after_cell_size",
    "after_rows",
    "around_compiler",
    "around_pool",
    "around_tokens",
}
COUNTS = {"around_next_chunk"}  # tokens of a step, in plain numbers
REFUSES = {"around_weights"}  # holds nothing and serves no request
READS = {"around_pull", "around_output", "around_tail"}  # hands on a list, an output, a number
# called by SGLang's forward pass, a stage
WITHIN_FORWARD = {function.__name__ for _, _, function, _ in versions.OWN_HOOKS}


def calls(name: str) -> list[str]:
    """First arguments of every ``stages.NAME("...")`` in the source."""
    found = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == f"stages.{name}":
                assert isinstance(node.args[0], ast.Constant), f"{path}: name the stage where it runs"
                found.append(str(node.args[0].value))
    return found


def test_every_stage_of_the_table_runs_and_every_stage_that_runs_is_in_it() -> None:
    assert {*calls("run"), *calls("run_alike"), *calls("reach")} == set(STAGES)


def test_every_hook_names_its_stages() -> None:
    named = [stage for hook in hooks.HOOKS for stage in hook.stages]
    assert len(named) == len(set(named))
    assert set(named) == set(STAGES) - OUTSIDE_HOOKS
    assert {hook.function.__name__ for hook in hooks.HOOKS if not hook.stages} == (
        AT_START | COUNTS | REFUSES | READS | WITHIN_FORWARD
    )


def test_what_the_tree_calls_is_a_stage() -> None:
    told = {name for name, _ in inspect.getmembers(TreeObserver, inspect.isfunction) if name[0] != "_"}
    assert told - {"is_composed", "in_session", "exact_tokens"} == {
        *("before_release", "on_document", "on_finished", "on_cached", "on_evicted", "before_eviction")
    }
    text = (SOURCE / "process" / "runtime.py").read_text()
    assert all(f'stages.run("{name}"' in text for name in OUTSIDE_HOOKS)


def request(*, finished: bool = False) -> Any:
    return SimpleNamespace(to_finish=None, finished_reason="done", finished=lambda: finished)


def broken() -> None:
    raise KeyError("page")


def test_a_failing_stage_ends_its_requests_and_nothing_goes_further() -> None:
    running, ended = request(), request(finished=True)
    assert stages.run("composition", stages.ending([running, ended]), broken) is None
    reason = running.to_finish
    assert reason.status_code == 500
    assert "'composition' failed" in reason.message
    assert "KeyError: 'page'" in reason.message
    assert ended.to_finish is None
    assert ended.finished_reason.message == reason.message
    assert running.ragserve_private, "what it wrote may be wrong and must not be cached"


@pytest.mark.parametrize("everywhere", [True, False])
def test_ranks_fail_alike_or_the_server_ends(everywhere: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "_alike", lambda error: everywhere)
    messages: list[str] = []

    def broken() -> None:
        raise ValueError("no such row")

    assert stages.run_alike("positions", messages.append, lambda: 5) == 5
    if everywhere:
        assert stages.run_alike("positions", messages.append, broken) is None
    else:
        with pytest.raises(stages.RanksDivided):
            stages.run_alike("positions", messages.append, broken)
    assert len(messages) == everywhere


def test_a_request_whose_pages_cannot_be_given_back_ends_with_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attention = SimpleNamespace(
        attach=lambda tree, ranks: None, on_finished=lambda req, tokens: None, give_back=lambda req: broken()
    )
    monkeypatch.setattr(current, "attention", attention)
    monkeypatch.setattr(current, "runtime", None)
    started(engine(heads_pool()))
    ended = request(finished=True)
    current.runtime.before_release(ended, 3)
    assert "'release' failed" in ended.finished_reason.message
    current.runtime.tiers.close()


def test_the_first_reason_counts() -> None:
    req = request()
    for stage in ("gather", "forward"):
        stages.run(stage, stages.ending([req]), broken)
    assert "'gather'" in req.to_finish.message


def test_a_stage_without_memory_says_what_helps_and_frees_what_its_frames_hold() -> None:
    frames = []

    def large() -> None:
        held = [0] * 1000
        frames.append(inspect.currentframe())
        raise torch.OutOfMemoryError(f"{len(held)} numbers")

    req = request()
    stages.run("recompute", stages.ending([req]), large)
    assert "mem_fraction_static" in req.to_finish.message
    assert frames[0] is not None
    assert not frames[0].f_locals, "its tensors must go before the allocator's cache is emptied"


def test_a_device_that_cannot_be_used_any_more_ends_the_process() -> None:
    def illegal() -> None:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    with pytest.raises(torch.AcceleratorError):
        stages.run("forward", stages.nobody, illegal)


def test_faults_are_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FAULTS_VARIABLE, raising=False)
    with pytest.raises(ValueError, match=FAULTS_VARIABLE):
        stages.inject("load")
    monkeypatch.setenv(FAULTS_VARIABLE, "1")
    with pytest.raises(ValueError, match="no stage 'x'"):
        stages.inject("x")
    stages.inject("load")
    stages.inject("save")
    with pytest.raises(InjectedFault):
        stages.reach("load")
    assert stages.withdraw() == ["save"]
    stages.reach("save")
    assert stages.run("load", stages.nobody, lambda: 5) == 5, "it fails once"
