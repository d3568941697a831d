"""What is compiled is counted, and told once requests wait for it."""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch._dynamo.callback as dynamo
from triton import knobs

from sglang_ext.diagnostics.compilations import Compilations


@pytest.fixture
def watching(monkeypatch: pytest.MonkeyPatch) -> Compilations:
    """Watches Triton and PyTorch until the test ends."""
    for hook in ("jit_cache_hook", "jit_post_compile_hook"):
        monkeypatch.setattr(knobs.runtime, hook, None)
    for callbacks in ("start_callbacks", "end_callbacks"):
        monkeypatch.setattr(dynamo.callback_handler, callbacks, [])
    found = Compilations()
    found.watch()
    return found


def compile_kernel(name: str, takes: float = 0.0) -> None:
    """Call Triton's hooks as it does around a compilation that takes at least so many seconds."""
    event: dict[str, Any] = {
        "fn": SimpleNamespace(module="kernels", name=name),
        "repr": f"{name}[num_warps=4](p: *fp32)",
        "compile": {"constants": {(1,): 64}},
        "already_compiled": False,
    }
    for hook in (knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook):
        assert hook is not None
        assert not hook(key="", is_manual_warmup=False, **event)
        time.sleep(takes)


def test_kernels_are_counted_with_what_they_were_compiled_for(watching: Compilations) -> None:
    compile_kernel("first")
    with dynamo.callback_handler.install_callbacks(dynamo.CallbackTrigger.DYNAMO, "3/0"):
        compile_kernel("inner")
    assert watching.count == 3
    assert [each["what"] for each in watching.since(1)] == [
        "kernels.inner[num_warps=4](p: *fp32) (1,)=64",
        "torch.compile 3/0",
    ]
    assert watching.seconds <= sum(each["seconds"] for each in watching.since(0)) + 1e-2, "inner ones once"
    assert watching.since(3) == []


def test_what_a_request_waits_for_is_logged(watching: Compilations, caplog: pytest.LogCaptureFixture) -> None:
    compile_kernel("early", takes=0.1)
    watching.serving = True
    compile_kernel("late", takes=0.1)
    assert [record.args[1].split("[")[0] for record in caplog.records if record.args] == ["kernels.late"]  # type: ignore[index, union-attr]
    assert caplog.records[0].levelno == logging.WARNING


def test_hooks_that_were_there_before_still_decide(
    watching: Compilations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda **event: True)  # do not compile
    Compilations().watch()
    assert knobs.runtime.jit_cache_hook is not None
    assert knobs.runtime.jit_cache_hook(key="", repr="") is True
