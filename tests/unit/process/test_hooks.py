"""The parts of SGLang that ragserve relies on are there, and a change of one is named."""

from __future__ import annotations

import importlib
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.process import hooks
from sglang_ext.stages import stages
from sglang_ext.stages.stages import FAULTS_VARIABLE, RanksDivided
from sglang_ext.state import current
from sglang_ext.wire.protocol import SGLANG_VERSIONS


def test_the_pinned_sglang_is_as_expected() -> None:
    from sglang.version import __version__

    assert __version__ in SGLANG_VERSIONS
    assert hooks.check() == []


def test_the_folder_of_each_version_has_the_same_names() -> None:
    names = []
    for version in SGLANG_VERSIONS:
        module = importlib.import_module(f"sglang_ext.versions.sglang_{version.replace('.', '_')}")
        own = {name for name, value in vars(module).items() if _is_own(name, value, module.__name__)}
        assert own >= {"RELIED_ON", "row_of", "served_by"}
        names.append(own)
    assert all(own == names[0] for own in names)


def _is_own(name: str, value: Any, module: str) -> bool:
    return not name.startswith("_") and (
        (name.isupper() and name != "TYPE_CHECKING") or getattr(value, "__module__", None) == module
    )


def test_each_hook_says_what_would_make_it_needless() -> None:
    assert [hook.target for hook in hooks.HOOKS if not hook.until] == []


def test_a_changed_signature_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers.schedule_policy import PrefillAdder

    def moved(self: Any, request: Any) -> None: ...

    monkeypatch.setattr(PrefillAdder, "add_one_req", moved)
    (problem,) = hooks.check()
    assert "PrefillAdder.add_one_req" in problem
    assert "has_chunked_req" in problem


def test_a_missing_function_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers.scheduler import Scheduler

    monkeypatch.delattr(Scheduler, "handle_dumper_control")
    (problem,) = hooks.check()
    assert "handle_dumper_control is gone" in problem


class Runtime:
    """A runtime, its own composition, that has the output of one forward pass."""

    def __init__(self) -> None:
        self.slots = SimpleNamespace(count=lambda: None)
        self.output: str | None = None
        self.composition = self
        self.retracted = False

    def before_forward(self, batch: Any) -> bool:
        self.output = "computed already"
        return self.retracted

    def output_of(self, forward_batch: Any) -> str | None:
        output, self.output = self.output, None
        return output

    def end_forward(self) -> None:
        self.output = None

    def after_forward(self, batch: Any) -> None: ...


def test_the_model_does_not_run_where_its_output_is_there_and_no_later_forward_gets_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(current, "runtime", Runtime())
    around = {hook.target: hook.function for hook in hooks.HOOKS}
    forward = around["sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation"]
    model = around["sglang.srt.model_executor.model_runner.ModelRunner._forward_raw"]

    def run(runner: Any, batch: Any, proxy: Any) -> str:
        return "run"

    def generate(worker: Any, batch: Any) -> list[str]:
        return [model(run, None, batch, None) for _ in range(2)]

    def failing(worker: Any, batch: Any) -> None:
        raise MemoryError

    extend, decode = batch_of(extends=True), batch_of(extends=False)
    assert forward(generate, None, extend) == ["computed already", "run"]
    forward(failing, None, extend)
    assert forward(generate, None, decode) == ["run", "run"]


def test_a_batch_that_was_retracted_is_not_extended(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    runtime.retracted = True
    monkeypatch.setattr(current, "runtime", runtime)
    (forward,) = (h.function for h in hooks.HOOKS if h.target.endswith("forward_batch_generation"))

    def unexpected(worker: Any, batch: Any) -> None:
        raise AssertionError("nothing is left to compute")

    assert forward(unexpected, None, batch_of(extends=True)).next_token_ids.tolist() == [0]
    assert runtime.output is None


def test_requests_with_and_without_token_ids_may_share_a_step() -> None:
    """0.5.17 makes a list for a row without ids, and then calls a tensor's method on every row."""
    from sglang.srt.layers.logprob_processor import get_token_ids_logprobs

    logprobs = torch.arange(6.0).reshape(2, 3)
    found = get_token_ids_logprobs(logprobs, [[2, 0], None], no_copy_to_cpu=True)
    for hook in hooks.HOOKS:
        if hook.target.endswith("get_token_ids_logprobs"):
            assert hook.function(([[], []], [[], []]), logprobs) is None
            found = hook.function(found, logprobs, [[2, 0], None], no_copy_to_cpu=True) or found
    values, ids = found
    assert [value.tolist() for value in values] == [[2.0, 0.0], []]
    assert ids == [[2, 0], []]


def batch_of(*, extends: bool) -> Any:
    req = SimpleNamespace(to_finish=None, finished=lambda: False, return_logprob=True, grammar="a grammar")
    mode = SimpleNamespace(is_extend=lambda: extends)
    return SimpleNamespace(forward_mode=mode, reqs=[req], seq_lens=torch.zeros(1), return_logprob=True)


@pytest.mark.parametrize("extends", [True, False], ids=["extend", "decode"])
def test_a_forward_pass_that_fails_ends_its_requests(monkeypatch: pytest.MonkeyPatch, extends: bool) -> None:
    runtime, batch = Runtime(), batch_of(extends=extends)
    monkeypatch.setattr(current, "runtime", runtime)
    (forward,) = (h.function for h in hooks.HOOKS if h.target.endswith("forward_batch_generation"))

    def failing(worker: Any, batch: Any) -> None:
        raise MemoryError

    result = forward(failing, None, batch)
    assert result.next_token_ids.tolist() == [0], "SGLang gets a token for a request that ends"
    (req,) = batch.reqs
    assert "out of memory at stage 'forward'" in req.to_finish.message
    assert (req.return_logprob, req.grammar, batch.return_logprob) == (False, None, False), "no logits"
    monkeypatch.setattr(stages, "_alike", lambda error: False)  # the other ranks are in a collective
    with pytest.raises(RanksDivided):
        forward(failing, None, batch)


def test_a_step_whose_graph_cannot_be_named_ends_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dense graph runs in its place: SGLang must get a result of the batch's shape."""
    monkeypatch.setenv(FAULTS_VARIABLE, "1")
    attention = SimpleNamespace(backend=SimpleNamespace(variant=SimpleNamespace(value="selected")))
    monkeypatch.setattr(current, "attention", attention)
    (name,) = (hook.function for hook in hooks.HOOKS if hook.stages == ("graph",))
    batch = batch_of(extends=False)
    step = SimpleNamespace(ragserve_reqs=batch.reqs)

    def dense(runner: Any, forward_batch: Any) -> None:
        return None

    assert name(dense, None, step) == "selected"
    assert batch.reqs[0].to_finish is None
    stages.inject("graph")
    assert name(dense, None, step) is None
    assert "injected at 'graph'" in batch.reqs[0].to_finish.message
    assert name(dense, None, step) == "selected"


def test_all_modules_are_searched_for_functions_and_not_for_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang looks for names that modules hold of what is patched, 40 ms for each hook; there are none of a
    method."""
    from sglang.srt.plugins import hook_registry

    searched: list[object] = []
    monkeypatch.setattr(hook_registry, "_propagate_patch", lambda _old, _new, owner: searched.append(owner))
    monkeypatch.setattr(hook_registry.HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(hooks, "_installed", False)
    hooks.install()
    hook_registry._propagate_patch(None, None, SimpleNamespace)
    assert searched == []
    hook_registry._propagate_patch(None, None, hooks)
    assert searched == [hooks]
