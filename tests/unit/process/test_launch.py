"""The end of a server: its children are killed, and nothing is left to complain."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import subprocess
from multiprocessing import resource_tracker
from joblib.externals.loky.backend import resource_tracker as loky
from sglang_ext.process.launch import _end_children

resource_tracker.register("/ragserve-left", "semaphore")
loky.ensure_running()
name = "/tmp/ragserve-test-launch"
loky.register(name, "file")
child = subprocess.Popen(["sleep", "600"])
_end_children()
print(child.wait(30))
loky.unregister(name, "file")
"""


def test_joblibs_resource_tracker_outlives_the_other_children() -> None:
    """Killed, it is started anew at the next message, and does not know what the first one knew. That of
    multiprocessing would complain of semaphores that killed children leave."""
    ended = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=240)
    assert (ended.returncode, ended.stdout.strip(), ended.stderr) == (0, "-9", "")
