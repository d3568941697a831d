"""SGLang in this process group: its scheduler and detokenizer as child processes, its HTTP server's app behind ours."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ragserve.config import Settings
from ragserve.engine.base import EngineInfo, GenerateChunk, GenerateRequest, Sampling
from ragserve.engine.document_cache import Whereabouts
from ragserve.engine.prefill import Documents
from ragserve.engine.stream import StreamReader, payload
from ragserve.errors import EngineError, InvalidRequest, RagserveError, Unavailable
from sglang_ext.protocol import (
    ATTENTION_CONFIG_VARIABLE,
    CACHE_BACKEND,
    CONTROL_METHOD,
    EXACT_STRATEGIES,
    KV_CONFIG_VARIABLE,
    DecodeOptions,
    document_key,
)

log = logging.getLogger(__name__)

_CPU_POOL_BYTES = 2**30  # default of the KV pool without a GPU; memory is touched only as it fills


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
                hint="Leave attention_backend to SGLang, or set it to one that can be wrapped: see sglang_ext/attention/README.md.",
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
        warm_up = GenerateRequest("warm-up", [1] * 16, namespace="ragserve-warm-up", strategy="full", sampling=Sampling(max_new_tokens=2))
        if self._info.sparse_decode:  # a model that sparse decoding does not know fails here, at the start
            warm_up = replace(warm_up, decode={"mode": "progressive", "threshold": 1.0, "dense_below": 0})
        async for _ in self.generate(warm_up):
            pass
        self._take_over_sigterm()
        return self._info

    def _take_over_sigterm(self) -> None:
        """SGLang's handler kills the process tree without running our shutdown; ours finishes requests and saves the index first."""
        if self._on_stop is None:
            return
        loop = asyncio.get_running_loop()
        with contextlib.suppress(RuntimeError, ValueError):  # not the main thread: whoever runs the loop handles signals
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
        """Prefill every span of a request that is not cached yet, into all tiers, and analyse it if the settings say so."""
        await self._documents.prefill(request, request.spans, analyse=True)

    async def where(self, namespace: str, documents: Sequence[Sequence[int]]) -> Whereabouts:
        """Where these documents are cached, see `ragserve.engine.document_cache`."""
        keys = [document_key(namespace, self._fingerprint, ids) for ids in documents]
        return Whereabouts.of(await self.control("where", keys=keys, tokens=list(map(len, documents)), namespace=namespace))

    async def prefix(self, namespace: str, input_ids: Sequence[int]) -> int:
        """How many of a prompt's first tokens strategy ``prefix`` would find, see `ragserve.engine.document_cache`."""
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
            raise EngineError(f"The document cache failed to {operation}: {failed[0]}", hint="See the server's log.")
        return dict(replies[0].response[0])

    @contextlib.asynccontextmanager
    async def profiled(self, folder: Path) -> AsyncIterator[None]:
        """Meanwhile the scheduler is profiled by torch; at the end it writes its trace into ``folder``."""
        from sglang.srt.managers.io_struct import ProfileReq

        from sglang_ext.launch import tokenizer_manager

        manager = tokenizer_manager()
        activities = ["CPU", "GPU"] if self.info.device == "cuda" else ["CPU"]
        wanted = ProfileReq(output_dir=str(folder), activities=activities, with_stack=False, record_shapes=False)
        await manager.start_profile(wanted)
        try:
            yield
        finally:
            await manager.stop_profile()

    async def _run(self, fields: dict[str, Any], prompt_tokens: int) -> AsyncGenerator[GenerateChunk, None]:
        """One SGLang request. A task of its own reads its stream to the end, so that an abort never leaves a request behind there."""
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
        """SGLang requests that reach the scheduler as one message, and so its batch together; to their ends. Raises the first's error."""
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
            f"No answer within {self._settings.engine_timeout_s:g} s.", hint="Raise --engine-timeout-s or lower max_new_tokens."
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


def server_args(settings: Settings) -> Any:
    """SGLang's ServerArgs for these settings; ``settings.engine_args`` has the last word."""
    from ragserve.engine.compat import prepare

    # With pickle between its processes (the default) SGLang 0.5.16 loses the scheduler's timings on the way through the detokenizer.
    os.environ.setdefault("SGLANG_USE_PICKLE_IPC", "0")
    os.environ[KV_CONFIG_VARIABLE] = json.dumps(_kv_config(settings))
    os.environ.pop(ATTENTION_CONFIG_VARIABLE, None)
    if settings.sparse_attention == "on":
        os.environ[ATTENTION_CONFIG_VARIABLE] = json.dumps(_attention_config(settings))
        # SGLang would size the pool by what memory is left at the end; page statistics are as large as the pool's reservation by then.
        os.environ["SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"] = "0"
    prepare()
    import torch
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()  # registers our cache, which ServerArgs checks by name

    options: dict[str, Any] = {
        "model_path": settings.model,
        "host": settings.host,
        "port": settings.port,
        "context_length": settings.context_length,
        "max_total_tokens": settings.max_total_tokens,
        "mem_fraction_static": settings.mem_fraction_static,
        "tp_size": settings.tp_size,
        "dtype": settings.dtype,
        # Metrics feed queue_ms and /metrics; the warm-up is ours, because SGLang's goes over HTTP and knows no API key but its own.
        "enable_metrics": True,
        "enable_cache_report": True,
        "skip_server_warmup": True,
        "radix_cache_backend": CACHE_BACKEND,
        # SGLang says much at info; its warnings are what an operator needs unless they debug.
        "log_level": "info" if settings.log_level == "debug" else "warning",
        "log_level_http": "warning",
    }
    if settings.sparse_attention == "on":
        options["page_size"] = settings.decode_page_size
    if settings.tokenizer:
        options["tokenizer_path"] = settings.tokenizer
    if not torch.cuda.is_available():
        # PyTorch's CUDA build brings NCCL, and SGLang would then start it between CPU processes: there is no library here to find.
        os.environ.setdefault("SGLANG_NCCL_SO_PATH", os.devnull)
        options |= {
            "device": "cpu",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "disable_cuda_graph": True,
            "disable_overlap_schedule": True,  # nothing to overlap with: CPU streams do nothing
            "sleep_on_idle": True,  # SGLang polls when it has nothing to do, which takes a core from everyone else
        }
        if settings.dtype == "auto":
            options["dtype"] = "float32"
        if settings.max_total_tokens is None:
            options["max_total_tokens"] = _default_cpu_tokens(settings, 2 if options["dtype"] in ("bfloat16", "float16") else 4)
    options |= settings.engine_args
    return ServerArgs(**{name: value for name, value in options.items() if value is not None})


def _kv_config(settings: Settings) -> dict[str, Any]:
    """What the document cache of the scheduler processes reads from its environment. Raises InvalidRequest for a broken samkv profile."""
    from ragserve.profiles import samkv as samkv_profile
    from sglang_ext.documents.build import model_fingerprint

    config: dict[str, Any] = {"host_bytes": settings.kv_host_bytes, "disk_bytes": settings.kv_disk_bytes}
    config |= {"analysis": settings.kv_analysis, "analysis_bytes": settings.kv_analysis_bytes, "block_tokens": settings.kv_block_tokens}
    profile = samkv_profile.load(settings, model_fingerprint(settings.model, ""))
    if profile is not None:
        config["samkv"] = profile.engine
    if settings.kv_disk_bytes:
        config |= {"disk_dir": str(settings.data_dir.resolve() / "kv"), "backend": settings.kv_storage, "extra": settings.kv_storage_args}
    return config


def _attention_config(settings: Settings) -> dict[str, Any]:
    """What sparse decoding in the scheduler processes reads from its environment. Raises PlanError for options it cannot have."""
    options = DecodeOptions(
        mode=settings.decode_mode,
        budget=settings.decode_budget,
        reuse=settings.decode_reuse,
        threshold=settings.decode_threshold,
        dense_below=_dense_below(settings),
        streaming=settings.decode_heads is not None,
    )
    config: dict[str, Any] = {
        "options": asdict(options),
        "logical_page": settings.decode_logical_page,
        "max_budget": max(settings.decode_max_budget, settings.decode_budget),
        "ranking": settings.decode_ranking,
        "bound": settings.decode_bound,
        "kv_bits": settings.kv_bits,
    }
    if settings.decode_heads:
        config["heads"] = str(settings.decode_heads.resolve())
    return config


def _dense_below(settings: Settings) -> int:
    """The setting, or what `ragserve calibrate-decode` found for this model with the same mode and limits, or the protocol's default."""
    if settings.decode_dense_below is not None:
        return settings.decode_dense_below
    if settings.decode_mode == "dense":
        return DecodeOptions().dense_below
    from ragserve.calibration.decode import DECODE, FILE_NAME, options_of
    from sglang_ext.documents.build import model_fingerprint

    found = DECODE.load(settings.data_dir / FILE_NAME, model_fingerprint(settings.model, ""))
    if found is None:
        return DecodeOptions().dense_below
    if found.options != options_of(settings):
        log.warning("decode steps were calibrated with %s: run ragserve calibrate-decode for these settings", found.options)
        return DecodeOptions().dense_below
    return found.dense_below


def _default_cpu_tokens(settings: Settings, itemsize: int) -> int:
    """Slots of the KV pool on a CPU machine: 8 contexts, at most 65,536 and about 1 GiB, at least one context."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(settings.model).get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    slot_bytes = 2 * config.num_hidden_layers * heads * head_dim * itemsize
    context = settings.context_length or config.max_position_embeddings
    return int(max(context, min(8 * context, 65_536, _CPU_POOL_BYTES // slot_bytes)))


def serve(settings: Settings, make_app: Callable[[LocalEngine, Any], Any]) -> None:
    """Start SGLang and serve ``make_app(engine, sglang_app)`` in front of it. Blocks until stopped."""
    args = server_args(settings)
    from sglang_ext.launch import Launcher

    def build(sglang_app: Any) -> Any:
        return make_app(LocalEngine(settings, on_stop=launcher.stop), sglang_app)

    launcher = Launcher(build)
    launcher.run(args)
