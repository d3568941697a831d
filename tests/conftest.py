"""Settings shared by all tests: no network, no GPU unless the machine has one, reproducible examples."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import certifi
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal import entropy

from sglang_ext.sglang_internals.imports import collect_again
from tests.environment import set_environment
from tests.unit.api.browser import PROGRAM

EXHAUSTIVE = os.environ.get("RAGSERVE_EXHAUSTIVE") == "1"
"""True under ``scripts/test --exhaustive``: every kill point, long histories, more random examples."""

# No limits of time: on two busy cores any example is slow once. Only exhaustive runs draw new examples.
_ALIKE = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("suite", **_ALIKE, max_examples=15, derandomize=True)
settings.register_profile("long", **_ALIKE, max_examples=250, print_blob=True)
settings.load_profile("long" if EXHAUSTIVE else "suite")
# Hypothesis would save and restore numpy's global generator around every example: 0.3 ms, and nobody uses it.
entropy.NP_RANDOM = object()

set_environment()


def _one_certificate() -> str:
    """A file with one certificate. Every new HTTP client reads those of the machine, which takes 20 ms, and
    no test uses TLS."""
    first, end, _ = Path(certifi.where()).read_text(encoding="utf-8").partition("-----END CERTIFICATE-----")
    handle, name = tempfile.mkstemp(suffix=".pem")
    with os.fdopen(handle, "w") as file:
        file.write(first[first.index("-----BEGIN") :] + end)
    atexit.register(Path(name).unlink, missing_ok=True)
    return name


os.environ["SSL_CERT_FILE"] = _one_certificate()
# Commands under test would inherit what a shell ignores for `scripts/test`'s background processes, and nohup.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
for _name in [name for name in os.environ if name.startswith("RAGSERVE_")]:
    if _name != "RAGSERVE_ATTENTION":  # the attention backend on machines without FlashAttention 3's library
        del os.environ[_name]  # tests must not depend on the developer's own settings

REPO = Path(__file__).resolve().parent.parent
MODEL = REPO / "examples" / "models" / "ragserve-tiny"


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all test modules are imported: `pytest_collection_finish`
    from ragserve.engine.compat import prepare

    prepare()  # transformers, imported by several tests, imports torchvision


def pytest_collection_finish() -> None:
    collect_again()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests with the marker `gpu` or `browser` where the machine has no such device or program."""
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if PROGRAM is None:
        for item in items:
            if item.get_closest_marker("browser"):
                item.add_marker(pytest.mark.skip(reason="needs Chromium"))


@pytest.fixture(scope="session", autouse=True)
def _say_version(record_testsuite_property: Callable[[str, object], None]) -> None:
    """Say in the results (``--junitxml``) of which SGLang they are, for `tests/canary.py`."""
    record_testsuite_property("sglang", version("sglang"))


@pytest.fixture(scope="session")
def _directories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("directories")


@pytest.fixture(autouse=True)
def _no_settings_file(_directories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test in an empty directory: a ragserve.toml there would change the defaults. ``mktemp`` would
    look at those of all tests before to number it."""
    monkeypatch.chdir(tempfile.mkdtemp(dir=_directories))


@pytest.fixture(scope="session")
def model_path() -> Path:
    return MODEL
