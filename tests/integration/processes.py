"""The processes of a server, and whether they have ended."""

from __future__ import annotations

import time

import psutil


def family_of(pid: int) -> list[psutil.Process]:
    """A server's main process, scheduler and detokenizer, and their helpers."""
    parent = psutil.Process(pid)
    family = [parent, *parent.children(recursive=True)]
    assert len(family) >= 3, "server, scheduler, detokenizer"
    return family


def assert_gone(family: list[psutil.Process], within_s: float = 240.0) -> None:
    """No process of the family is left after a while."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline and any(map(_alive, family)):
        time.sleep(0.1)
    assert [process for process in family if _alive(process)] == []


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
