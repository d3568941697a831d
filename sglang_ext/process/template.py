"""A process that has imported what SGLang's processes import of other packages, and is forked for each.

All of them import PyTorch and transformers, which is half of what a start takes on a CPU. `start` begins that
while the server still imports what it needs itself. The template (`multiprocessing.forkserver`) has no
threads, and ends with the server. It imports nothing of SGLang: some of its modules read the environment when
they are imported, which `Target` brings. Where there is an accelerator the processes are spawned, as SGLang
does: one of the packages might use it, and a process that has done so cannot be forked.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import setproctitle

from sglang_ext.process.parent import PARENT_VARIABLE

_ACCELERATORS = ("nvidia*", "kfd", "dxg", "accel*", "davinci*", "dri/renderD*")
_MODULES = "sglang_ext.process.template_modules"


def start() -> None:
    """Begin to import, where there is no accelerator. Returns at once."""
    devices = Path("/dev")
    if sys.platform == "linux" and not any(next(devices.glob(each), None) for each in _ACCELERATORS):
        os.environ[PARENT_VARIABLE] = str(os.getpid())
        multiprocessing.set_forkserver_preload([_MODULES])
        _run()


@contextmanager
def used() -> Iterator[int]:
    """While it lasts, processes that SGLang wants spawned are forked from the template, if there is one.
    Yields the process that will be their parent."""
    if _pid() is not None:
        _run()  # it may have been killed
    if (pid := _pid()) is None:
        yield os.getpid()
        return
    choose = multiprocessing.set_start_method

    def forked(_method: str | None, force: bool = False) -> None:
        choose("forkserver", force=force)

    multiprocessing.set_start_method = forked  # type: ignore[assignment]
    try:
        yield pid
    finally:
        multiprocessing.set_start_method = choose


class Target:
    """A function of `processes`, for a process that takes over this one's environment before it imports
    anything else."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        _function(self._name)(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, dict[str, str]]]:
        return _with_environment, (self._name, {**os.environ})


def _with_environment(name: str, environment: dict[str, str]) -> Callable[..., None]:
    setproctitle.getproctitle()  # finds its memory by the environment, once: SGLang names its processes
    os.environ.clear()
    os.environ.update(environment)
    return _function(name)


def _function(name: str) -> Callable[..., None]:
    from sglang_ext.process import processes

    found: Callable[..., None] = getattr(processes, name)
    return found


def _run() -> None:
    # Its socket is a temporary file: the disk may be full, or the folder's name too long for one.
    with suppress(OSError):
        forkserver.ensure_running()


def _pid() -> int | None:
    pid: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return pid
