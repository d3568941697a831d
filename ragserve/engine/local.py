"""SGLang in this process group: its scheduler and detokenizer as child processes, its HTTP server's app
behind ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ragserve.config import Settings
from ragserve.engine.base import EngineInfo, GenerateChunk, GenerateRequest, Sampling
from ragserve.engine.document_cache import Whereabouts
from ragserve.engine.prefill import Documents
from ragserve.engine.server_args import server_args
from ragserve.engine.stream import StreamReader, payload
from ragserve.errors import EngineError, InvalidRequest, RagserveError, Unavailable
from sglang_ext.protocol import (
    CONTROL_METHOD,
    EXACT_STRATEGIES,
    document_key,
)

log = logging.getLogger(__name__)


class LocalEngine:
    """An :class:`~ragserve.engine.base.Engine` over SGLang's TokenizerManager."""

    def __init__(self, settings: Settings, *, on_stop: Callable[[], None] | None = None) -> None:
        self._settings = settings
        self._on_stop = on_stop
        self._info: EngineInfo | None = None
        self._fingerprint = ""
        self._pumps: set[asyncio.Task[None]] = set()
        self._documents = Documents(self._run, self._run_together, _new_rid)

    async def start(self) -> EngineInfo:
        """Warm up with one request, so that the first user does not pay for it, and read what is serving."""
        from sglang.version import __version__ as version

        from sglang_ext.documents.build import model_fingerprint
        from sglang_ext.launch import scheduler_info, tokenizer_manager

        manager, info = tokenizer_manager(), scheduler_info()
        args = manager.server_args
        cache = await self.control("info")
        self._fingerprint = cache["fingerprint"]
        if (cache["decode"] is not None) != (self._settings.sparse_attention == "on"):
            raise EngineError(
                f"sparse_attention={self._settings.sparse_attention} is not what the engine runs: it wrapped {cache['decode']}.",
                hint="Leave attention_backend to SGLang, or set it to one that can be wrapped: see docs/sparse-decoding.md.",
            )
        self._info = EngineInfo(
            kind="local",
            model=args.model_path,
            tokenizer=args.tokenizer_path,
            version=version,
            device=args.device,
            attention_backend=str(args.attention_backend),
            context_length=manager.context_len,
            max_total_tokens=info["max_total_num_tokens"],
            strategies=(*EXACT_STRATEGIES, *cache["strategies"]),
            fingerprint=model_fingerprint(args.model_path, ""),
            only_exact=cache["unsupported"],
            sparse_decode=cache["decode"] is not None,
            dtype=_dtype(manager.model_config.dtype, args.kv_cache_dtype),
            samkv=cache["samkv"],
        )
        warm_up = GenerateRequest(
            "warm-up",
            [1] * 16,
            namespace="ragserve-warm-up",
            strategy="full",
            sampling=Sampling(max_new_tokens=2),
        )
        if self._info.sparse_decode:  # a model that sparse decoding does not know fails here, at the start
            warm_up = replace(warm_up, decode={"mode": "progressive", "threshold": 1.0, "dense_below": 0})
        async for _ in self.generate(warm_up):
            pass
        self._take_over_sigterm()
        return self._info

    def _take_over_sigterm(self) -> None:
        """SGLang's handler kills the process tree without running our shutdown; ours finishes requests and
        saves the index first.
        """
        if self._on_stop is None:
            return
        loop = asyncio.get_running_loop()
        with contextlib.suppress(
            RuntimeError, ValueError
        ):  # not the main thread: whoever runs the loop handles signals
            loop.add_signal_handler(signal.SIGTERM, self._on_stop)

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise Unavailable("The engine has not started yet.", hint="Wait until /ready answers 200.")
        return self._info

    async def ready(self) -> bool:
        from sglang.srt.managers.tokenizer_manager import ServerStatus

        from sglang_ext.launch import tokenizer_manager

        return self._info is not None and tokenizer_manager().server_status == ServerStatus.Up

    def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """See the protocol."""
        if request.strategy in EXACT_STRATEGIES:
            return self._run(payload(request, _new_rid(request.rid)), len(request.input_ids))
        return self._documents.generate(request)

    async def warm(self, request: GenerateRequest) -> None:
        """Prefill every span of a request that is not cached yet, into all tiers, and analyse it if the
        settings say so.
        """
        await self._documents.prefill(request, request.spans, analyse=True)

    async def where(self, namespace: str, documents: Sequence[Sequence[int]]) -> Whereabouts:
        """Where these documents are cached, see `ragserve.engine.document_cache`."""
        keys = [document_key(namespace, self._fingerprint, ids) for ids in documents]
        return Whereabouts.of(
            await self.control("where", keys=keys, tokens=list(map(len, documents)), namespace=namespace)
        )

    async def prefix(self, namespace: str, input_ids: Sequence[int]) -> int:
        """How many of a prompt's first tokens strategy ``prefix`` would find, see
        `ragserve.engine.document_cache`.
        """
        return int((await self.control("prefix", ids=list(input_ids), namespace=namespace))["tokens"])

    async def forget(self, namespace: str, documents: Sequence[Sequence[int]] | None) -> None:
        """See the protocol. The namespace's exact prefixes go, too: they hold its documents among others."""
        if documents is None:
            await self.control("remove_namespace", namespace=namespace)
        elif documents:
            keys = [document_key(namespace, self._fingerprint, ids) for ids in documents]
            await self.control("remove", keys=keys, namespace=namespace)

    async def control(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Ask the document cache (see `sglang_ext.control`). Raises EngineError with its reason."""
        from sglang.srt.managers.io_struct import DumperControlReqInput

        from sglang_ext.launch import tokenizer_manager

        replies = await tokenizer_manager().dumper_control(
            DumperControlReqInput(method=CONTROL_METHOD, body={"op": operation, **arguments})
        )
        failed = [reply.error for reply in replies if not reply.success]
        if failed:
            raise EngineError(
                f"The document cache failed to {operation}: {failed[0]}", hint="See the server's log."
            )
        return dict(replies[0].response[0])

    @contextlib.asynccontextmanager
    async def profiled(self, folder: Path) -> AsyncIterator[None]:
        """Meanwhile the scheduler is profiled by torch; at the end it writes its trace into ``folder``."""
        from sglang.srt.managers.io_struct import ProfileReq

        from sglang_ext.launch import tokenizer_manager

        manager = tokenizer_manager()
        activities = ["CPU", "GPU"] if self.info.device == "cuda" else ["CPU"]
        wanted = ProfileReq(
            output_dir=str(folder), activities=activities, with_stack=False, record_shapes=False
        )
        await manager.start_profile(wanted)
        try:
            yield
        finally:
            await manager.stop_profile()

    async def _run(self, fields: dict[str, Any], prompt_tokens: int) -> AsyncGenerator[GenerateChunk, None]:
        """One SGLang request. A task of its own reads its stream to the end, so that an abort never leaves a
        request behind there.
        """
        from sglang.srt.managers.io_struct import GenerateReqInput

        from sglang_ext.launch import tokenizer_manager

        manager = tokenizer_manager()
        rid = fields["rid"]
        outputs: asyncio.Queue[dict[str, Any] | Exception] = asyncio.Queue()
        abandoned = False

        async def pump() -> None:
            try:
                async for out in manager.generate_request(GenerateReqInput(**fields), None):
                    if abandoned:  # covers an abort that came before SGLang knew the request
                        manager.abort_request(rid)
                    outputs.put_nowait(out)
            except Exception as error:  # noqa: BLE001 - handed to the reader below
                outputs.put_nowait(error)

        task = asyncio.create_task(pump())
        self._pumps.add(task)
        task.add_done_callback(self._pumps.discard)
        reader = StreamReader(prompt_tokens)
        finished = False
        try:
            async with asyncio.timeout(self._settings.engine_timeout_s):
                while not finished:
                    out = await outputs.get()
                    if isinstance(out, Exception):
                        finished = True
                        raise _translate(out) from out
                    finished = bool(out.get("meta_info", {}).get("finish_reason"))
                    yield reader.read(out)
        except TimeoutError:
            raise self._late() from None
        finally:
            if not finished:
                abandoned = True
                manager.abort_request(rid)

    async def _run_together(self, requests: Sequence[dict[str, Any]]) -> None:
        """SGLang requests that reach the scheduler as one message, and so its batch together; to their ends.
        Raises the first's error.
        """
        from sglang.srt.managers.io_struct import GenerateReqInput

        from sglang_ext.launch import tokenizer_manager

        manager = tokenizer_manager()
        fields = {name: [request[name] for request in requests] for name in requests[0]} | {"stream": True}
        failures: list[Exception] = []

        async def read() -> None:
            try:
                async for out in manager.generate_request(GenerateReqInput(**fields), None):
                    try:
                        StreamReader(0).read(out)
                    except RagserveError as error:  # the others go on
                        failures.append(error)
            except Exception as error:  # noqa: BLE001 - raised below
                failures.append(error)

        task = asyncio.create_task(read())
        self._pumps.add(task)
        task.add_done_callback(self._pumps.discard)
        try:
            async with asyncio.timeout(self._settings.engine_timeout_s):
                await task
        except TimeoutError:
            raise self._late() from None
        finally:
            if not task.done() or task.cancelled():
                for request in requests:
                    manager.abort_request(request["rid"])
        if failures:
            raise _translate(failures[0]) from failures[0]

    def _late(self) -> EngineError:
        return EngineError(
            f"No answer within {self._settings.engine_timeout_s:g} s.",
            hint="Raise --engine-timeout-s or lower max_new_tokens.",
        )

    def stop(self) -> None:
        """Ask the server around this engine to end, as SIGTERM does."""
        if self._on_stop is not None:
            self._on_stop()

    async def close(self) -> None:
        """Abort what still runs."""
        from sglang_ext.launch import tokenizer_manager

        if self._pumps:
            tokenizer_manager().abort_request(abort_all=True)
            await asyncio.wait(self._pumps, timeout=5)


def _dtype(weights: Any, kv: str) -> str:
    """As `EngineInfo` has it. ``weights``: a torch.dtype; ``kv``: SGLang's setting."""
    name = str(weights).removeprefix("torch.")
    return name if kv in ("auto", name) else f"{name}, KV {kv}"


def _new_rid(name: str) -> str:
    """SGLang wants ids that no running request has; clients may send the same one twice."""
    return f"{name}-{uuid.uuid4().hex[:8]}"


def _translate(error: Exception) -> RagserveError:
    if isinstance(error, RagserveError):
        return error
    if isinstance(error, ValueError):
        return InvalidRequest(f"The engine refused the request: {error}")
    return EngineError(f"The engine failed: {error}", hint="See the server's log.")


def serve(settings: Settings, make_app: Callable[[LocalEngine, Any], Any]) -> None:
    """Start SGLang and serve ``make_app(engine, sglang_app)`` in front of it. Blocks until stopped."""
    args = server_args(settings)
    from sglang_ext.launch import Launcher

    def build(sglang_app: Any) -> Any:
        return make_app(LocalEngine(settings, on_stop=launcher.stop), sglang_app)

    launcher = Launcher(build)
    launcher.run(args)
