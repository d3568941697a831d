"""SGLang is prepared when a program imports it after ragserve; `test_programs` imports it so in a process."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest

from ragserve.engine import compat
from ragserve.programs._sglang import prepare_on_import


def test_an_import_of_sglang_prepares_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[bool] = []
    monkeypatch.setattr(compat, "prepare", lambda: prepared.append(True))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    before = list(sys.meta_path)
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    prepare_on_import()
    prepare_on_import()
    assert len(sys.meta_path) == len(before) + 1
    assert find_spec("json.tool") is not None
    assert not prepared, "at other imports nothing happens"
    assert find_spec("sglang") is not None
    assert prepared == [True]
    assert sys.meta_path == before


def test_where_sglang_is_imported_nothing_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = list(sys.meta_path)
    monkeypatch.setitem(sys.modules, "sglang", sys)
    prepare_on_import()
    assert sys.meta_path == before
