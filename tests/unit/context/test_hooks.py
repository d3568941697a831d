"""What ragserve relies on inside SGLang is there, and a change of it is named."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_ext import hooks


def test_the_pinned_sglang_is_as_expected() -> None:
    from sglang.version import __version__

    assert __version__ == hooks.SGLANG_VERSION
    assert hooks.check() == []


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
