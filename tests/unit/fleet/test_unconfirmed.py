"""Deletions that wait for a worker survive a restart, in order and in bounded space."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ragserve.errors import Unavailable
from ragserve.fleet import unconfirmed
from ragserve.fleet.unconfirmed import FILE_NAME, Unconfirmed

A = {"op": "remove", "keys": ["a"], "namespace": "n"}
SESSION = {"op": "remove_session", "key": "session:n:1"}


def test_what_is_noted_lasts_until_it_is_confirmed(tmp_path: Path) -> None:
    found = Unconfirmed(tmp_path)
    found.add(["w", "x"], A)
    found.add(["w"], SESSION)
    asyncio.run(found.save())
    found = Unconfirmed(tmp_path)
    assert found.of("w") == [A, SESSION]
    found.confirm("w", A)
    asyncio.run(found.save())
    found = Unconfirmed(tmp_path)
    assert (found.of("w"), found.of("x"), found.of("nobody")) == ([SESSION], [A], [])
    assert found.workers == ["w", "x"]


def test_too_many_become_whole_namespaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unconfirmed, "MOST", 3)
    found = Unconfirmed(tmp_path)
    found.add(["w"], SESSION)
    for name in ("n", "m"):
        found.add(["w"], {"op": "remove", "keys": ["a", "b"], "namespace": name})
    dropped = [{"op": "remove_namespace", "namespace": name} for name in ("n", "m")]
    assert found.of("w") == dropped
    for part in (A, SESSION):
        found.add(["w"], part)
        assert found.of("w") == dropped, "it is among them"


def test_too_many_sessions_become_whole_namespaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that never comes back must not make the file longer with every session that ends."""
    monkeypatch.setattr(unconfirmed, "MOST", 3)
    found = Unconfirmed(tmp_path)
    for number in range(9):
        found.add(["w"], {"op": "remove_session", "key": f"session:n:{number}"})
    assert found.of("w") == [{"op": "remove_namespace", "namespace": "n"}]


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[]", "{}", '{"unconfirmed": null}', '{"unconfirmed": []}', '{"unconfirmed": {"w": null}}'),
        *('{"unconfirmed": {"w": {}}}', '{"unconfirmed": {"w": [null]}}', '{"unconfirmed": {"w": [{}]}}'),
        *('{"unconfirmed": {"w": [{"op": "remove"}]}}', '{"unconfirmed": {"w": [{"op": null}]}}'),
        '{"unconfirmed": {"w": [{"op": "remove_session"}]}}',
        *(f'{{"unconfirmed": {{"w": [{{"op": "remove_session", "key": {key}}}]}}}}' for key in ("1", '"s"')),
    ],
)
def test_a_file_that_cannot_be_read_ends_the_start(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(Unavailable, match="removed documents"):
        Unconfirmed(tmp_path)


def test_a_disk_that_is_full_is_said_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    found = Unconfirmed(tmp_path)
    found.add(["w"], A)
    with monkeypatch.context() as patched:
        patched.setattr(unconfirmed, "write_json", full)
        with pytest.raises(Unavailable, match="No space"):
            asyncio.run(found.save())
    asyncio.run(found.save())
    assert Unconfirmed(tmp_path).of("w") == [A]
