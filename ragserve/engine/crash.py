"""The end of the server after one of SGLang's processes has died.

SGLang sends its main process SIGQUIT, from the dying process or within a second from a thread that watches
them, and kills everything on it. Here the requests end with an error first, and the server with a reason."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import psutil

from ragserve.errors import EngineError, Unavailable

T = TypeVar("T")

log = logging.getLogger(__name__)
DEADLINE_S = 8.0
EXIT_CODE = 1
_HINT = (
    "See the log above for the cause; without one, the system killed it, mostly for lack of memory (dmesg): "
    "start the server again with a smaller --max-total-tokens, --mem-fraction-static or --kv-host-bytes."
)


@contextlib.contextmanager
def start_explained() -> Iterator[None]:
    """Raise EngineError in place of SGLang's error for a process that has ended before it was ready."""
    try:
        yield
    except RuntimeError as error:
        said = str(error)
        if "died during initialization" not in said and not said.startswith("Initialization failed"):
            raise
        raise EngineError(f"The engine did not start: {said.split('. ')[0]}.", hint=_HINT) from error


class CrashHandler:
    """Watches the processes of ``manager``, a TokenizerManager; ``stop`` asks the server to end."""

    def __init__(self, manager: Any, stop: Callable[[], None]) -> None:
        self._manager = manager
        self._stop = stop
        self._crashed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.error: EngineError | None = None

    def install(self) -> None:
        """Replace SGLang's handler. Outside the main thread, the loop's owner handles signals."""
        with contextlib.suppress(RuntimeError, ValueError):
            asyncio.get_running_loop().add_signal_handler(signal.SIGQUIT, self.crashed)

    def crashed(self) -> None:
        """End all requests with an error, and the server soon after."""
        if self.error is not None:
            return
        self.error = EngineError(f"The engine has died: {self._cause()}.", hint=_HINT, code="engine_died")
        log.error("%s The server ends.", self.error)
        timer = threading.Timer(DEADLINE_S, end_now)  # whatever holds up an orderly end
        timer.daemon = True
        timer.start()
        self._crashed.set_result(None)
        self._end_requests()
        self._stop()

    def close(self) -> None:
        """Watch no longer: the processes are about to be ended."""
        watchdog = self._manager._subprocess_watchdog
        if watchdog is not None:
            watchdog.stop()

    def check(self) -> None:
        """Raise Unavailable for a new request after the crash."""
        if self.error is not None:
            raise self._refusal()

    async def unless_crashed(self, work: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T:
        """Await ``work``, which waits for the engine. Raises Unavailable if the engine dies first."""
        self.check()
        task = asyncio.ensure_future(work)
        awaited: set[asyncio.Future[Any]] = {task, self._crashed}
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            raise self._refusal()
        return task.result()

    def _refusal(self) -> Unavailable:
        return Unavailable(str(self.error and self.error.message), hint="It has to be started again.")

    def _cause(self) -> str:
        self.close()
        watchdog = self._manager._subprocess_watchdog
        if watchdog is None:
            return "SGLang reports a failed process"
        dead = [
            f"{name} (process {process.pid}) ended with {_exit(process.exitcode)}"
            for process, name in zip(watchdog._processes, watchdog._names, strict=True)
            if not process.is_alive()
        ]
        return "; ".join(dead) or "one of its processes failed or stands still"

    def _end_requests(self) -> None:
        """Give every waiting request, SGLang's routes' too, the end that an aborted one gets."""
        from sglang.srt.managers.io_struct import AbortReq

        message = str(self.error and self.error.message)
        reason = {"type": "abort", "message": message, "status_code": 503, "err_type": "ServiceUnavailable"}
        for rid in list(self._manager.rid_to_state):
            self._manager._handle_abort_req(AbortReq(rid=rid, finished_reason=reason))


def end_now(status: int = EXIT_CODE) -> None:
    """End this process and its children without an orderly end.

    Imports nothing: the main thread may be importing SGLang, and an import here would wait for it."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(status)


def _exit(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit code {code}"
    return f"signal {-code} ({signal.Signals(-code).name})"
