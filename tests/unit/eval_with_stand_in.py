"""`ragserve eval` with a worker that ignores what it can in the place of an engine:
``python -m tests.unit.eval_with_stand_in DATA WORK``."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

WORKER = """
import signal, sys, time
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
open(sys.argv[1] + ".ready", "w").write("")
time.sleep(600)
"""


def main(data: str, work: str) -> None:
    from ragserve import cli
    from ragserve.eval import parallel

    popen = subprocess.Popen

    def stand_in(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return popen([sys.executable, "-c", WORKER, command[-1]], **options)

    parallel.subprocess.Popen = stand_in  # type: ignore[attr-defined]
    sys.argv = ["ragserve", "eval", "--data", data, "--work", work]
    cli.main()


if __name__ == "__main__":
    main(*sys.argv[1:])
