"""An installed wheel works without the checkout: it brings the model, its gate and the pins, and serves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest

from ragserve.children import end_with_parent
from ragserve.client import Client
from ragserve.engine.ports import hold_port, port_of
from tests.conftest import REPO

BUILT_FROM = (
    *("ragserve", "sglang_ext", "index", "kernels", "requirements", "examples/models"),
    *("pyproject.toml", "README.md", "LICENSE"),
)
# refused unless the server reads the gate's file beside the model
VERIFIED = {"strategy": "concat", "strategy_options": {"recompute": "sentences", "share": 0.1}}
WHERE = """
import json, ragserve, ragserve_index, ragserve_kernels, sglang_ext
from ragserve.config import load
from ragserve.profiles.samkv import place_of
settings = load()
paths = [m.__file__ for m in (ragserve, ragserve_index, ragserve_kernels, sglang_ext)] + [settings.model]
print(json.dumps({"paths": paths, "samkv": str(place_of(settings, "x"))}))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel; third-party packages come from this environment's folder.

    The ``.pth`` file adds that folder to ``sys.path`` only: its own ``.pth`` files, the editable install
    among them, are not read.
    """
    tmp = tmp_path_factory.mktemp("wheel")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    for name in BUILT_FROM:
        source, target = REPO / name, tmp / "tree" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target, ignore=ignore) if source.is_dir() else shutil.copy(source, target)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [
        "wheel",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        "--wheel-dir",
        str(tmp),
        str(tmp / "tree"),
    ]
    subprocess.run([*pip, *build], check=True)
    [wheel] = tmp.glob("ragserve-*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp / "venv")], check=True)
    python = tmp / "venv" / "bin" / "python"
    subprocess.run(
        [*pip, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)], check=True
    )
    [site] = (tmp / "venv" / "lib").glob("python*/site-packages")
    (site / "third-party.pth").write_text(sysconfig.get_path("purelib") + "\n")
    shutil.rmtree(tmp / "tree")
    return tmp / "venv"


@pytest.fixture
def clean(tmp_path: Path) -> dict[str, str]:
    """Nothing of this process's environment, such as PYTHONPATH or RAGSERVE_* variables."""
    threads = os.environ.get("OMP_NUM_THREADS", "2")
    return {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": threads}


@contextmanager
def serving(environment: Path, clean: dict[str, str], folder: Path) -> Iterator[str]:
    held = hold_port()
    port = port_of(held)
    log = folder / "server.log"
    command = [str(environment / "bin" / "ragserve"), "serve", "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=clean,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=partial(end_with_parent, os.getpid()),
        )
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 200
    try:
        while True:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            try:
                if httpx.get(f"{url}/ready", timeout=5).status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(60)
        held.close()


def test_a_wheel_serves_without_the_checkout(
    environment: Path, clean: dict[str, str], tmp_path: Path
) -> None:
    python, ragserve = environment / "bin" / "python", environment / "bin" / "ragserve"
    found = json.loads(subprocess.check_output([python, "-c", WHERE], cwd=tmp_path, env=clean))
    assert all(Path(path).is_relative_to(environment) for path in found["paths"]), found
    assert found["samkv"] == "ragserve-data/ragserve-samkv.json", (
        "an installed model's folder is not written to"
    )

    doctor = subprocess.run(
        [ragserve, "doctor", "--json", "--port", "0"],
        cwd=tmp_path,
        env=clean,
        capture_output=True,
        check=False,
    )
    report = json.loads(doctor.stdout)
    assert doctor.returncode == 0, report
    checks = {check["name"]: check for check in report["checks"]}
    assert str(environment) in checks["model"]["found"]
    assert "pins" in checks["versions"]["found"]
    assert "no pins" not in checks["versions"]["found"]

    with serving(environment, clean, tmp_path) as url, Client(url) as client:
        text = {"name": "norway", "text": "The capital of Norway is Oslo."}
        assert client.wait(client.ingest_texts([text])).counts["indexed"] == 1
        question = {"query": "What is the capital of Norway?"}
        for how in ({}, VERIFIED):
            answer = client.call("POST", "/rag/query", json=question | how)
            assert "Oslo" in answer["answer"], how
    assert (tmp_path / "ragserve-data" / "ragserve.sqlite3").exists()
