"""Progress of long work where no bar can be drawn: a line at each phase, and one every ten seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY_S = 10.0


@contextmanager
def progress_lines() -> Iterator[Callable[[str, str], None]]:
    """Yield ``now(phase, counts)``, which notes where the work is. A new phase is a line on stderr at once;
    the latest counts are one every `EVERY_S` seconds, and at the end if they have changed."""
    latest = printed = ("", "")
    started = time.monotonic()
    lock, ended = threading.Lock(), threading.Event()

    def line() -> None:
        nonlocal printed
        printed = latest
        told = ": ".join(part for part in latest if part)
        print(f"{time.monotonic() - started:,.0f} s  {told}", file=sys.stderr, flush=True)

    def now(phase: str, counts: str) -> None:
        nonlocal latest
        with lock:
            new, latest = phase != latest[0], (phase, counts)
            if new:
                line()

    def keep_saying() -> None:
        while not ended.wait(EVERY_S):
            with lock:
                if any(latest):
                    line()

    thread = threading.Thread(target=keep_saying, name="progress-lines", daemon=True)
    thread.start()
    try:
        yield now
    finally:
        ended.set()
        thread.join()
        if latest != printed:
            line()
