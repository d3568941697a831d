"""Keys on disk: no secret in the file, whole changes only, and refusals that say what is wrong."""

from __future__ import annotations

import errno
import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ragserve.config import load
from ragserve.errors import Conflict, InvalidRequest, NotFound, Unauthorized, Unavailable
from ragserve.tenants.key_file import KeyFile
from ragserve.tenants.keyring import Keyring
from tests.campaigns.troubles import few_descriptors


def test_a_secret_is_long_random_and_not_in_the_file(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "data")
    key, secret = keys.create("acme", ["acme", "acme-*"], ["read", "ingest"])
    text = keys.path.read_text()
    assert len(secret) == 47  # rsk- and 256 bits
    assert secret not in text
    assert secret.removeprefix("rsk-") not in text
    assert keys.read().keys == [key]
    assert keys.read().digest(secret.encode()) == key.digest
    assert stat.S_IMODE(keys.path.stat().st_mode) & 0o077 == 0
    other = KeyFile(tmp_path / "other")
    other.create("acme", ["acme"], ["read"])
    assert other.read().digest(secret.encode()) != key.digest  # another installation, another hash


def test_keys_made_at_once_are_all_kept(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda n: KeyFile(tmp_path).create(f"key {n}", ["a"], ["read"])[0], range(16)))
    assert {key.key_id for key in KeyFile(tmp_path).read().keys} == {key.key_id for key in made}


def test_a_key_is_revoked_by_id_or_name(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path)
    one, two = (keys.create(name, ["a"], ["read"])[0] for name in ("one", "two"))
    assert keys.revoke(one.key_id) == one
    assert keys.revoke("two") == two
    assert keys.read().keys == []
    with pytest.raises(NotFound, match="keys list"):
        keys.revoke("two")


def test_data_folders_with_links_to_one_file_share_its_keys(tmp_path: Path) -> None:
    shared = KeyFile(tmp_path / "shared")
    shared.create("acme", ["a"], ["read"])
    linked = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        linked.append(KeyFile(tmp_path / name))
        linked[-1].path.symlink_to(shared.path)
    linked[0].revoke("acme")
    assert all(file.path.is_symlink() and file.read().keys == [] for file in linked), "revoked everywhere"
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda n: linked[n % 2].create(f"key {n}", ["a"], ["read"])[0], range(16)))
    assert {key.key_id for key in shared.read().keys} == {key.key_id for key in made}
    assert [path.name for path in sorted(tmp_path.glob("*/*.lock"))] == ["keys.lock"], "one lock for all"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"namespaces": ["a/b"]}, "namespaces"),
        ({"namespaces": ["*a"]}, "namespaces"),
        ({"namespaces": ["a", "b*c"]}, "namespaces"),
        ({"rights": []}, "rights"),
        ({"rights": ["write"]}, "rights"),
        ({"rights": ["admin"]}, "without namespaces"),
        ({"rights": ["metrics"]}, "without namespaces"),
        ({"rights": ["read", "metrics"]}, "without namespaces"),
        ({"name": "a\nb"}, "name"),
        ({"name": "--api-key"}, "name"),
    ],
)
def test_wrong_keys_are_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        KeyFile(tmp_path).create(**{"name": "acme", "namespaces": ["acme"], "rights": ["read"]} | fields)
    assert KeyFile(tmp_path).read().keys == []


def test_a_name_is_taken_once(tmp_path: Path) -> None:
    KeyFile(tmp_path).create("acme", ["acme"], ["read"])
    with pytest.raises(Conflict, match="'acme'"):
        KeyFile(tmp_path).create("acme", ["other"], ["read"])


def test_an_id_and_a_name_mean_one_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = KeyFile(tmp_path)
    one = keys.create("one", ["a"], ["read"])[0]
    with pytest.raises(Conflict, match=one.key_id):
        keys.create(one.key_id, ["a"], ["read"])
    ids = iter([one.key_id, "feedbeef"])
    monkeypatch.setattr("ragserve.tenants.key_file._new_id", lambda: next(ids))
    assert keys.create("two", ["a"], ["read"])[0].key_id == "feedbeef"


def test_a_key_that_an_earlier_version_named_as_an_id_is_not_mistaken(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path)
    one, two = (keys.create(name, ["a"], ["read"])[0] for name in ("one", "two"))
    keys.path.write_text(keys.path.read_text().replace('"two"', f'"{one.key_id}"'))
    for change in (keys.revoke, lambda name: keys.relabel(name, ["l"], [])):
        with pytest.raises(Conflict, match="another's name"):
            change(one.key_id)
    assert keys.revoke(two.key_id).name == one.key_id
    assert keys.revoke(one.key_id) == one


def test_a_broken_file_is_neither_read_nor_overwritten(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path)
    keys.create("acme", ["acme"], ["read"])
    table = json.loads(keys.path.read_text())
    table["keys"][0]["rights"] = ["everything"]
    keys.path.write_text(json.dumps(table))
    before = keys.path.read_bytes()
    for change in (lambda: keys.create("b", ["b"], ["read"]), lambda: keys.revoke("acme"), keys.read):
        with pytest.raises(Unavailable, match="cannot be read"):
            change()
    assert keys.path.read_bytes() == before


def test_keys_that_could_not_be_read_once_count_again(tmp_path: Path) -> None:
    """A server whose clients have taken all descriptors must not stay closed."""
    file = KeyFile(tmp_path)
    _, secret = file.create("acme", ["a"], ["read"])
    server = Keyring(tmp_path, None)
    with few_descriptors(0), pytest.raises(Unavailable, match="Too many open files"):
        server.admit(f"Bearer {secret}".encode())
    assert server.admit(f"Bearer {secret}".encode()).name == "acme"


@pytest.mark.parametrize("tenants", [False, True])
@pytest.mark.parametrize("header", [b"", b"Basic eDp5", b"Bearer", b"Bearer "])
def test_an_empty_secret_is_no_key(tmp_path: Path, header: bytes, tenants: bool) -> None:
    """Nor is the servers' own, if it is empty: requests without a key would have it."""
    if tenants:
        KeyFile(tmp_path).create("acme", ["a"], ["read"])
    with pytest.raises(Unauthorized):
        Keyring(tmp_path, "").admit(header)


def test_a_good_file_that_is_put_back_counts_again(tmp_path: Path) -> None:
    """A file moved away and back is the same one, by inode, time and size."""
    file = KeyFile(tmp_path)
    header = f"Bearer {file.create('acme', ['a'], ['read'])[1]}".encode()
    server = Keyring(tmp_path, None)
    assert server.admit(header).name == "acme"
    good = file.path.rename(tmp_path / "good")
    file.path.write_text("broken")
    with pytest.raises(Unavailable, match="cannot be read"):
        server.admit(header)
    good.rename(file.path)
    assert server.admit(header).name == "acme"


def test_a_disk_that_fails_for_a_moment_refuses_keys_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = f"Bearer {KeyFile(tmp_path).create('acme', ['a'], ['read'])[1]}".encode()
    server = Keyring(tmp_path, None)
    assert server.admit(header).name == "acme"
    with monkeypatch.context() as patched:
        for call in ("stat", "read_bytes"):
            patched.setattr(Path, call, _failing)
        with pytest.raises(Unavailable, match="Stale file handle"):
            server.admit(header)
    assert server.admit(header).name == "acme"


@pytest.mark.parametrize("target", ["nowhere/keys.json", "keys.json"])
def test_a_link_that_leads_to_no_file_does_not_open_a_server(tmp_path: Path, target: str) -> None:
    """As that to a volume which is not mounted yet."""
    link = tmp_path / "data" / "keys.json"
    link.parent.mkdir()
    link.symlink_to(target)
    _stays_closed(link.parent)
    assert load(data_dir=link.parent).has_key
    for change in (lambda file: file.create("b", ["b"], ["read"]), lambda file: file.revoke("acme")):
        with pytest.raises((Unavailable, OSError)):
            change(KeyFile(link.parent))
    assert link.is_symlink()
    if target == "nowhere/keys.json":
        with pytest.raises(Unavailable) as refused:
            KeyFile(link.parent).read()
        assert str(link.parent / target) in str(refused.value.hint)
    server = Keyring(link.parent, None)
    assert not server.is_open
    _, secret = KeyFile(tmp_path / "volume").create("acme", ["a"], ["read"])
    link.unlink()
    link.symlink_to(tmp_path / "volume" / "keys.json")
    assert server.admit(f"Bearer {secret}".encode()).name == "acme"


@pytest.mark.parametrize("calls", [["stat"], ["stat", "read_bytes"], ["stat", "read_bytes", "lstat"]])
def test_a_disk_that_fails_does_not_open_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[str]
) -> None:
    _, secret = KeyFile(tmp_path).create("acme", ["a"], ["read"])
    server = Keyring(tmp_path, None)
    with monkeypatch.context() as patched:
        for call in calls:
            patched.setattr(Path, call, _failing)
        if "read_bytes" in calls:
            _stays_closed(tmp_path)
        assert not server.is_open
    assert server.admit(f"Bearer {secret}".encode()).name == "acme"


def _stays_closed(data_dir: Path) -> None:
    server = Keyring(data_dir, None)
    assert not server.is_open
    with pytest.raises(Unavailable, match="cannot be read"):
        server.admit(b"")
    assert Keyring(data_dir, "master").admit(b"Bearer master").is_admin


def _failing(*_: object, **__: object) -> None:
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
