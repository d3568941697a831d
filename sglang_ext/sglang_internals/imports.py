"""Faster imports of large packages."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Keep Python's garbage collector off in a block that imports thousands of modules. It would walk again
    and again over what stays for ever: importing SGLang takes 8.7 s of a core with it and 6.9 without. What
    the block leaves is not walked later either (`gc.freeze`).
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            collect_again()


def collect_again() -> None:
    """End what `gc.disable` began."""
    gc.freeze()
    gc.enable()


def without_sklearn() -> None:
    """Hide scikit-learn from what is imported until `with_sklearn`. Transformers imports it, with SciPy, for
    a way of generating that SGLang does not use: a tenth of what importing SGLang takes.
    """
    sys.modules.setdefault("sklearn", None)  # type: ignore[arg-type]


def with_sklearn() -> None:
    """End what `without_sklearn` began."""
    if sys.modules.get("sklearn", sys) is None:
        del sys.modules["sklearn"]


def without_semaphores() -> None:
    """Let progress bars of this process lock with threads alone. tqdm's own lock has a semaphore of the
    system, which stays when a process is killed, and whose end is told to a tracker that may be gone."""
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())
