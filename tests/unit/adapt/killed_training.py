"""Trains the tiny model in a folder and kills itself after a step:
``python -m tests.unit.adapt.killed_training MODEL WORK``."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from tests.unit.adapt.test_training import KILLED_AT, make


def on_step(step: int) -> None:
    if step == KILLED_AT:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]), on_step=on_step).run()
