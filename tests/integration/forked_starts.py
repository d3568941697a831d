"""Servers of tests whose engine's processes are forked: what is imported is imported once (`forked_main`)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from subprocess import Popen
from typing import Any, BinaryIO
from unittest import mock

import torch

from ragserve.measuring import server
from ragserve.measuring.server import RunningServer
from tests.conftest import REPO


@contextlib.contextmanager
def forked_server(**options: Any) -> Iterator[RunningServer]:
    """`running_server`, for tests that do not ask how an engine's processes are started. With an accelerator
    they are spawned, as in production."""
    with contextlib.ExitStack() as stack:
        with mock.patch.object(server, "spawn", server.spawn if torch.cuda.is_available() else _forking):
            running = stack.enter_context(server.running_server(**options))
        yield running


_spawn = server.spawn


def _forking(
    command: Sequence[str], output: BinaryIO, env: Mapping[str, str], *, outlive: bool = False
) -> Popen[bytes]:
    program = ["tests.integration.forked_main" if part == "ragserve.cli" else part for part in command]
    folders = [str(REPO), *filter(None, [env.get("PYTHONPATH", os.environ.get("PYTHONPATH"))])]
    return _spawn(program, output, {**env, "PYTHONPATH": os.pathsep.join(folders)}, outlive=outlive)
