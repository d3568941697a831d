"""Run measurements that each need a process, and perhaps a GPU, of their own; options of their engines."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from benchmarks.lib.places import REPO
from ragserve.engine.base import EngineInfo

T = TypeVar("T")


def engine_args(attention: str | None) -> dict[str, Any]:
    """SGLang's options for an attention backend; None: SGLang's default, or what RAGSERVE_ATTENTION names."""
    attention = attention or os.environ.get("RAGSERVE_ATTENTION")
    return {"attention_backend": attention, "sampling_backend": "pytorch"} if attention else {}


def listed(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Return the type of an option whose values are separated by commas; an empty text has none."""
    return lambda text: [kind(each) for each in text.split(",") if each]


def described(info: EngineInfo) -> str:
    """The engine for a report: its model without the folders above this project."""
    root = f"{REPO}/"
    return str(
        replace(info, model=info.model.removeprefix(root), tokenizer=info.tokenizer.removeprefix(root))
    )


def this_script() -> list[str]:
    """The command that runs the current script once more, without arguments."""
    return [sys.executable, "-m", sys.modules["__main__"].__spec__.name]


def fan_out(commands: Mapping[str, Sequence[str]], gpus: int) -> list[str]:
    """Run the commands, ``gpus`` at a time, each on its own GPU; returns the names of those that failed."""
    waiting = list(commands.items())
    running: dict[int, tuple[str, subprocess.Popen[bytes]]] = {}
    failed = []
    while waiting or running:
        for gpu in range(gpus):
            if gpu in running:
                name, process = running[gpu]
                code = process.poll()
                if code is None:
                    continue
                del running[gpu]
                if code:
                    failed.append(name)
                print(f"{name}: {f'failed with {code}' if code else 'done'}", flush=True)
            if gpu not in running and waiting:
                name, command = waiting.pop(0)
                environment = {**os.environ, "PYTHONUNBUFFERED": "1"} | (
                    {} if gpus == 1 else {"CUDA_VISIBLE_DEVICES": str(gpu)}
                )
                running[gpu] = (name, subprocess.Popen(list(command), env=environment))
        time.sleep(0.2)
    return failed
