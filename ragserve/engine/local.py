"""Engine in this process group: SGLang's processes as our children, its app behind ours."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ragserve import tracing
from ragserve.config import Settings
from ragserve.engine.base import EngineInfo, GenerateChunk, GenerateRequest, Sampling
from ragserve.engine.crash import CrashHandler, start_explained
from ragserve.engine.document_cache import ControlledCache
from ragserve.engine.ports import KEEP_ALIVE_S, hold_port, port_of
from ragserve.engine.prefill import Documents
from ragserve.engine.sent_prefixes import SentPrefixes
from ragserve.engine.server_args import resolve_sparse_attention, server_args, sparse_defaults
from ragserve.engine.stream import DocumentsMissing, StreamReader, note_failure, timed_out
from ragserve.engine.warm_up import NAMESPACE, warm_up
from ragserve.errors import EngineError, InvalidRequest, RagserveError, Unavailable
from sglang_ext.wire.measuring import measuring
from sglang_ext.wire.protocol import CONTROL_METHOD, EXACT_STRATEGIES, FULL_KEY

_MEETING = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
_FLUSH_S = 5.0  # for the write queue at the end; a service manager kills what takes too long
# Between two looks at an operation that waits for the disk: doubled from the first to the second time.
_FIRST_LOOK_S, _NEXT_LOOK_S = 0.002, 0.05
log = logging.getLogger(__name__)
T = TypeVar("T")


class LocalEngine(ControlledCache):
    """A `CachingEngine` over SGLang's TokenizerManager."""

    def __init__(
        self,
        settings: Settings,
        *,
        on_stop: Callable[[], None] | None = None,
        launched: float | None = None,
        sparse_choice: str = "",
    ) -> None:
        """``launched``: when SGLang was started, on `time.monotonic`; now by default. ``sparse_choice``: see
        `EngineInfo`."""
        self._settings = settings
        self._launched = time.monotonic() if launched is None else launched
        self._sparse_choice = sparse_choice
        self._started = False
        self._on_stop = on_stop
        self._info: EngineInfo | None = None
        self.sent_prefixes: SentPrefixes = SentPrefixes()
        self._pumps: set[asyncio.Task[Any]] = set()
        self._crash: CrashHandler | None = None
        self._documents = Documents(
            self._run, self._run_together, background_chunk=settings.background_chunk_tokens
        )

    async def start(self) -> EngineInfo:
        """Read model and limits, and send requests so that the first users do not pay for the warm-up."""
        from sglang.version import __version__ as version

        from sglang_ext.documents.fingerprint import model_fingerprint
        from sglang_ext.process.launch import app_state, scheduler_info
        from sglang_ext.sglang_internals import request_checks, stored_responses, tokenize_threads
        from sglang_ext.versions import settings_of

        asked = time.monotonic()
        manager, info = _manager(), scheduler_info()
        request_checks.install(manager, every_grammar=self._settings.grammars == "all")
        tokenize_threads.install(manager, app_state())
        stored_responses.install(app_state())
        self._crash = CrashHandler(manager, self.stop)
        args = settings_of(manager.server_args)
        cache = await self.control("info")
        self._fingerprint = cache["fingerprint"]
        decode, streaming = cache["decode"], cache["streaming_pool"]
        if ((decode or streaming) is not None) != (self._settings.sparse_attention == "on"):
            raise EngineError(
                f"The engine does not run sparse_attention={self._settings.sparse_attention}: it wrapped "
                f"{decode or streaming}.",
                hint="Leave attention_backend to SGLang, or set one that can be wrapped: see "
                "docs/sparse-decoding.md.",
            )
        self._info = EngineInfo(
            kind="local",
            model=args.model_path,
            tokenizer=args.tokenizer_path,
            version=version,
            device=args.device,
            attention_backend=_attention(args, cache["prefill_kernels"]),
            context_length=manager.context_len,
            max_total_tokens=info["max_total_num_tokens"],
            strategies=(*EXACT_STRATEGIES, *cache["strategies"]),
            fingerprint=model_fingerprint(args.model_path, options=self._settings.engine_args),
            only_exact=cache["unsupported"],
            sparse_decode=decode is not None,
            sparse_prefill=decode is not None and decode["kv_bits"] == 16,
            sparse=sparse_defaults(self._settings),
            sparse_choice=self._sparse_choice,
            **_offloading(decode),
            dtype=_dtype(manager.model_config.dtype, args.kv_cache_dtype),
            page_bits=cache["page_bits"],
            samkv=cache["samkv"],
            samkv_defaults=cache["samkv_defaults"],
            prefix=cache["prefix"],
        )
        first = GenerateRequest(
            "warm-up",
            [1] * 16,
            namespace=NAMESPACE,
            strategy="full",
            sampling=Sampling(max_new_tokens=2),
        )
        if self._info.sparse_decode:  # an unsupported model fails here, at the start
            first = replace(first, decode={"mode": "progressive", "threshold": 1.0, "dense_below": 0})
        async for _ in self.generate(first):
            pass
        await warm_up(self, self._info)
        self._take_over_signals(self._crash)
        ended = time.monotonic()
        self._info = replace(
            self._info, start_s=round(ended - self._launched, 1), warm_up_s=round(ended - asked, 1)
        )
        self._started = True
        return self._info

    @property
    def crash(self) -> EngineError | None:
        """The error by which the engine died; None if it lives."""
        return None if self._crash is None else self._crash.error

    def _take_over_signals(self, crash: CrashHandler) -> None:
        """Replace SGLang's handlers, which kill the process tree; ours let requests finish."""
        crash.install()
        if self._on_stop is not None:
            # outside the main thread, the loop's owner handles signals
            with contextlib.suppress(RuntimeError, ValueError):
                asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._on_stop)

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise Unavailable("The engine has not started yet.", hint="Wait until /ready answers 200.")
        return self._info

    async def ready(self) -> bool:
        """See the protocol. False until the warm-up has ended."""
        if not self._started or self.crash is not None:
            return False
        from sglang.srt.managers.tokenizer_manager import ServerStatus

        up: bool = _manager().server_status == ServerStatus.Up
        return up

    def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """See the protocol."""
        return self._documents.generate(request)

    async def warm(self, request: GenerateRequest) -> None:
        """See `CachingEngine`."""
        await self._documents.warm(request, analyse=self._settings.kv_analysis == "ingest")

    async def control(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """See `CachingEngine`; `sglang_ext.process.control` lists the operations. Waits while pending."""
        wait = _FIRST_LOOK_S
        self._documents.controlled(operation, arguments, self._fingerprint)
        while "pending" in (answer := await self._ask(operation, arguments)):
            arguments["pending"] = answer["pending"]
            await asyncio.sleep(wait)
            wait = min(2 * wait, _NEXT_LOOK_S)
        return self._documents.counted(answer) if operation == "stat" else answer

    async def _ask(self, operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
        from sglang.srt.managers.io_struct import DumperControlReqInput

        # In a task of its own: SGLang gives each reply to the oldest waiting caller. One that left before its
        # reply would leave it to the next.
        body = DumperControlReqInput(method=CONTROL_METHOD, body={"op": operation, **arguments})
        reply = self._start_pump(_manager().dumper_control(body))
        waiting = asyncio.shield(reply)
        replies = await (waiting if self._crash is None else self._crash.unless_crashed(waiting))
        failed = [reply.error for reply in replies if not reply.success]
        if failed:
            raise EngineError(
                f"The document cache failed to {operation}: {failed[0]}", hint="See the server's log."
            )
        return dict(replies[0].response[0])

    async def _run(self, fields: dict[str, Any], prompt_tokens: int) -> AsyncGenerator[GenerateChunk, None]:
        """Run one request."""
        reader = StreamReader(prompt_tokens, fields["sampling_params"].get("stop", ()))
        try:
            async with contextlib.aclosing(self.outputs(fields)) as outputs:
                async for out in outputs:
                    yield reader.read(out)
        except (RagserveError, DocumentsMissing):
            raise
        except Exception as error:
            raise _translate(error) from error

    async def outputs(self, fields: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Run one request, and stream what SGLang's TokenizerManager answers. Raises what that raises.

        A separate task reads its stream to the end, so that an abort leaves none behind."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        manager = self._running_manager()
        rid, key = fields["rid"], str(fields.get("extra_key", FULL_KEY))
        if not key.startswith(FULL_KEY):
            self.sent_prefixes.note(key, fields["input_ids"])
        outputs: asyncio.Queue[dict[str, Any] | Exception] = asyncio.Queue()
        abandoned = False

        async def pump() -> None:
            try:
                async for out in _own(manager, GenerateReqInput(**fields, **_traced())):
                    if abandoned:  # covers an abort that came before SGLang knew the request
                        manager.abort_request(rid)
                    outputs.put_nowait(out)
            except Exception as error:  # noqa: BLE001 - handed to the reader below
                outputs.put_nowait(error)

        self._start_pump(pump())
        finished = False
        deadline = asyncio.get_running_loop().time() + self._settings.engine_timeout_s
        try:
            while not finished:
                # Not around the yield: there it would cancel our reader, wherever that waits.
                async with asyncio.timeout_at(deadline):
                    out = await outputs.get()
                if isinstance(out, Exception):
                    finished = True
                    raise out
                finished = bool(out.get("meta_info", {}).get("finish_reason"))
                yield out
        except TimeoutError:
            raise timed_out(self._settings.engine_timeout_s) from None
        finally:
            if not finished:
                abandoned = True
                manager.abort_request(rid)

    async def _run_together(self, requests: Sequence[dict[str, Any]]) -> dict[str, RagserveError]:
        """Run requests to their ends as one scheduler message, and so in one batch. Returns the errors of
        those that failed by their ids; raises one that is of all."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        manager = self._running_manager()
        fields = {name: [request[name] for request in requests] for name in requests[0]} | {"stream": True}
        failed: dict[str, RagserveError] = {}

        async def read() -> Exception | None:
            try:
                async for out in _own(manager, GenerateReqInput(**fields, **_traced())):
                    note_failure(out, failed)
            except Exception as error:  # noqa: BLE001 - raised below
                return error
            return None

        task = self._start_pump(read())
        try:
            async with asyncio.timeout(self._settings.engine_timeout_s):
                error = await task
        except TimeoutError:
            raise timed_out(self._settings.engine_timeout_s) from None
        finally:
            if not task.done() or task.cancelled():
                for request in requests:
                    manager.abort_request(request["rid"])
        if error is not None:
            raise _translate(error) from error
        return failed

    def _running_manager(self) -> Any:
        if self._crash is not None:
            self._crash.check()
        return _manager()

    def _start_pump(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run ``work`` in a task that outlives its caller."""
        task = asyncio.create_task(work)
        self._pumps.add(task)
        task.add_done_callback(self._pumps.discard)
        return task

    def stop(self) -> None:
        """Ask the surrounding server to end, as SIGTERM does."""
        if self._on_stop is not None:
            self._on_stop()

    async def close(self) -> None:
        """Abort running requests, and write what the document cache has queued, for five seconds at most."""
        await self._documents.close()
        if self._crash is not None:
            self._crash.close()
        if self.crash is not None:
            return
        if self._pumps:
            _manager().abort_request(abort_all=True)
            await asyncio.wait(self._pumps, timeout=5)
        if self._info is None:
            return
        try:
            async with asyncio.timeout(_FLUSH_S):
                await self.control("flush", timeout_s=_FLUSH_S)
        except (RagserveError, TimeoutError) as error:
            log.warning("KV that was not on disk yet will be computed again: %r", error)


def _own(manager: Any, obj: Any) -> AsyncIterator[dict[str, Any]]:
    """Start a request of the server's own, which may measure."""
    with measuring():
        outputs: AsyncIterator[dict[str, Any]] = manager.generate_request(obj, None)
    return outputs


def _traced() -> dict[str, Any]:
    """The field that puts SGLang's spans below the current one."""
    from sglang_ext.sglang_internals.request_checks import OwnTraceHeaders

    return {"external_trace_header": OwnTraceHeaders(headers)} if (headers := tracing.headers()) else {}


def _attention(args: Any, prefill_kernels: str | None) -> str:
    """Name the attention backend, and another one of prefills or kernels that it had not chosen itself."""
    prefill = args.prefill_attention_backend or prefill_kernels
    return f"{args.attention_backend}, prefill {prefill}" if prefill else str(args.attention_backend)


def _dtype(weights: Any, kv: str) -> str:
    """`EngineInfo.dtype` from a torch.dtype and SGLang's kv_cache_dtype."""
    name = str(weights).removeprefix("torch.")
    return name if kv in ("auto", name) else f"{name}, KV {kv}"


def _offloading(decode: dict[str, Any] | None) -> dict[str, Any]:
    """Return the fields of `EngineInfo` about offloaded requests."""
    if decode is None:
        return {}
    default, offloaded, page = decode["default"], decode["offloaded"], decode["page_size"]
    fields = {"decode_mode": default["mode"], "offloaded": bool(default["offloaded"])}
    if offloaded is None:
        return fields
    return fields | {
        "offloaded_tokens": offloaded["pages"] * page,
        "by_layers": offloaded["prefilling"] is not None,
        "context_tokens": offloaded["numbers"] * page if offloaded["document_limit"] else 0,
        "context_pages": offloaded["document_limit"],
    }


def _manager() -> Any:
    from sglang_ext.process.launch import tokenizer_manager

    return tokenizer_manager()


def _translate(error: Exception) -> RagserveError:
    if isinstance(error, RagserveError):
        return error
    if isinstance(error, ValueError):
        return InvalidRequest(f"The engine refused the request: {error}")
    return EngineError(f"The engine failed: {error}", hint="See the server's log.")


@contextlib.contextmanager
def _meeting_by_file(args: Any) -> Iterator[None]:
    """Let the engine's processes on this machine find each other by a file. Torch's store, at a port,
    listens on every interface, and whoever reaches it may write to it."""
    if args.nnodes > 1 or args.dist_init_addr or os.environ.get(_MEETING):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="ragserve-") as folder:
        os.environ[_MEETING] = f"file://{folder}/rendezvous"
        try:
            yield
        finally:
            del os.environ[_MEETING]


def serve(
    settings: Settings,
    make_app: Callable[[LocalEngine, Any], Any],
    listener: socket.socket,
    on_launch: Callable[[], None] = lambda: None,
) -> None:
    """Start SGLang and serve ``make_app(engine, sglang_app)`` in front of it on ``listener``, a bound socket.

    ``on_launch`` is called once the settings are known to be right for SGLang. Blocks until stopped. Raises
    EngineError if the engine died."""
    launched = time.monotonic()
    settings, sparse_choice = resolve_sparse_attention(settings)
    host, port = listener.getsockname()[:2]
    settings_here = settings.model_copy(update={"host": host, "port": port})
    from sglang_ext.process.launch import Launcher

    engines: list[LocalEngine] = []

    def build(sglang_app: Any) -> Any:
        engines.append(
            LocalEngine(settings, on_stop=launcher.stop, launched=launched, sparse_choice=sparse_choice)
        )
        return make_app(engines[-1], sglang_app)

    launcher = Launcher(build, listener, KEEP_ALIVE_S)
    # a port of torch.distributed's, which SGLang would look up and let go
    with hold_port() as rendezvous:
        args = server_args(settings_here, nccl_port=port_of(rendezvous))
        with _meeting_by_file(args), start_explained():
            on_launch()
            launcher.run(args)
    for engine in engines:
        if engine.crash is not None:
            raise engine.crash
