"""A process that has imported what servers need of others, torch and transformers above all, and is forked
for each server that a test starts: ``python -m tests.integration.fork_parent DESCRIPTOR PARENT`` serves the
requests of `forked_starts.ForkParent`, of process ``PARENT``, that come by the socket ``DESCRIPTOR``.

Nothing of SGLang and little of ours is imported in advance: some of their modules read the environment when
they are imported, and that of each server is its own. It has no threads, so forks miss none.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import socket
import sys
from typing import Any

from ragserve.children import end_with_parent
from sglang_ext.sglang_internals.imports import collect_again

MODULES = ("httpx", "jsonschema", "pydantic.v1", "typer")
"""With those of `sglang_ext.process.template_modules` three quarters of what importing a server takes."""
MESSAGE_BYTES = 2**17


def import_modules() -> None:
    """Import them, and have them never collected as garbage."""
    gc.disable()
    for name in ("sglang_ext.process.template_modules", *MODULES, "sentence_transformers"):
        importlib.import_module(name)
    collect_again()


def _serve(requests: socket.socket) -> dict[str, Any] | None:
    """Fork for each request, and report how children end. Return the request in a child, nothing in the
    parent, when nobody asks any more."""
    running: dict[int, tuple[int, int]] = {}  # by pidfd: the child, and where its end is reported
    parent = os.getpid()
    while True:
        for ready in select.select([requests, *running], [], [])[0]:
            if ready is not requests:
                child, reported = running.pop(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                os.write(reported, str(code).encode())
                os.close(reported)
                os.close(ready)
                continue
            message, descriptors, *_ = socket.recv_fds(requests, MESSAGE_BYTES, 3)
            if not message:
                return None
            output, errors, reported = descriptors
            if not (child := os.fork()):
                end_with_parent(parent)
                os.setsid()
                os.dup2(output, 1)
                os.dup2(errors, 2)
                requests.close()
                for each in (*descriptors, *running, *(pipe for _, pipe in running.values())):
                    os.close(each)
                return dict(json.loads(message))
            os.close(output)
            os.close(errors)
            running[os.pidfd_open(child)] = (child, reported)
            requests.send(str(child).encode())


def _become(module: str, arguments: list[str], env: dict[str, str], cwd: str) -> None:
    """Run a module as a program, as ``python -m`` does in this environment."""
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    path = [each for each in env.get("PYTHONPATH", "").split(os.pathsep) if each]
    sys.path[:] = [*path, *(each for each in sys.path if each not in path)]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def serve(requests: socket.socket) -> None:
    """Serve requests, until nobody asks any more. Returns in each child, too, when its program has ended."""
    if request := _serve(requests):
        _become(**request)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[2]))
    import_modules()
    serve(socket.socket(fileno=int(sys.argv[1])))
