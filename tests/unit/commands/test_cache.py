"""`ragserve cache` over the files of a data folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ragserve.commands.cache import _app
from sglang_ext.documents.pages.types import DiskConfig, DocumentMeta, KvShape
from sglang_ext.documents.tier_store import TierStore

SHAPE = KvShape(layers=2, kv_heads=2, head_dim=8, dtype=torch.float32, block=16)


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A folder with two documents of two namespaces."""
    disk = DiskConfig(tmp_path / "kv", budget_bytes=2**24)
    store = TierStore(SHAPE, fingerprint="f" * 16, host_bytes=2**20, disk=disk, pin=False)
    for number, namespace in enumerate(("one", "two")):
        ids = list(range(20))
        k, v = torch.randn(2, 2, 20, 2, 8)
        store.put(DocumentMeta(f"{number:032x}", namespace, ids, 20, "f" * 16), k, v)
    store.flush(10)
    store.close()
    return tmp_path


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(_app, list(arguments))
    return done.exit_code, done.stdout


def test_stat_verify_and_clear(data_dir: Path) -> None:
    code, out = run("stat", "--data-dir", str(data_dir))
    assert code == 0
    assert set(json.loads(out)["namespaces"]) == {"one", "two"}
    code, out = run("verify", "--data-dir", str(data_dir))
    assert (code, json.loads(out)["documents"], json.loads(out)["bad"]) == (0, 2, [])
    assert run("clear", "--data-dir", str(data_dir))[0] == 0
    assert json.loads(run("stat", "--data-dir", str(data_dir))[1])["files"] == 0


def test_verify_names_a_damaged_document_and_says_so_by_its_exit_code(data_dir: Path) -> None:
    victim = next((data_dir / "kv").rglob("*.pages"))
    damaged = bytearray(victim.read_bytes())
    damaged[-5] ^= 0x10
    victim.write_bytes(bytes(damaged))
    code, out = run("verify", "--data-dir", str(data_dir))
    assert code == 3
    assert victim.stem in json.loads(out)["bad"][0]
