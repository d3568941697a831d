"""Faster imports leave nothing behind."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest

from sglang_ext.sglang_internals.imports import with_sklearn, without_sklearn


def test_sklearn_is_hidden_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "sklearn", raising=False)
    without_sklearn()
    try:
        assert find_spec("sklearn") is None, "so Transformers takes it for absent"
        with pytest.raises(ImportError):
            import sklearn  # noqa: F401
    finally:
        with_sklearn()
    assert find_spec("sklearn") is not None


def test_sklearn_stays_where_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", sys)
    without_sklearn()
    assert sys.modules["sklearn"] is sys
    with_sklearn()
    assert sys.modules["sklearn"] is sys
