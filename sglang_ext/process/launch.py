"""Starts SGLang's own HTTP server with another ASGI app in front of it, in one process group.

No other module depends on how SGLang's main process is put together. This one relies on
``launch_server(server_args, run_scheduler_process_func=, run_detokenizer_process_func=)``, which serves the
module's ``app`` by uvicorn (`versions.served_by`), and on ``get_global_state().tokenizer_manager`` and its
``_subprocess_watchdog``.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from sglang_ext import versions
from sglang_ext.process import template
from sglang_ext.process.parent import PARENT_VARIABLE
from sglang_ext.sglang_internals.imports import without_collection, without_semaphores

GRACEFUL_SHUTDOWN_S = 10
_LOADS = re.compile(r"/dev/shm/sgl(?:ang_loads|_shm)_\w+(?:\.shm)?$", re.MULTILINE)
_TRACKER = "joblib.externals.loky.backend.resource_tracker"


class Launcher:
    """Runs the server. ``make_app(sglang_app)`` builds the app that uvicorn serves in place of SGLang's, on
    ``listener``, a socket that is bound to the address of the server's arguments. Idle connections stay open
    for ``keep_alive_s``."""

    def __init__(self, make_app: Callable[[Any], Any], listener: socket.socket, keep_alive_s: int) -> None:
        self._make_app = make_app
        self._keep_alive_s = keep_alive_s
        self._listener = listener
        self._server: Any = None

    def run(self, server_args: Any) -> None:
        """Start the scheduler and detokenizer processes and serve until stopped. Ends all child processes."""
        with without_collection():
            from sglang.srt.entrypoints import http_server

        without_semaphores()
        try:
            # the controller of several data-parallel schedulers starts them itself
            parent = template.used() if server_args.dp_size == 1 else nullcontext(os.getpid())
            with versions.served_by(http_server, self._serve, self.stop), parent as pid:
                os.environ[PARENT_VARIABLE] = str(pid)  # read by the children
                http_server.launch_server(
                    server_args,
                    run_scheduler_process_func=template.Target("run_scheduler_process"),
                    run_detokenizer_process_func=template.Target("run_detokenizer_process"),
                )
        finally:
            _watch_no_more(http_server)
            _end_children()

    def _serve(self, sglang_app: Any, **options: Any) -> None:
        import uvicorn
        from sglang.srt.entrypoints import http_server

        _hide_load_figures(http_server.get_global_state())
        options.setdefault("timeout_graceful_shutdown", GRACEFUL_SHUTDOWN_S)
        options["timeout_keep_alive"] = self._keep_alive_s
        self._server = uvicorn.Server(uvicorn.Config(self._make_app(sglang_app), **options))
        self._server.run(sockets=[self._listener])

    def stop(self) -> None:
        """Ask the server to finish its requests and stop."""
        if self._server is not None:
            self._server.should_exit = True


def _watch_no_more(http_server: Any) -> None:
    """Stop SGLang's thread that kills this process when a child has died: an app that could not be made would
    end without its error."""
    state = http_server.get_global_state()
    watchdog = state and state.tokenizer_manager._subprocess_watchdog
    if watchdog is not None:
        watchdog.stop()


def _hide_load_figures(state: Any) -> None:
    """Remove the name of the shared memory by which the one scheduler tells its load. Both ends have opened
    it, and SGLang never removes it."""
    reader: Any = getattr(state and state.tokenizer_manager, "load_snapshot_reader", None)
    path = getattr(reader, "path", None)  # else it has a socket's end
    if path is not None and reader.dp_size == 1 and reader.read_all():
        Path(path).unlink(missing_ok=True)


def _shared_memory(pid: int) -> set[Path]:
    """What SGLang has in /dev/shm for the process."""
    with suppress(OSError):
        return {Path(found) for found in _LOADS.findall(Path(f"/proc/{pid}/maps").read_text())}
    return set()


def _end_children() -> None:
    """Kill all children but joblib's resource tracker, and remove the shared memory that they leave. The
    tracker ends by itself with this process; one that is killed is started anew at exit, and complains of
    what it does not know. That of multiprocessing would complain of what killed children have left."""
    import psutil

    tracker = getattr(sys.modules.get(_TRACKER), "_resource_tracker", None)
    for child in psutil.Process().children(recursive=True):
        if child.pid != getattr(tracker, "_pid", None):
            left = _shared_memory(child.pid)
            with suppress(psutil.NoSuchProcess):
                child.kill()
            for path in left:
                path.unlink(missing_ok=True)


def tokenizer_manager() -> Any:
    """Return SGLang's TokenizerManager of this process; valid once the server's app is being started."""
    from sglang.srt.entrypoints.http_server import get_global_state

    state = get_global_state()
    if state is None:
        raise RuntimeError("SGLang is not running in this process")
    return state.tokenizer_manager


def app_state() -> Any:
    """Return the state of SGLang's app, which holds what answers its routes."""
    from sglang.srt.entrypoints.http_server import app

    return app.state


def scheduler_info() -> dict[str, Any]:
    """Return the figures that the scheduler sent when it was ready: pool size, longest request, ..."""
    from sglang.srt.entrypoints.http_server import get_global_state

    return dict(get_global_state().scheduler_info)
