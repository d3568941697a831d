"""A process that has imported what servers need of others, torch and transformers above all, and is forked
for each server that a test starts: ``python -m tests.integration.fork_parent DESCRIPTOR PARENT`` serves the
requests of `forked_starts.ForkParent`, of process ``PARENT``, that come by the socket ``DESCRIPTOR``.

What reads the environment when it is imported (`OF_AN_ENVIRONMENT`) is not imported in advance: that of
each server is its own. It has no threads, so forks miss none.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import sys
import warnings
from typing import Any
from unittest import mock

from ragserve.children import end_with_parent
from sglang_ext.sglang_internals.imports import collect_again

MODULES = (
    *("httpx", "jsonschema", "mcp", "pydantic.v1", "ragserve.api.app", "sentence_transformers", "typer"),
    *("sglang.srt.layers.quantization", "sglang.srt.managers.schedule_policy"),
    *("sglang.srt.model_loader.weight_utils", "sglang.srt.server_args"),
)
"""With SGLang's models and what `sglang_ext.process.template_modules` imports nearly all that servers do."""
OF_AN_ENVIRONMENT = (
    "prometheus_client",
    "sglang.srt.debug_utils.dumper",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.registry",
    "sglang_ext.plugin",
)
MESSAGE_BYTES = 2**17


def import_modules() -> None:
    """Import them, and have them never collected as garbage."""
    gc.disable()
    importlib.import_module("sglang_ext.process.template_modules")
    sys.meta_path.insert(0, _Later)
    with warnings.catch_warnings(), mock.patch.dict(os.environ, SGLANG_USE_PICKLE_IPC="0"):  # as servers do
        warnings.simplefilter("ignore")
        for name in MODULES:
            importlib.import_module(name)
        models = importlib.import_module("sglang.srt.models")
        for each in pkgutil.iter_modules(models.__path__, "sglang.srt.models."):
            with contextlib.suppress(Exception):  # as SGLang does; servers import the rest
                importlib.import_module(each.name)
    sys.meta_path.remove(_Later)
    collect_again()


class _Later:
    """An import hook that finds nothing, and lets nobody import `OF_AN_ENVIRONMENT` yet."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> None:
        if any(name == each or name.startswith(f"{each}.") for each in OF_AN_ENVIRONMENT):
            raise ModuleNotFoundError(f"{name} is imported by servers", name=name)


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
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
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
