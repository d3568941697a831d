"""`ragserve cache` over the files of a data folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from ragserve.commands import cache
from ragserve.errors import NotFound
from sglang_ext.documents.pages.types import DiskConfig, DocumentMeta, KvShape
from sglang_ext.documents.tier_store import TierStore

SHAPE = KvShape(layers=2, kv_heads=2, head_dim=8, dtype=torch.float32, block=16)


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A folder with two documents of two namespaces."""
    fill(tmp_path)
    return tmp_path


def fill(folder: Path) -> None:
    disk = DiskConfig(folder / "kv", budget_bytes=2**24)
    store = TierStore(SHAPE, fingerprint="f" * 16, host_bytes=2**20, disk=disk, pin=False)
    for number, namespace in enumerate(("one", "two")):
        ids = list(range(20))
        k, v = torch.randn(2, 2, 20, 2, 8)
        store.put(DocumentMeta(f"{number:032x}", namespace, ids, 20, "f" * 16), k, v)
    store.flush(10)
    store.close()


def run(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    cache.register(app)
    done = CliRunner().invoke(app, ["cache", *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout


def test_stat_verify_and_clear(data_dir: Path) -> None:
    code, out = run("stat", "--data-dir", str(data_dir))
    assert code == 0
    assert set(json.loads(out)["namespaces"]) == {"one", "two"}
    code, out = run("verify", "--data-dir", str(data_dir))
    assert (code, json.loads(out)["documents"], json.loads(out)["bad"]) == (0, 2, [])
    assert run("clear", "--data-dir", str(data_dir)) == (0, f"{data_dir / 'kv'}: 2 files removed\n")
    assert json.loads(run("stat", "--data-dir", str(data_dir))[1])["files"] == 0


def test_verify_names_a_damaged_document_and_says_so_by_its_exit_code(data_dir: Path) -> None:
    victim = next((data_dir / "kv").rglob("*.pages"))
    damaged = bytearray(victim.read_bytes())
    damaged[-5] ^= 0x10
    victim.write_bytes(bytes(damaged))
    code, out = run("verify", "--data-dir", str(data_dir))
    assert code == 3
    assert victim.stem in json.loads(out)["bad"][0]


def test_the_folder_is_the_one_of_the_settings(data_dir: Path) -> None:
    Path("ragserve.toml").write_text(f'data_dir = "{data_dir}"\n')
    assert json.loads(run("verify")[1])["documents"] == 2
    assert run("clear") == (0, f"{data_dir / 'kv'}: 2 files removed\n")


@pytest.mark.parametrize("command", ["stat", "verify", "clear"])
def test_a_folder_that_is_not_there_is_no_empty_cache(command: str, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no data"):
        run(command, "--data-dir", str(tmp_path / "elsewhere"))


def test_workers_of_this_machine_have_folders_of_their_own(data_dir: Path) -> None:
    for number in range(2):
        fill(data_dir / "workers" / str(number))
    found = json.loads(run("stat", "--data-dir", str(data_dir))[1])
    assert (found["files"], [each["files"] for each in found["folders"]]) == (6, [2, 2, 2])
    victim = next((data_dir / "workers" / "1").rglob("*.pages"))
    victim.write_bytes(victim.read_bytes()[:-5])
    code, out = run("verify", "--data-dir", str(data_dir))
    assert (code, len(json.loads(out)["bad"])) == (3, 1)
    said = run("clear", "--data-dir", str(data_dir))[1]
    assert f"{data_dir / 'workers' / '1' / 'kv'}: 2 files removed\n" in said
    assert json.loads(run("stat", "--data-dir", str(data_dir))[1])["files"] == 0
