"""`ragserve` as a program whose engine's processes are forked from it, with all that it has imported.

SGLang spawns them: each imports torch, transformers and SGLang again, half of what a start costs. A fork
differs in what it inherits, so each child begins by giving that up: descriptors (locks and sockets would stay
open after their owner) and signal handlers. The environment, the parent, the session and the exit codes are
those of a spawned child. Only the CPU platform may fork; a process that uses CUDA cannot.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing import popen_fork
from multiprocessing.connection import Connection
from typing import Any

from ragserve.children import end_with_parent
from ragserve.cli import main
from ragserve.engine import compat
from sglang_ext.process import processes
from sglang_ext.process.parent import PARENT_VARIABLE

STANDARD = {0, 1, 2}


class ForkPopen(popen_fork.Popen):
    """A fork that remembers which descriptors were open before it made its own."""

    def _launch(self, process_obj: Any) -> None:
        process_obj.inherited = _descriptors()
        super()._launch(process_obj)  # type: ignore[misc]


def fork_engines() -> None:
    """Make SGLang fork the processes that it asks to be spawned."""
    choose = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda _method, force=False: choose("fork", force=force)  # type: ignore
    popen_fork.Popen = ForkPopen  # type: ignore[misc]
    compat.start_template = lambda: None  # this process is one
    for name in ("run_scheduler_process", "run_detokenizer_process"):
        setattr(processes, name, _as_spawned(getattr(processes, name)))


def _as_spawned(target: Callable[..., None]) -> Callable[..., None]:
    parent = os.getpid()

    def run(*args: Any, **kwargs: Any) -> None:
        end_with_parent(parent)
        os.environ[PARENT_VARIABLE] = str(os.getpid())
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)) and number != signal.SIGINT:
                signal.signal(number, signal.SIG_DFL)
        passed = {each.fileno() for each in (*args, *kwargs.values()) if isinstance(each, Connection)}
        _detach(multiprocessing.current_process().inherited - STANDARD - passed)  # type: ignore[attr-defined]
        target(*args, **kwargs)

    return run


def _descriptors() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/fd")}


def _detach(descriptors: set[int]) -> None:
    """Point descriptors at nothing. Their objects still exist and would close a number used again."""
    nothing = os.open(os.devnull, os.O_RDWR)  # it may have a number that was free again at the fork
    for number in (descriptors & _descriptors()) - {nothing}:
        os.dup2(nothing, number, inheritable=False)
    os.close(nothing)


if __name__ == "__main__":
    fork_engines()
    main()
