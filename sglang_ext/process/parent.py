"""The bond of SGLang's processes with the one that starts them. SGLang makes it only once all is imported."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT_VARIABLE = "RAGSERVE_ENGINE_PID"
"""The process that will have started those that read it."""


def end_with_parent() -> None:
    """Have Linux kill this process when its parent ends, if the environment says who that is."""
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is None or sys.platform != "linux":
        return
    os.environ[PARENT_VARIABLE] = str(os.getpid())  # for children of this one
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != int(parent):  # it ended before the call
        os.kill(os.getpid(), signal.SIGKILL)
