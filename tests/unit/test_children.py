"""No process outlives the one that started it, whatever ends that one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import MODEL
from tests.integration.forked_starts import Forked, start_module

ENDS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
GONE_S = 120

# the parsing process, stopped, so that the end of its input does not end it
PARSER = """
import os, signal, sys, time
from ragserve.ingest.parsing.parse_process import ParseProcess, ParseRequest
from ragserve.ingest.tokenizer import TokenizerSource
tokenizer = TokenizerSource.load({model!r})
parser = ParseProcess(tokenizer_json=tokenizer.json, chunk_tokens=64, max_bytes=100, timeout_s=60)
parser.parse(ParseRequest({path!r}, "a.txt", ".txt", salt=""))
os.kill(parser.pid, signal.SIGSTOP)
print(parser.pid, flush=True)
time.sleep(600)
"""

# an engine that is being started: SGLang's child is still loading what it was sent
ENGINE = """
import multiprocessing, os, time
class Loading:
    def __reduce__(self):
        return exec, ({loading!r},)
if __name__ == "__main__":
    from sglang_ext.process import template
    from sglang_ext.process.parent import PARENT_VARIABLE
    if {forked}:
        template.start()
    with template.used() as parent:
        os.environ[PARENT_VARIABLE] = str(parent)
        multiprocessing.set_start_method("spawn", force=True)
        child = multiprocessing.Process(
            target=template.Target("run_scheduler_process"), args=(Loading(),))
        child.start()
        print(child.pid, flush=True)
        time.sleep(600)
"""


LOADING = """
import setproctitle, time
setproctitle.setproctitle("sglang::scheduler")
open({ready!r}, "w").write("")
time.sleep(600)
"""


# a command whose main thread is importing SGLang, with a child of its own
IMPORTING = """
import subprocess, sys, threading, time
from importlib.abc import MetaPathFinder
from ragserve.engine.crash import end_now
class Slow(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "sglang":
            print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
            threading.Timer(0.1, end_now, (143,)).start()
            time.sleep(600)
sys.meta_path.insert(0, Slow())
import sglang
"""


def wait_for(path: Path, process: subprocess.Popen[bytes] | Forked) -> None:
    deadline = time.monotonic() + 240
    while not path.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)


def assert_all_end(processes: list[psutil.Process]) -> None:
    assert processes
    _, alive = psutil.wait_procs(processes, timeout=GONE_S)
    for process in alive:
        process.kill()
    assert not alive


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "set.jsonl"
    path.write_text('{"id": "1", "question": "q", "answers": ["a"], "docs": [["t", "a"]]}\n')
    return path


@pytest.mark.parametrize("number", ENDS, ids=lambda number: number.name)
def test_workers_of_an_evaluation_end_with_it(number: signal.Signals, data: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    arguments = [str(data), str(work)]
    with (tmp_path / "said.txt").open("wb") as said:
        process = start_module("tests.unit.eval_with_stand_in", arguments, {}, said, said)
    try:
        wait_for(work / "job-0.json.ready", process)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        assert_all_end(children)
        status = process.wait(240)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert status == 128 + number


def test_the_worker_of_a_killed_evaluation_ends_with_it(data: Path, tmp_path: Path) -> None:
    """Its engine's processes end with the worker: see below, and for a server `test_wheel`."""
    work = tmp_path / "work"
    command = [sys.executable, "-m", "ragserve.cli", "eval", "--data", str(data), "--work", str(work)]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        wait_for(work / "worker-0.log", process)
        deadline = time.monotonic() + 240
        while not (workers := _workers(process)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.kill()
        assert_all_end(workers)
    finally:
        process.kill()
        process.wait()


def _workers(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        children = psutil.Process(process.pid).children(recursive=True)
        return [each for each in children if "ragserve.eval.engine_worker" in each.cmdline()]
    return []


def test_a_busy_parsing_process_ends_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("words")
    script = PARSER.format(model=str(MODEL), path=str(tmp_path / "a.txt"))
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    process.kill()
    process.communicate()
    assert_all_end([child])


@pytest.mark.parametrize(("wanted", "folder"), [(False, ""), (True, ""), (True, "long" * 30)])
def test_processes_of_an_engine_end_with_it_while_they_are_loading(
    wanted: bool, folder: str, tmp_path: Path
) -> None:
    """Forked from a template, or spawned: also where the template's socket has no place."""
    script, ready, temporary = tmp_path / "engine.py", tmp_path / "ready", tmp_path / folder
    script.write_text(ENGINE.format(loading=LOADING.format(ready=str(ready)), forked=wanted))
    temporary.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment |= {"TMPDIR": str(temporary)} if folder else {}
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    wait_for(ready, process)
    parents = [each.pid for each in child.parents()]
    assert (process.pid == parents[0]) is not (wanted and not folder)
    assert child.name().startswith("sglang::sched"), "as operators look for it"
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    assert_all_end(children)


def test_a_command_ends_while_it_is_importing_sglang() -> None:
    process = subprocess.Popen([sys.executable, "-c", IMPORTING], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        child = psutil.Process(int(process.stdout.readline()))
        status = process.wait(240)  # it took as long as the import
    finally:
        process.kill()
        process.communicate()
    assert status == 143
    assert_all_end([child])
