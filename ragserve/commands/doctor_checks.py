"""What `ragserve doctor` examines. Each check looks at one thing, changes nothing, and says what it found and
what to do about it.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any, Literal

import httpx

from ragserve.config import Settings
from ragserve.errors import InvalidRequest, RagserveError

Status = Literal["ok", "warn", "fail", "skip"]
_REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements"
_SGLANG = "0.5.16"
_MIB = 2**20
_HUB_ID = re.compile(r"[\w.\-]+(/[\w.\-]+)?")


@dataclass(frozen=True, slots=True)
class Check:
    """``fail``: will not work; ``warn``: works, but not as one may expect; ``skip``: nothing to look at.
    ``advice`` is what to do.
    """

    name: str
    status: Status
    found: str
    advice: str = ""


def examine(settings: Settings) -> Iterable[Check]:
    """All checks in order, one by one as they finish. A check that crashes is a failure of what it looked at."""
    checks: tuple[tuple[str, Callable[[Settings], Check]], ...] = (
        ("python", _python),
        ("versions", _versions),
        ("plugins", _plugins),
        ("platform", _platform),
        ("device", _device),
        ("model", _model),
        ("tokenizer", _tokenizer),
        ("embedder", _embedder),
        ("data folder", _data_dir),
        ("index", _index),
        ("index device", _index_device),
        ("port", _port),
        ("engine", _engine),
    )
    for name, check in checks:
        try:
            yield check(settings)
        except RagserveError as error:
            yield Check(name, "fail", error.message, error.hint or "See the message.")
        except Exception as error:  # noqa: BLE001 - the examination must reach its end
            yield Check(
                name,
                "fail",
                f"{type(error).__name__}: {error}",
                f"The check of the {name} crashed on this; please report it.",
            )


def _python(_: Settings) -> Check:
    return Check("python", "ok", f"{platform.python_version()} at {sys.executable}")


def _versions(_: Settings) -> Check:
    installed = _installed("sglang")
    if installed != _SGLANG:
        return Check(
            "versions",
            "fail",
            f"sglang {installed or 'is missing'}, needed {_SGLANG}",
            "Run scripts/install.",
        )
    pins = _pins()
    wrong = [
        f"{name} {_installed(name) or 'missing'} (pinned {pin})"
        for name, pin in pins.items()
        if _installed(name) != pin
    ]
    if wrong:
        advice = "Run scripts/install to get the set that was tested together."
        return Check(
            "versions", "warn", f"{len(wrong)} of {len(pins)} pins differ: " + ", ".join(wrong[:5]), advice
        )
    return Check(
        "versions",
        "ok",
        f"sglang {installed}; "
        + (f"all {len(pins)} pins match" if pins else "no pins beside this installation"),
    )


def _pins() -> dict[str, str]:
    """name -> version of the pins for this kind of machine; empty where the project was installed without its
    requirements folder.
    """
    path = _REQUIREMENTS / ("product.txt" if _cuda() else "cpu.txt")
    if not path.exists():
        return {}
    found = re.findall(r"^([A-Za-z0-9_.\-]+)(?:\[[^\]]*\])?==([^\s;#]+)", path.read_text(), re.MULTILINE)
    return {name: pin for name, pin in found if name != "torch" or "+" in pin}


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _plugins(_: Settings) -> Check:
    wanted = {"sglang.srt.platforms": "ragserve_cpu", "sglang.srt.plugins": "ragserve"}
    missing = [
        f"{group}:{name}"
        for group, name in wanted.items()
        if name not in {e.name for e in entry_points(group=group)}
    ]
    if missing:
        advice = "SGLang finds them through the installed project: run scripts/install (pip install --no-deps -e .)."
        return Check("plugins", "fail", "not registered: " + ", ".join(missing), advice)
    allowed = {name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()}
    if allowed and not set(wanted.values()) <= allowed:
        advice = "Unset SGLANG_PLUGINS, or add ragserve and ragserve_cpu to it."
        return Check("plugins", "fail", f"SGLANG_PLUGINS={','.join(sorted(allowed))} leaves ours out", advice)
    others = sorted({e.name for group in wanted for e in entry_points(group=group)} - set(wanted.values()))
    return Check(
        "plugins", "ok", "ragserve, ragserve_cpu" + (f"; others: {', '.join(others)}" if others else "")
    )


def _platform(settings: Settings) -> Check:
    if settings.engine_url:
        return Check("platform", "skip", "the engine runs elsewhere (engine_url)")
    from ragserve.engine.compat import prepare

    prepare()
    from sglang.srt.platforms import current_platform

    name = type(current_platform).__name__
    if name == "SRTPlatform":
        advice = "Our CPU platform should be active here: see the line about plugins, and SGLANG_PLATFORM."
        return Check("platform", "fail", "SGLang found no platform for this machine", advice)
    return Check("platform", "ok", name)


def _device(settings: Settings) -> Check:
    import torch

    if torch.cuda.is_available():
        names = [
            f"{torch.cuda.get_device_name(i)} ({torch.cuda.get_device_properties(i).total_memory / 2**30:.0f} GiB)"
            for i in range(torch.cuda.device_count())
        ]
        found = f"torch {torch.__version__}, CUDA {torch.version.cuda}, {', '.join(names)}"
        if settings.tp_size > len(names) and not settings.engine_url:
            return Check(
                "device",
                "fail",
                found,
                f"tp_size {settings.tp_size} wants more GPUs than there are: lower --tp-size.",
            )
        return Check("device", "ok", found)
    found = f"torch {torch.__version__}, no GPU, {len(os.sched_getaffinity(0))} cores"
    if shutil.which("nvidia-smi"):
        advice = (
            "This machine has NVIDIA's driver, but this torch cannot use it: install a CUDA build of torch."
        )
        return Check("device", "warn", found, advice)
    return Check("device", "ok", found)


def _model(settings: Settings) -> Check:
    if settings.engine_url:
        return Check("model", "skip", "the engine brings its own (engine_url)")
    folder = Path(settings.model)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        cached = (
            try_to_load_from_cache(settings.model, "config.json")
            if _HUB_ID.fullmatch(settings.model)
            else None
        )
        if isinstance(cached, str):
            folder = Path(cached).parent
        elif not _HUB_ID.fullmatch(settings.model):
            return Check(
                "model",
                "fail",
                f"{settings.model} does not exist",
                "Give --model a folder with config.json, or a Hugging Face id.",
            )
        else:
            advice = "It will be downloaded when the server starts, which needs the network. Without one, give a local folder."
            return Check("model", "warn", f"{settings.model} is not on this machine", advice)
    if not (folder / "config.json").exists():
        return Check(
            "model", "fail", f"{folder} has no config.json", "Give --model a folder in Hugging Face's layout."
        )
    weights = [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
    if not weights:
        return Check(
            "model", "fail", f"{folder} has no weights (*.safetensors, *.bin)", "Fetch the model completely."
        )
    if any(
        path.stat().st_size < 1024 and path.read_bytes().startswith(b"version https://git-lfs")
        for path in weights
    ):
        return Check(
            "model", "fail", f"{folder} holds Git LFS pointers instead of weights", "Run git lfs pull there."
        )
    config = json.loads((folder / "config.json").read_text())
    context = config.get("max_position_embeddings")
    found = f"{settings.model}: {', '.join(config.get('architectures') or ['unknown architecture'])}, context {context or 'unknown'}"
    if context and settings.context_length and settings.context_length > context:
        return Check(
            "model",
            "fail",
            found,
            f"context_length {settings.context_length} is more than the model has: lower it.",
        )
    return Check(
        "model", "ok", f"{found}, weights {sum(path.stat().st_size for path in weights) / _MIB:,.0f} MiB"
    )


def _tokenizer(settings: Settings) -> Check:
    name = settings.tokenizer or settings.model
    if not Path(name).is_dir() and settings.engine_url and not settings.tokenizer:
        return Check("tokenizer", "skip", "asked from the engine when the server starts")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError) as error:
        if Path(name).is_dir():
            return Check(
                "tokenizer",
                "fail",
                f"{name}: {str(error).splitlines()[0]}",
                "Give --tokenizer a folder with tokenizer.json.",
            )
        return Check(
            "tokenizer",
            "warn",
            f"{name} is not on this machine",
            "It will be downloaded when the server starts.",
        )
    if not tokenizer.chat_template:
        advice = "Prompts get our plain layout. Give --tokenizer one with a chat template if the model was trained with one."
        return Check("tokenizer", "warn", f"{name} has no chat template", advice)
    return Check("tokenizer", "ok", f"{len(tokenizer):,} tokens, with a chat template")


def _embedder(settings: Settings) -> Check:
    from ragserve.retrieval.embedder import Embedder

    try:
        embedder = Embedder(settings.embedder, device=settings.embed_device)
    except InvalidRequest as error:
        if (
            error.code != "embedder_not_found"
            or not _HUB_ID.fullmatch(settings.embedder)
            or Path(settings.embedder).exists()
        ):
            raise
        advice = "It will be downloaded when it is first used, which needs the network. Without one, give a local folder."
        return Check("embedder", "warn", f"{settings.embedder} is not on this machine", advice)
    vectors = embedder.encode(["the doctor asks"])
    if vectors.shape != (1, embedder.dim):
        advice = "Choose a sentence-transformers model that gives one vector a text."
        return Check(
            "embedder",
            "fail",
            f"{settings.embedder} gives {vectors.shape}, expected (1, {embedder.dim})",
            advice,
        )
    return Check("embedder", "ok", f"{settings.embedder}, {embedder.dim} dimensions")


def _data_dir(settings: Settings) -> Check:
    folder = settings.data_dir.absolute()
    if folder.exists() and not folder.is_dir():
        return Check(
            "data folder", "fail", f"{folder} is a file", "Move it away, or give another --data-dir."
        )
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        return Check(
            "data folder",
            "fail",
            f"{existing} is not writable",
            "Give this user the right to write there, or another --data-dir.",
        )
    free = shutil.disk_usage(existing).free
    found = f"{folder}{'' if existing == folder else ' (will be made)'}, {free / 2**30:,.1f} GiB free"
    if free < 64 * _MIB:
        return Check(
            "data folder",
            "fail",
            found,
            "Free some space: SQLite and the index need room even to change what is there.",
        )
    if free < 1024 * _MIB:
        return Check("data folder", "warn", found, "Ingestion of a larger corpus will run out of space.")
    return Check("data folder", "ok", found)


def _index(settings: Settings) -> Check:
    if not (settings.data_dir / "ragserve.sqlite3").exists():
        return Check("index", "skip", "nothing ingested yet")
    from ragserve_index import IndexStore

    store = IndexStore(settings.data_dir, index_type=settings.index_type)
    try:
        reports = store.check(None)
        namespaces = store.namespaces()
    finally:
        store.close()
    broken = [report for report in reports if not report.ok]
    if broken:
        found = "; ".join(f"{report.namespace}: {', '.join(report.problems)}" for report in broken)
        return Check(
            "index",
            "fail",
            found,
            "Stop the server and start it again: damaged indexes are rebuilt from SQLite.",
        )
    damaged = [report.namespace for report in reports if report.file.startswith("damaged")]
    if damaged:
        advice = "Nothing is lost: the next start of the server rebuilds them from SQLite."
        return Check("index", "warn", f"damaged index files: {', '.join(damaged)}", advice)
    other = sorted({info.name for info in namespaces if info.embedder != settings.embedder})
    documents, chunks = sum(n.n_documents for n in namespaces), sum(n.n_chunks for n in namespaces)
    found = f"{len(namespaces)} namespaces, {documents:,} documents, {chunks:,} chunks"
    if other:
        advice = f"Queries there are refused with --embedder {settings.embedder}: use the one they were embedded with, or ingest again."
        return Check("index", "warn", f"{found}; embedded with another model: {', '.join(other)}", advice)
    return Check("index", "ok", found)


def _index_device(settings: Settings) -> Check:
    import faiss

    gpu = hasattr(faiss, "StandardGpuResources")
    found = f"faiss {faiss.__version__}, {'with' if gpu else 'without'} GPU support"
    if settings.index_device == "gpu" and not gpu:
        return Check(
            "index device",
            "fail",
            found,
            "index_device gpu needs faiss-gpu: install it, or set --index-device cpu.",
        )
    return Check("index device", "ok", found)


def _port(settings: Settings) -> Check:
    if settings.port == 0:
        return Check("port", "ok", "a free one is chosen at start")
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except PermissionError:
            return Check("port", "fail", f"{settings.port} needs privileges", "Choose a --port above 1023.")
        except OSError as error:
            found = f"{settings.host}:{settings.port}: {error.strerror or error}"
            return Check(
                "port",
                "fail",
                found,
                "If a server is already running there, use it or stop it; otherwise choose another --port.",
            )
    return Check("port", "ok", f"{settings.host}:{settings.port} is free")


def _engine(settings: Settings) -> Check:
    if not settings.engine_url:
        return Check("engine", "skip", "started by ragserve itself")
    url = settings.engine_url.rstrip("/")
    key = settings.engine_api_key.get_secret_value() if settings.engine_api_key else None
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        response = httpx.get(f"{url}/model_info", headers=headers, timeout=5, follow_redirects=True)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return Check(
            "engine",
            "fail",
            f"{url}: {error}",
            "Start SGLang there (python -m sglang.launch_server ...), or correct --engine-url.",
        )
    if response.status_code in {401, 403}:
        return Check(
            "engine", "fail", f"{url} refuses the key", "Give the server's key: RAGSERVE_ENGINE_API_KEY."
        )
    info: Any = None
    if response.status_code == 200 and "json" in response.headers.get("content-type", ""):
        info = response.json()
    if not isinstance(info, dict) or "model_path" not in info:
        return Check(
            "engine",
            "fail",
            f"{url} answers {response.status_code}, not as SGLang does",
            "Correct --engine-url.",
        )
    if not info.get("is_generation", True):
        return Check(
            "engine",
            "fail",
            f"{url} serves {info['model_path']}, which does not generate",
            "Start it with a generation model.",
        )
    return Check("engine", "ok", f"{url} serves {info['model_path']}")
