"""What campaigns take an answer for."""

from __future__ import annotations

from typing import Any

import pytest

from tests.campaigns.operations import SPECS
from tests.campaigns.site import Asked


def by(strategy: str) -> Asked:
    return Asked([], 0, {"context": {"strategy": strategy, "notes": []}})


@pytest.mark.parametrize(("strategy", "options"), SPECS[:-1])
def test_only_samkv_without_options_may_be_answered_exactly(strategy: str, options: dict[str, Any]) -> None:
    if strategy in ("full", "prefix"):
        assert by(strategy).exact(strategy, options)
        return
    assert not by(strategy).exact(strategy, options)
    if (strategy, options) == ("samkv", {}):
        assert by("prefix").exact(strategy, options)
        return
    with pytest.raises(AssertionError, match="was answered exactly"):
        by("prefix").exact(strategy, options)
