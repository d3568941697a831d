"""Targets of SGLang's child processes.

A spawned child imports its target's module first. SGLang's own targets live in modules that import
torchvision at once, which has to be prepared on a CPU-only machine (`sglang_ext.cpu.torchvision`). With the
targets here the preparation comes first, and before it the bond with the parent: a child that is still
importing when its parent dies would otherwise go on.

A terminal sends Ctrl-C to the whole process group. The children ignore it: the main process ends them when it
has finished its requests.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from typing import Any

from sglang_ext.cpu.torchvision import prepare
from sglang_ext.process.parent import end_with_parent
from sglang_ext.sglang_internals import quiet
from sglang_ext.sglang_internals.imports import (
    collect_again,
    with_sklearn,
    without_semaphores,
    without_sklearn,
)

if multiprocessing.current_process().name != "MainProcess":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from now on: it would end the imports with a traceback
    end_with_parent()
    # Unpickling the target's arguments imports most of SGLang; `_imported` ends both.
    gc.disable()
    without_sklearn()
if quiet.QUIET_VARIABLE in os.environ:
    quiet.silence()
prepare()


def _imported() -> None:
    without_semaphores()
    collect_again()
    with_sklearn()


def run_scheduler_process(*args: Any, **kwargs: Any) -> None:
    """Run SGLang's scheduler if the plugin is loaded; SGLang itself would only log its absence."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from sglang.srt.managers.scheduler import run_scheduler_process as run
    from sglang.srt.plugins import load_plugins

    load_plugins()
    _imported()
    import torch

    from sglang_ext.diagnostics.compilations import compilations
    from sglang_ext.process.hooks import require_loaded

    require_loaded()
    if torch.cuda.is_available():  # else nothing is compiled
        compilations.watch()
    run(*args, **kwargs)


def run_detokenizer_process(*args: Any, **kwargs: Any) -> None:
    """Run SGLang's detokenizer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process as run

    _imported()
    run(*args, **kwargs)
