"""Targets of SGLang's child processes.

A spawned child imports its target's module first. SGLang's own targets live in modules that import
torchvision at once, which has to be prepared on a CPU-only machine (`sglang_ext.cpu.torchvision`). With the
targets here the preparation comes first, and before it the bond with the parent: a child that is still
importing when its parent dies would otherwise go on.

A terminal sends Ctrl-C to the whole process group. The children ignore it: the main process ends them when it
has finished its requests.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from typing import Any

from sglang_ext.cpu.torchvision import prepare

prepare()


def run_scheduler_process(*args: Any, **kwargs: Any) -> None:
    """Run SGLang's scheduler if the plugin is loaded; SGLang itself would only log its absence."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from sglang.srt.managers.scheduler import run_scheduler_process as run
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang_ext.plugin import require_loaded

    require_loaded()
    run(*args, **kwargs)


def run_detokenizer_process(*args: Any, **kwargs: Any) -> None:
    """Run SGLang's detokenizer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process as run

    run(*args, **kwargs)
