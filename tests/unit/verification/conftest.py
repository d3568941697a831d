"""What the tests of idle servers share."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragserve.answering.prompt import PromptBuilder
from ragserve.verification import idle_tuner
from ragserve_index import IndexStore
from tests.conftest import MODEL
from tests.unit.verification.idle_engine import IdleEngine
from tests.unit.verification.tuned_server import LABELS, Tuned


@pytest.fixture(scope="session")
def builder() -> PromptBuilder:
    return PromptBuilder.load(str(MODEL))


@pytest.fixture
def tuned(
    store: IndexStore, tmp_path: Path, builder: PromptBuilder, monkeypatch: pytest.MonkeyPatch
) -> Tuned:
    """Two candidates, so that none has to be picked."""
    monkeypatch.setattr(idle_tuner, "candidates", lambda k: ",".join(LABELS))
    return Tuned(store, tmp_path, builder, IdleEngine())


@pytest.fixture
def _few_questions(tuned: Tuned) -> None:
    """Let fifteen good answers verify."""
    tuned.margin = 30.0
