"""The checks of `ragserve doctor`. Each looks at one thing, changes nothing, and returns a finding."""

from __future__ import annotations

import asyncio
import os
import platform
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

import httpx

from ragserve.commands import outside_checks
from ragserve.commands.model_checks import (
    is_dequantised,
    problem_of,
    read_config,
    tokenizer_name,
    unreadable_file,
)
from ragserve.commands.outside_checks import Finding, Status
from ragserve.config import Settings
from ragserve.engine.cpu_precision import cpu_dtype
from ragserve.engine.gguf_weights import gguf_of
from ragserve.engine.packaged_model import is_packaged, place
from ragserve.engine.ports import address
from ragserve.errors import InvalidRequest, RagserveError
from ragserve.files import bundled
from ragserve.ingest.foreign_cuts import advice_of, foreign_cuts
from ragserve_index import IndexStore
from sglang_ext.wire.protocol import CPU_SGLANG, GPU_SGLANG, SGLANG_VERSIONS

_MIB = 2**20
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
_HUB_ID = re.compile(r"[\w.\-]+(/[\w.\-]+)?")


@dataclass(frozen=True, slots=True)
class Check:
    """The finding on one subject, ``name``, and the ``advice`` on it.

    ``fail``: it will not work. ``warn``: it works, but perhaps not as expected. ``skip``: there is nothing to
    check.
    """

    name: str
    status: Status
    found: str
    advice: str = ""


def examine(settings: Settings, names: Collection[str] = ()) -> Iterable[Check]:
    """Run the checks of these ``names``, by default all, in order and yield each as it finishes. A check that
    crashes counts as failed."""
    checks: dict[str, Callable[[Settings], Finding]] = {
        "python": _python,
        "versions": _versions,
        "plugins": _plugins,
        "platform": _platform,
        "device": _device,
        "model": _model,
        "tokenizer": _tokenizer,
        "embedder": _embedder,
        "reranker": _reranker,
        "data folder": _data_dir,
        "index": _index,
        "index device": _index_device,
        "port": _port,
        "engine": _engine,
        "sign-on": outside_checks.sign_on,
        "sources": outside_checks.sources,
    }
    for name, check in checks.items():
        if names and name not in names:
            continue
        try:
            finding = check(settings)
        except RagserveError as error:
            finding = "fail", error.message, error.hint or "See the message."
        except Exception as error:  # noqa: BLE001 - the remaining checks must run
            advice = f"The check of the {name} crashed; please report it."
            finding = "fail", f"{type(error).__name__}: {error}", advice
        yield Check(name, *finding)


def _python(_: Settings) -> Finding:
    return "ok", f"{platform.python_version()} at {sys.executable}"


def _versions(_: Settings) -> Finding:
    installed = _installed("sglang")
    if installed not in SGLANG_VERSIONS:
        wanted = GPU_SGLANG if _cuda() else CPU_SGLANG
        return "fail", f"sglang {installed or 'is missing'}, needed {wanted}", "Run scripts/install."
    if installed != GPU_SGLANG and _cuda():
        advice = f"Install sglang=={GPU_SGLANG} for a GPU."
        found = f"sglang {installed} has been run without a GPU only, {GPU_SGLANG} with one"
        return "warn", found, advice
    pins = _pins(installed)
    have = {name: _installed(name) for name in pins}
    if wrong := [f"{n} {have[n] or 'missing'} (pinned {pin})" for n, pin in pins.items() if have[n] != pin]:
        found = f"{len(wrong)} of {len(pins)} pins differ: {', '.join(wrong[:5])}"
        return "warn", found, "Run scripts/install to get the set that was tested together."
    return "ok", f"sglang {installed}; all {len(pins)} pins match"


def _pins(sglang: str) -> dict[str, str]:
    """Pinned version by package, for this kind of machine and version of SGLang; without torch, whose builds
    have many names."""
    text = (bundled("requirements") / ("product.txt" if _cuda() else "cpu.txt")).read_text()
    if not _cuda() and (own := bundled("requirements") / f"sglang-{sglang}.txt").is_file():
        text += own.read_text()  # a later pin counts
    found = re.findall(r"^([A-Za-z0-9_.\-]+)(?:\[[^\]]*\])?==([^\s;#]+)", text, re.MULTILINE)
    return {name: pin for name, pin in found if name != "torch" or "+" in pin}


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _plugins(_: Settings) -> Finding:
    wanted = {"sglang.srt.platforms": "ragserve_cpu", "sglang.srt.plugins": "ragserve"}
    registered = {group: {entry.name for entry in entry_points(group=group)} for group in wanted}
    missing = [f"{group}:{name}" for group, name in wanted.items() if name not in registered[group]]
    if missing:
        advice = "SGLang finds them through the installed project: run scripts/install."
        return "fail", f"not registered: {', '.join(missing)}", advice
    allowed = {name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()}
    ours = set(wanted.values())
    if allowed and not ours <= allowed:
        advice = "Unset SGLANG_PLUGINS, or add ragserve and ragserve_cpu to it."
        return "fail", f"SGLANG_PLUGINS={','.join(sorted(allowed))} leaves ours out", advice
    others = sorted(set().union(*registered.values()) - ours)
    return "ok", "ragserve, ragserve_cpu" + (f"; others: {', '.join(others)}" if others else "")


def _platform(settings: Settings) -> Finding:
    if settings.engine_url or settings.workers:
        return "skip", "the engine runs elsewhere (engine_url, workers)"
    from ragserve.engine.compat import prepare

    prepare()
    from sglang.srt.platforms import current_platform

    name = type(current_platform).__name__
    if name == "SRTPlatform":
        advice = "Our CPU platform should be active here: check the plugins above, and SGLANG_PLATFORM."
        return "fail", "SGLang found no platform for this machine", advice
    return "ok", name


def _device(settings: Settings) -> Finding:
    import torch

    if torch.cuda.is_available():
        gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        names = ", ".join(f"{gpu.name} ({gpu.total_memory / 2**30:.0f} GiB)" for gpu in gpus)
        found = f"torch {torch.__version__}, CUDA {torch.version.cuda}, {names}"
        needed = settings.tp_size * max(1, settings.replicas)
        if needed > len(gpus) and not (settings.engine_url or settings.workers):
            advice = f"{needed} GPUs are needed, more than there are: lower --tp-size or --replicas."
            return "fail", found, advice
        return "ok", found
    found = f"torch {torch.__version__}, no GPU, {len(os.sched_getaffinity(0))} cores"
    if shutil.which("nvidia-smi"):
        advice = "NVIDIA's driver is here, but this torch cannot use it: install a CUDA build of torch."
        return "warn", found, advice
    if settings.dtype == "auto" and not (settings.engine_elsewhere or "dtype" in settings.engine_args):
        found += ", {}: {}".format(*cpu_dtype())
    return "ok", found


def _model(settings: Settings) -> Finding:
    if settings.engine_url or settings.workers:
        return "skip", "the engine brings its own (engine_url, workers)"
    folder = Path(settings.model)
    if "://" in settings.model or "model_path" in settings.engine_args:
        return "skip", f"{settings.model} is read by SGLang alone"
    if is_packaged(settings.model):
        folder = place()
        if not folder.is_dir():
            advice = "It is fetched when the server starts: about 100 MB, 370 MB on disk."
            return "warn", f"{settings.model} is not on this machine", advice
    if (file := gguf_of(settings.model)) is not None:
        return "ok", f"{file}: GGUF, dequantised to bfloat16 once, into {settings.data_dir / 'models'}"
    if folder.is_file():
        return "fail", *unreadable_file(folder)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        if not _HUB_ID.fullmatch(settings.model):
            advice = "Give --model a folder with config.json, or a Hugging Face id."
            return "fail", f"{settings.model} does not exist", advice
        cached = try_to_load_from_cache(settings.model, "config.json")
        if not isinstance(cached, str):
            return "warn", f"{settings.model} is not on this machine", _download("the server starts")
        folder = Path(cached).parent
    if not (folder / "config.json").exists():
        return "fail", f"{folder} has no config.json", "Give --model a folder in Hugging Face's layout."
    files = [path for suffix in _WEIGHTS for path in folder.glob(f"*{suffix}")]
    weights = {path: path.stat().st_size for path in files}
    if not weights and "load_format" not in settings.engine_args:
        return "fail", f"{folder} has no weights ({', '.join(_WEIGHTS)})", "Download the complete model."
    pointer = b"version https://git-lfs"
    if any(size < 1024 and path.read_bytes().startswith(pointer) for path, size in weights.items()):
        return "fail", f"{folder} holds Git LFS pointers instead of weights", "Run git lfs pull there."
    config = read_config(folder)
    if isinstance(config, tuple):
        return "fail", *config
    if problem := problem_of(config, settings):
        return "fail", f"{settings.model}: {problem[0]}", problem[1]
    context = config.get("max_position_embeddings")
    architectures = ", ".join(config.get("architectures") or ["unknown architecture"])
    found = f"{settings.model}: {architectures}, context {context or 'unknown'}"
    scaled = config.get("rope_scaling") or os.environ.get("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN")
    if context and settings.context_length and settings.context_length > context and not scaled:
        return "fail", found, f"context_length {settings.context_length} exceeds the model's: lower it."
    found += f", weights {sum(weights.values()) / _MIB:,.0f} MiB"
    if is_dequantised(settings):
        found += f", dequantised to bfloat16 once, into {settings.data_dir / 'models'}"
    return "ok", found


def _download(when: str) -> str:
    return f"It will be downloaded when {when}, which needs the network. Without one, give a local folder."


def _tokenizer(settings: Settings) -> Finding:
    if {"trust_remote_code", "tokenizer_path"} & settings.engine_args.keys():
        return "skip", "engine_args say how SGLang loads it"
    own = settings.tokenizer or Path(settings.model).is_dir()
    if not own and (settings.engine_url or settings.workers):
        return "skip", "the engine names it when the server starts"
    name = tokenizer_name(settings)
    if name is None:
        return "skip", "it is made with the model when the server starts"
    local = Path(name).is_dir()
    if Path(name).is_file():
        return "fail", f"{name} is a file", "Give --tokenizer a folder with tokenizer.json."
    from transformers import AutoTokenizer

    from ragserve.ingest.tokenizer import without_vocabulary

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError) as error:
        if local:
            advice = "Give --tokenizer a folder with tokenizer.json."
            return "fail", f"{name}: {str(error).splitlines()[0]}", advice
        return "warn", f"{name} is not on this machine", "It will be downloaded when the server starts."
    if without_vocabulary(tokenizer):
        return "fail", f"{name} has no tokenizer", "Give --tokenizer a folder with tokenizer.json."
    if not tokenizer.chat_template:
        advice = (
            "Prompts use our plain layout. If the model was trained with a chat template, "
            "give --tokenizer one that has it."
        )
        return "warn", f"{name} has no chat template", advice
    return "ok", f"{len(tokenizer):,} tokens, with a chat template"


def _embedder(settings: Settings) -> Finding:
    from ragserve.retrieval.embedder import Embedder, is_remote
    from ragserve.retrieval.remote_embedder import address_of

    name = settings.embedder
    if is_remote(name):
        started, remote = time.perf_counter(), Embedder.of(settings)
        dim, url = remote.dim, address_of(name).url
        return "ok", f"{remote.name}, {dim} dimensions, {url} answered in {_ms_since(started)}"
    try:
        embedder = Embedder(name, device=settings.embed_device)
    except InvalidRequest as error:
        if error.code != "embedder_not_found" or not _HUB_ID.fullmatch(name) or Path(name).exists():
            raise
        return "warn", f"{name} is not on this machine", _download("it is first used")
    vectors = embedder.encode(["the doctor asks"])
    if vectors.shape != (1, embedder.dim):
        advice = "Choose a sentence-transformers model that gives one vector per text."
        return "fail", f"{name} gives {vectors.shape}, expected (1, {embedder.dim})", advice
    return "ok", f"{name}, {embedder.dim} dimensions"


def _reranker(settings: Settings) -> Finding:
    from ragserve.retrieval.remote_reranker import (
        RemoteReranker,
        address_of,
        check_reranker,
        is_remote,
        public_name,
    )
    from ragserve.retrieval.reranker import reranker_names

    async def ask(name: str) -> None:
        key = settings.rerank_api_key
        remote = RemoteReranker(name, api_key=key, timeout_s=settings.remote_timeout_s)
        try:
            await remote.measure()
        finally:
            await remote.close()

    found = []
    for name in reranker_names(settings):
        check_reranker(name)
        if is_remote(name):
            started = time.perf_counter()
            asyncio.run(ask(name))
            found.append(f"{public_name(name)}, {address_of(name).url} answered in {_ms_since(started)}")
        else:
            found.append(name)
    return ("ok", "; ".join(found)) if found else ("skip", "none but the model's own keys")


def _ms_since(started: float) -> str:
    return f"{(time.perf_counter() - started) * 1e3:.0f} ms"


def _data_dir(settings: Settings) -> Finding:
    folder = settings.data_dir.absolute()
    if folder.exists() and not folder.is_dir():
        return "fail", f"{folder} is a file", "Move it away, or give another --data-dir."
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        advice = "Give this user write permission there, or choose another --data-dir."
        return "fail", f"{existing} is not writable", advice
    free = shutil.disk_usage(existing).free
    found = f"{folder}{'' if existing == folder else ' (will be made)'}, {free / 2**30:,.1f} GiB free"
    if free < 64 * _MIB:
        return "fail", found, "Free some space: SQLite and the index need room even to change existing data."
    if free < 1024 * _MIB:
        return "warn", found, "Ingesting a larger corpus will run out of space."
    return "ok", found


def _index(settings: Settings) -> Finding:
    if settings.registry_url is None and not (settings.data_dir / "ragserve.sqlite3").exists():
        return "skip", "nothing ingested yet"
    from ragserve.retrieval.document_store import open_store
    from ragserve.retrieval.embedder import embedder_name, public_embedder

    with open_store(settings.model_copy(update={"index_device": "cpu"})) as store:
        reports = store.check(None)
        namespaces = store.namespaces()
        foreign = _foreign_cuts(settings, store)
    if broken := [report for report in reports if not report.ok]:
        found = "; ".join(f"{report.namespace}: {', '.join(report.problems)}" for report in broken)
        return "fail", found, "Run `ragserve docs check --repair`: it builds indexes again from the registry."
    if damaged := [report.namespace for report in reports if report.file.startswith("damaged")]:
        advice = "Nothing is lost: the server rebuilds them from the registry at its next start."
        return "warn", f"damaged index files: {', '.join(damaged)}", advice
    documents, chunks = sum(n.n_documents for n in namespaces), sum(n.n_chunks for n in namespaces)
    found = f"{len(namespaces)} namespaces, {documents:,} documents, {chunks:,} chunks"
    if other := sorted({info.name for info in namespaces if info.embedder != embedder_name(settings)}):
        advice = (
            f"Queries there are refused with --embedder {public_embedder(settings.embedder)}: "
            "use the embedder they were made with, or ingest again."
        )
        return "warn", f"{found}; embedded with another model: {', '.join(other)}", advice
    if foreign:
        said, advice = advice_of(foreign, settings.model)
        return "warn", f"{found}; {said}", advice
    return "ok", found


def _foreign_cuts(settings: Settings, store: IndexStore) -> list[str]:
    """Namespaces cut for another model; none where the server's is not on this machine."""
    if settings.engine_elsewhere:
        return []
    with suppress(InvalidRequest):  # another check says it
        name = tokenizer_name(settings)
        if name is not None and (Path(name) / "tokenizer.json").is_file():
            return foreign_cuts(store, name)
    return []


def _index_device(settings: Settings) -> Finding:
    import faiss

    gpu = hasattr(faiss, "StandardGpuResources")
    found = f"faiss {faiss.__version__}, {'with' if gpu else 'without'} GPU support"
    if settings.index_device == "gpu" and not gpu:
        return "fail", found, "index_device gpu needs faiss-gpu: install it, or set --index-device cpu."
    if settings.index_device == "gpu" and faiss.get_num_gpus() < 1:
        return "fail", f"{found}, but it sees no GPU", "Check nvidia-smi, or set --index-device cpu."
    return "ok", found


def _port(settings: Settings) -> Finding:
    if settings.port == 0:
        return "ok", "a free one is chosen at start"
    where = address(settings.host, settings.port)
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except PermissionError:
            return "fail", f"{settings.port} needs privileges", "Choose a --port above 1023."
        except OSError as error:
            advice = "If a server already runs there, use it or stop it; otherwise choose another --port."
            return "fail", f"{where}: {error.strerror or error}", advice
    return "ok", f"{where} is free"


def _engine(settings: Settings) -> Finding:
    if settings.workers:
        return "skip", "workers are asked when the server starts"
    if not settings.engine_url:
        return "skip", "started by ragserve itself"
    url = settings.engine_url.rstrip("/")
    key = settings.engine_api_key.get_secret_value() if settings.engine_api_key else None
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        response = httpx.get(f"{url}/model_info", headers=headers, timeout=5, follow_redirects=True)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        advice = "Start SGLang there (python -m sglang.launch_server ...), or correct --engine-url."
        return "fail", f"{url}: {error}", advice
    if response.status_code in {401, 403}:
        return "fail", f"{url} refuses the key", "Give the server's key: RAGSERVE_ENGINE_API_KEY."
    info: Any = None
    if response.status_code == 200 and "json" in response.headers.get("content-type", ""):
        info = response.json()
    if not isinstance(info, dict) or "model_path" not in info:
        return "fail", f"{url} answers {response.status_code}, not as SGLang does", "Correct --engine-url."
    found = f"{url} serves {info['model_path']}"
    if not info.get("is_generation", True):
        return "fail", f"{found}, which does not generate", "Start it with a generation model."
    return "ok", found
