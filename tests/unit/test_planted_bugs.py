"""`tests/planted_bugs.py` keeps up with the source that it changes."""

from __future__ import annotations

import pytest

from tests.planted_bugs import BUGS, REPO, Bug


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_the_line_of_a_planted_bug_is_there_once(bug: Bug) -> None:
    texts = [path.read_text(encoding="utf-8") for path in (REPO / bug.folder).rglob("*.py")]
    assert sum(text.count(bug.old) for text in texts) == 1
    assert all((REPO / test).exists() for test in bug.tests)
