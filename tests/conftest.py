"""Shared by all tests: no network, no GPU unless there is one, one embedder for the session."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# No deadline: two busy cores make any example slow once. HYPOTHESIS_PROFILE=long looks at ten times as many.
settings.register_profile("suite", deadline=None, max_examples=25)
settings.register_profile("long", deadline=None, max_examples=250)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault(
    "OMP_WAIT_POLICY", "PASSIVE"
)  # before torch: spinning threads of several processes on few cores are 10 times slower
for _name in [name for name in os.environ if name.startswith("RAGSERVE_")]:
    del os.environ[_name]  # the developer's own settings are not what is tested

REPO = Path(__file__).resolve().parent.parent
MODEL = REPO / "examples" / "models" / "ragserve-tiny"


def pytest_configure(config: pytest.Config) -> None:
    from ragserve.engine.compat import prepare

    prepare()  # transformers, imported by several tests, imports torchvision


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _no_settings_file(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ragserve.toml in the working directory would change the defaults."""
    monkeypatch.chdir(tmp_path_factory.mktemp("cwd"))


@pytest.fixture(scope="session")
def model_path() -> Path:
    return MODEL
