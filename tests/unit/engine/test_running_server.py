"""Servers for one piece of work share nothing with those that the environment is set up for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from ragserve.config import Settings, load
from ragserve.engine import running_server as module
from ragserve.engine.running_server import running_server

URL = "postgresql://u:secret@db/registry"


class _Started(Exception):
    """In place of a start."""


def settings_of_a_server(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Settings:
    """What a server that is started reads of environment and file."""

    def spawn(_command: Sequence[str], _output: BinaryIO, env: Mapping[str, str], **_: Any) -> Any:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        raise _Started

    monkeypatch.setattr(module, "spawn", spawn)
    with pytest.raises(_Started), running_server(**options):
        pass
    return load()


@pytest.mark.parametrize("named_in", ["environment", "ragserve.toml"])
def test_without_a_data_folder_registry_and_store_are_its_own(
    monkeypatch: pytest.MonkeyPatch, named_in: str
) -> None:
    if named_in == "environment":
        monkeypatch.setenv("RAGSERVE_REGISTRY_URL", URL)
        monkeypatch.setenv("RAGSERVE_KV_STORAGE", "shared")
        monkeypatch.setenv("RAGSERVE_KV_STORAGE_ARGS", '{"folder": "/store", "bytes": 1}')
    else:
        lines = f'registry_url = "{URL}"\nkv_storage = "shared"\n[kv_storage_args]\nfolder = "/store"\n'
        Path("ragserve.toml").write_text(lines)
    settings = settings_of_a_server(monkeypatch)
    assert settings.registry_url is not None
    assert not settings.registry_url.get_secret_value()
    assert not settings.shared_store


def test_on_a_data_folder_they_are_the_ones_that_are_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAGSERVE_REGISTRY_URL", URL)
    settings = settings_of_a_server(monkeypatch, data_dir=tmp_path)
    assert settings.registry_url is not None
    assert settings.registry_url.get_secret_value() == URL
