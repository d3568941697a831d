"""The server in front of SGLang's app, and its end: children are killed, and nothing is left to complain."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.process.launch import _hide_load_figures

CODE = '''
import os
import subprocess
import sys
from multiprocessing import resource_tracker
from joblib.externals.loky.backend import resource_tracker as loky
from sglang_ext.process.launch import _end_children

resource_tracker.register("/ragserve-left", "semaphore")
loky.ensure_running()
name = "/tmp/ragserve-test-launch"
loky.register(name, "file")
shared = "/dev/shm/sglang_loads_ragserve_test_{}.shm".format(os.getpid())
mapping = """
import mmap, os, sys
descriptor = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR)
os.ftruncate(descriptor, 4096)
held = mmap.mmap(descriptor, 4096)
print("mapped", flush=True)
os.read(0, 1)
"""
child = subprocess.Popen(
    [sys.executable, "-c", mapping, shared], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
)
assert child.stdout.readline() == "mapped\\n"
_end_children()
print(child.wait(240), os.path.exists(shared))
loky.unregister(name, "file")
'''

SERVED = """
import socket
import sys
from types import ModuleType, SimpleNamespace
import uvicorn
from sglang_ext.process.launch import Launcher

sglang = ModuleType("sglang.srt.entrypoints")  # a start of its own takes seconds
sglang.http_server = SimpleNamespace(
    uvicorn=uvicorn,
    _freeze_gc_after_server_warmup=None,  # later versions have it
    launch_server=lambda args, **targets: sglang.http_server.uvicorn.run("app", timeout_keep_alive=5),
    get_global_state=lambda: None,
)
for name in ("sglang", "sglang.srt", sglang.__name__):
    sys.modules[name] = sglang
uvicorn.Server.run = lambda self, sockets: print(self.config.timeout_keep_alive)
with socket.socket() as listener:
    Launcher(lambda app: app, listener, keep_alive_s=75).run(SimpleNamespace(dp_size=1))
"""

FAILED = (
    SERVED.partition("uvicorn.Server.run")[0]
    + """
import subprocess

child = subprocess.Popen(["sleep", "600"])
watchdog = SimpleNamespace(stop=lambda: print("children:", child.poll()))
manager = SimpleNamespace(_subprocess_watchdog=watchdog)
sglang.http_server.get_global_state = lambda: SimpleNamespace(tokenizer_manager=manager)
def make_app(app):
    raise ModuleNotFoundError("No module named 'mended'")
with socket.socket() as listener:
    Launcher(make_app, listener, keep_alive_s=75).run(SimpleNamespace(dp_size=1))
"""
)

BARS = """
import os
from sglang_ext.sglang_internals.imports import without_semaphores
from tqdm import tqdm

without_semaphores()
list(tqdm([1], disable=False, file=open(os.devnull, "w")))
print([lock for lock in (getattr(tqdm.get_lock(), "mp_lock", None),) if lock])
"""

CTRL_C = """
import multiprocessing
import os
import signal
import sys
from sglang_ext.cpu import torchvision

def prepare():  # the first thing that takes long
    os.kill(os.getpid(), signal.SIGINT)
    print("went on", flush=True)
    os._exit(0)

torchvision.prepare = prepare
multiprocessing.current_process().name = "SpawnProcess-1"
__import__(sys.argv[1])
"""


def test_joblibs_resource_tracker_outlives_the_other_children() -> None:
    """Killed, it is started anew at the next message, and does not know what the first one knew. That of
    multiprocessing would complain of semaphores that killed children leave. Their shared memory goes."""
    ended = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=240)
    assert (ended.returncode, ended.stdout.strip(), ended.stderr) == (0, "-9 False", "")


def test_idle_connections_stay_open_for_longer_than_sglang_keeps_them() -> None:
    """A client that keeps them as long as the server does would find some reset."""
    ended = subprocess.run([sys.executable, "-c", SERVED], capture_output=True, text=True, timeout=240)
    assert (ended.returncode, ended.stdout.strip()) == (0, "75"), ended.stderr


def test_an_app_that_cannot_be_made_ends_with_its_error() -> None:
    """SGLang's watchdog would see the children die, and kill this process before the error is printed."""
    ended = subprocess.run([sys.executable, "-c", FAILED], capture_output=True, text=True, timeout=240)
    assert (ended.returncode, ended.stdout.strip()) == (1, "children: None")
    assert ended.stderr.endswith("ModuleNotFoundError: No module named 'mended'\n")


def test_the_shared_memory_of_the_load_loses_its_name_once_both_ends_have_it(tmp_path: Path) -> None:
    def left(**reader: Any) -> bool:
        path = tmp_path / "loads"
        path.touch()
        manager = SimpleNamespace(load_snapshot_reader=SimpleNamespace(**{"path": str(path)} | reader))
        _hide_load_figures(SimpleNamespace(tokenizer_manager=manager))
        return path.exists()

    assert not left(dp_size=1, read_all=lambda: ["load"])
    assert left(dp_size=1, read_all=list), "nobody has written yet"
    assert left(dp_size=2, read_all=lambda: ["load", "load"]), "a controller may open it later"
    assert left(dp_size=1, read_all=lambda: ["load"], path=None)
    _hide_load_figures(SimpleNamespace(tokenizer_manager=SimpleNamespace()))
    _hide_load_figures(None)


@pytest.mark.parametrize("module", ["template_modules", "processes"])
def test_ctrl_c_does_not_reach_a_process_that_still_imports(module: str) -> None:
    """A terminal sends it to all processes; each would end with a traceback of its own."""
    command = [sys.executable, "-c", CTRL_C, f"sglang_ext.process.{module}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert (ended.returncode, ended.stdout.strip(), ended.stderr) == (0, "went on", "")


def test_progress_bars_of_a_server_make_no_semaphore() -> None:
    """Killed processes leave theirs, and at the end of the main process nobody tracks its own any more."""
    ended = subprocess.run([sys.executable, "-c", BARS], capture_output=True, text=True, timeout=240)
    assert (ended.returncode, ended.stdout.strip(), ended.stderr) == (0, "[]", "")
