"""Child processes that end with their parent, and commands that end their children when a signal ends
them."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a command to end: Ctrl-C, a supervisor, a closed terminal."""

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # loaded here, because a forked child must not import anything


def end_with_parent(parent: int) -> None:
    """Have Linux kill this process when the thread that started it ends. ``parent`` is that thread's process.

    As a ``preexec_fn`` it holds across exec. It is not inherited: a child's children call it themselves.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def ended_by_signals(first: Callable[[int], object] | None = None) -> Iterator[None]:
    """While the block lasts, the signals of `ENDING` raise ``SystemExit`` with the shell's status for them,
    so that ``finally`` blocks end children and remove temporary files.

    Call it in the main thread. A signal that is ignored (nohup) is left alone, and one that has a handler, as
    Ctrl-C has, unless ``first`` is given, which is called with the signal before.
    """

    def end(number: int, _frame: Any) -> None:
        if first is not None:
            first(number)
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in ENDING}
    ours = [signal.SIG_DFL] if first is None else [h for h in before.values() if h is not signal.SIG_IGN]
    taken = [number for number in ENDING if before[number] in ours]
    for number in taken:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number])
