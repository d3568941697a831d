"""Workers that the server starts itself: their settings, their ends, and the server's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from ragserve.config import load
from ragserve.errors import InvalidRequest
from ragserve.fleet import replicas as module
from ragserve.fleet.replicas import replicas
from tests.conftest import REPO
from tests.unit.api.scripted_server import eventually

STAND_IN = """
import json, os, signal, sys, time
folder = sys.argv[sys.argv.index("--data-dir") + 1]
signal.signal(signal.SIGTERM, lambda *_: (open(os.path.join(folder, "ended"), "w").close(), os._exit(0)))
kept = ("RAGSERVE_", "CUDA_", "OMP_NUM")
told = {name: value for name, value in os.environ.items() if name.startswith(kept)}
path = os.path.join(folder, "told.json")
with open(path + ".tmp", "w") as file:
    json.dump({"arguments": sys.argv[1:], "environment": told, "pid": os.getpid()}, file)
os.replace(path + ".tmp", path)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that writes down how it was started, in the place of a worker."""
    program = tmp_path / "stand-in"
    program.write_text(f"#!{sys.executable}\n{STAND_IN}")
    program.chmod(0o755)
    monkeypatch.setattr(module.sys, "executable", str(program))


def told(folder: Path, number: int) -> dict[str, Any]:
    path = folder / "workers" / str(number) / "told.json"
    eventually(path.exists, f"worker {number} starts")
    return dict(json.loads(path.read_text()))


def test_each_gets_its_part_and_ends_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("RAGSERVE_")]:
        monkeypatch.delenv(name)  # what tests of an engine's start have left
    for name in ("OMP_NUM_THREADS", "CUDA_CACHE_PATH"):
        monkeypatch.delenv(name, raising=False)  # the second is SGLang's own
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: set(range(6)))
    flags: dict[str, Any] = {"kv_disk_bytes": 100, "kv_host_bytes": 50, "engine_args": {"page_size": 1}}
    flags |= {"sparse_attention": "on", "kv_offload_bytes": 30}
    monkeypatch.setenv("RAGSERVE_REGISTRY_URL", "postgresql://u:secret@db/registry")
    monkeypatch.setenv("RAGSERVE_EMBEDDER", "openai:http://models/v1#e5")
    monkeypatch.setenv("RAGSERVE_EMBEDDER_API_KEY", "secret")
    monkeypatch.setenv("RAGSERVE_RERANK_API_KEY", "secret")
    settings = load(data_dir=tmp_path, replicas=2, api_key="users", dtype="float32", **flags)
    (tmp_path / module.SAMKV_FILE).write_text("profile")
    with replicas(settings) as started:
        found = [told(tmp_path, number) for number in range(2)]
        assert len(set(started.urls)) == 2
        assert started.why_failed() == ""
        key = started.settings.engine_api_key
        assert key is not None
        for number, one in enumerate(found):
            port = started.urls[number].rpartition(":")[2]
            assert one["arguments"][:3] == ["-m", "ragserve.cli", "serve"]
            assert one["arguments"][3:] == [
                *("--worker", "--host", "127.0.0.1", "--port", port),
                *("--data-dir", str(tmp_path / "workers" / str(number))),
            ]
            values = one["environment"]
            assert values.pop("RAGSERVE_API_KEY") == key.get_secret_value()
            assert values.pop("OMP_NUM_THREADS") == "3"
            assert values.pop("CUDA_VISIBLE_DEVICES") == ""
            assert {name: value for name, value in values.items() if "QUIET" not in name} == {
                "RAGSERVE_DTYPE": "float32",
                "RAGSERVE_ENGINE_ARGS": '{"page_size": 1}',
                "RAGSERVE_KV_DISK_BYTES": "50",
                "RAGSERVE_KV_OFFLOAD_BYTES": "15",
                "RAGSERVE_KV_HOST_BYTES": "25",
                "RAGSERVE_REPLICAS": "0",
                "RAGSERVE_SPARSE_ATTENTION": "on",
            }, "what was set, its part of the budgets, and nothing of the server's own"
            folder = tmp_path / "workers" / str(number)
            assert (folder / module.SAMKV_FILE).read_text() == "profile"
    for number, one in enumerate(found):
        assert not psutil.pid_exists(one["pid"])
        assert (tmp_path / "workers" / str(number) / "ended").exists(), "it had time to write"


def test_one_that_dies_is_started_again_after_a_pause(tmp_path: Path) -> None:
    with replicas(load(data_dir=tmp_path, replicas=1)) as started:
        first = told(tmp_path, 0)["pid"]
        (tmp_path / "workers" / "0" / "told.json").unlink()
        os.kill(first, signal.SIGKILL)
        (one,) = started.replicas
        assert one.process is not None
        one.process.wait(240)
        assert "exit code -9" in started.why_failed()
        now = time.monotonic()
        started.look(now)
        started.look(now + 0.5)
        assert started.why_failed(), "not at once"
        started.look(now + 1.5)
        second = told(tmp_path, 0)["pid"]
        assert second != first
        os.kill(second, signal.SIGKILL)
        one.process.wait(240)
        now = time.monotonic()
        started.look(now)
        started.look(now + 1.5)
        assert started.why_failed(), "the second time later"
        started.look(now + 2.5)
        assert not started.why_failed()


def test_gpus_are_given_out_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    with replicas(load(data_dir=tmp_path, replicas=2, tp_size=2)):
        devices = [told(tmp_path, number)["environment"]["CUDA_VISIBLE_DEVICES"] for number in range(2)]
    assert devices == ["4,5", "6,7"]
    too_many = load(data_dir=tmp_path, replicas=3, tp_size=2)
    with pytest.raises(InvalidRequest, match="need 6 GPUs; there are 4"), replicas(too_many):
        pass


def test_a_killed_server_takes_its_workers_along(tmp_path: Path) -> None:
    script = f"""
import time
from ragserve.config import load
from ragserve.fleet import replicas as module
module.sys.executable = {module.sys.executable!r}
with module.replicas(load(data_dir={str(tmp_path)!r}, replicas=1)):
    time.sleep(600)
"""
    python = os.path.realpath(f"/proc/{os.getpid()}/exe")
    # it is no environment's Python, which would find what is installed to be edited
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(REPO / "index")])}
    with subprocess.Popen([python, "-c", script], env=environment) as server:
        worker = psutil.Process(told(tmp_path, 0)["pid"])
        server.kill()
    eventually(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, "its end")


def test_without_replicas_the_addresses_of_the_settings_count(tmp_path: Path) -> None:
    with replicas(load(data_dir=tmp_path, workers="http://a:1, http://b:2")) as started:
        assert started.urls == ["http://a:1", " http://b:2"]
        assert started.why_failed() == ""
    assert not (tmp_path / "workers").exists()


def test_places_of_the_engine_exclude_each_other() -> None:
    for both in (
        {"workers": "http://a:1", "replicas": 2},
        {"workers": "http://a:1", "engine_url": "http://b:1"},
    ):
        with pytest.raises(ValueError, match="exclude each other"):
            load(**both)
