"""How servers for one piece of work are started, and what they share with those of the environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from ragserve.config import SECRETS, Settings, load
from ragserve.engine import running_server as module
from ragserve.engine.running_server import running_server

URL = "postgresql://u:secret@db/registry"


class _Started(Exception):
    """In place of a start."""


def started(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Sequence[str], Mapping[str, str]]:
    """The command of a server that is started, and what is added to its environment."""
    seen: list[tuple[Sequence[str], Mapping[str, str]]] = []

    def spawn(command: Sequence[str], _output: BinaryIO, env: Mapping[str, str], **_: Any) -> Any:
        seen.append((command, env))
        raise _Started

    monkeypatch.setattr(module, "spawn", spawn)
    with pytest.raises(_Started), running_server(**options):
        pass
    return seen[0]


def settings_of_a_server(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Settings:
    """What a server that is started reads of environment and file."""
    for name, value in started(monkeypatch, **options)[1].items():
        monkeypatch.setenv(name, value)
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


def test_secrets_are_on_no_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every user of the machine may read it."""
    secrets = {name: f"postgresql://{name}" for name in SECRETS}
    command, env = started(monkeypatch, data_dir=tmp_path, env={"OTHER": "1"}, top_k=7, **secrets)
    assert not [text for text in command if "postgresql" in text]
    assert command[command.index("--top-k") + 1] == "7"
    assert env == {"OTHER": "1"} | {f"RAGSERVE_{name.upper()}": text for name, text in secrets.items()}
