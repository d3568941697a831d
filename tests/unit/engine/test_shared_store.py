"""The shared store in the settings: what is wrong with it is said at the start, and what the engine gets."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ragserve.config import Settings
from ragserve.engine import shared_store
from ragserve.errors import InvalidRequest, Unavailable
from ragserve.profiles.costs import COSTS, FILE_NAME, CostSample, fit
from sglang_ext.documents.fingerprint import model_fingerprint
from sglang_ext.documents.remote import mooncake_process
from sglang_ext.process.build import _remote_config
from tests.conftest import MODEL

MOONCAKE = {"master_server_address": "127.0.0.1:50051"}


def settings(tmp_path: Path, storage: str, **args: Any) -> Settings:
    return Settings(data_dir=tmp_path, model=str(MODEL), kv_storage=storage, kv_storage_args=args)


@pytest.mark.parametrize(
    ("storage", "args", "says"),
    [
        ("mooncake", {}, "needs master_server_address"),
        ("mooncake", {"master_server_address": "here"}, "as HOST:PORT"),
        ("mooncake", {**MOONCAKE, "global_segment_size": "4gb"}, "number of bytes"),
        ("shared", {}, "needs folder"),
        ("shared", {"folder": "/mnt/kv", "bytes": -1}, "number of bytes"),
        ("shared", {"path": "/mnt/kv"}, "no option 'path'"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, storage: str, args: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        shared_store.check(settings(tmp_path, storage, **args))


def test_what_mooncake_needs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> None:
        raise OSError("libibverbs.so.1: cannot open shared object file")

    monkeypatch.setattr(shared_store, "find_spec", lambda name: object())
    monkeypatch.setattr(mooncake_process, "load_libraries", missing)
    with pytest.raises(Unavailable, match="apt-get install libibverbs1"):
        shared_store.check(settings(tmp_path, "mooncake", **MOONCAKE))
    monkeypatch.setattr(shared_store, "find_spec", lambda name: None)
    with pytest.raises(Unavailable, match=r"ragserve\[mooncake\]"):
        shared_store.check(settings(tmp_path, "mooncake", **MOONCAKE))
    shared_store.check(settings(tmp_path, "shared", folder="/not/there/yet"))  # away is no error
    shared_store.check(settings(tmp_path, "file"))
    assert "mooncake.store" not in sys.modules


def test_each_rank_has_its_journal_and_its_share_of_the_memory(tmp_path: Path) -> None:
    given = settings(tmp_path, "mooncake", **MOONCAKE, global_segment_size=2**30)
    config = {"remote": shared_store.config(given, str(tmp_path / "kv"))}
    remote = _remote_config(config, 2, 1)
    assert remote.options["global_segment_size"] == 2**29
    assert (remote.store, remote.min_value, remote.prefill_ms) == ("mooncake", 1.0, None)
    assert remote.journal == tmp_path / "kv" / "deletions-1-of-2.json"
    samples = [CostSample(n, 10 + 0.1 * n) for n in (512, 1024, 2048)]
    fingerprint = model_fingerprint(str(MODEL), options=given.engine_args)
    costs = fit(samples, model="tiny", hardware="a CPU", date="2026-01-01")
    COSTS.save(tmp_path / FILE_NAME, fingerprint, costs)
    config = {"remote": shared_store.config(given, str(tmp_path / "kv"))}
    assert _remote_config(config, 1, 0).prefill_ms == pytest.approx((10, 0.1, 0), rel=1e-3, abs=1e-6)
    assert _remote_config({}, 1, 0) is None
