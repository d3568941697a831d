"""How servers for one piece of work are started, and what they share with those of the environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import httpx
import pytest

from ragserve.config import SECRETS, Settings, load
from ragserve.engine import running_server as module
from ragserve.engine.running_server import running_server
from ragserve.errors import Unavailable

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
    assert settings.registry_url is None
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


def test_what_is_none_is_no_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    """As settings are that the environment has as empty."""
    command, env = started(monkeypatch, tokenizer=None, engine_api_key=None, top_k=3)
    assert "--top-k" in command
    assert "--tokenizer" not in command
    assert "None" not in (*command, *env.values())


def test_it_listens_where_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAGSERVE_HOST", "0.0.0.0")
    command, _ = started(monkeypatch)
    assert command[command.index("--host") + 1] == "127.0.0.1"


def asked(monkeypatch: pytest.MonkeyPatch, *statuses: int, **options: Any) -> list[str | None]:
    """The keys with which a server is asked whether it is ready, which answers by ``statuses``."""
    keys: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers.get("authorization"))
        return httpx.Response(statuses[len(keys) - 1])

    client, spawn = httpx.Client, module.spawn
    transport = httpx.MockTransport(answer)
    monkeypatch.setattr(httpx, "Client", lambda **given: client(transport=transport, **given))
    monkeypatch.setattr(module, "spawn", lambda _, *rest, **given: spawn(["sleep", "900"], *rest, **given))
    with running_server(**options):
        return keys


def test_a_server_whose_key_is_unknown_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the data folder's keys, of ragserve.toml, or a sign-in: it is never ready for us."""
    with pytest.raises(Unavailable, match="needs a key"):
        asked(monkeypatch, 503, 401)


@pytest.mark.parametrize(
    "options", [{}, {"api_key": "given"}, {"env": {"RAGSERVE_API_KEY": "given"}}], ids=str
)
def test_it_is_asked_with_the_key_that_it_has(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setenv("RAGSERVE_API_KEY", "inherited")
    key = f"Bearer {'given' if options else 'inherited'}"
    assert asked(monkeypatch, 503, 200, **options) == [key, key]
