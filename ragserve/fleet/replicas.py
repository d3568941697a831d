"""Workers that the server starts itself, on this machine, and ends with itself."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from ragserve.children import end_with_parent
from ragserve.config import Settings
from ragserve.engine.ports import LOOPBACK, hold_port, port_of
from ragserve.errors import InvalidRequest
from ragserve.profiles.decode import FILE_NAME as DECODE_FILE
from ragserve.profiles.prefill_crossover import FILE_NAME as PREFILL_FILE
from ragserve.profiles.samkv import FILE_NAME as SAMKV_FILE
from ragserve.profiles.sparse_attention import FILE_NAME as SPARSE_FILE

log = logging.getLogger(__name__)
START_S = 900.0  # large models take minutes to load
_STOP_S = 20.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0  # before a worker is started again
# Of the server in front: not a worker's.
_OWN = frozenset(
    {"host", "port", "data_dir", "api_key", "engine_api_key", "engine_url", "workers", "replicas"}
    | {"allowed_hosts", "cors_origins", "registry_url", "router_url", "embedder", "rerank", "rerank_models"}
    | {"embedder_api_key", "rerank_api_key"}
)
_SHARED = ("kv_host_bytes", "kv_offload_bytes", "kv_disk_bytes")  # the settings say how much in all


@dataclass(eq=False)
class Replica:
    """A worker's process. ``port`` is held for it as long as the server lives."""

    number: int
    port: int
    data_dir: Path
    environment: dict[str, str]
    process: subprocess.Popen[bytes] | None = None
    began: float = 0.0
    pause_s: float = _FIRST_PAUSE_S

    def start(self) -> None:
        """Start the process. It is killed when the thread of this call ends."""
        command = [sys.executable, "-m", "ragserve.cli", "serve", "--worker", "--host", LOOPBACK]
        command += ["--port", str(self.port), "--data-dir", str(self.data_dir)]
        self.process = subprocess.Popen(
            command,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the server, which ends its workers in order
            preexec_fn=partial(end_with_parent, os.getpid()),
        )
        self.began = time.monotonic()


@dataclass(frozen=True)
class Started:
    """Workers for a server to connect to: ``settings`` have their key."""

    settings: Settings
    urls: list[str]
    start_s: float = 60.0
    replicas: list[Replica] = field(default_factory=list)
    _due: dict[Replica, float] = field(default_factory=dict)

    def why_failed(self) -> str:
        """Say which worker of this machine has ended; empty if none has."""
        for replica in self.replicas:
            code = None if replica.process is None else replica.process.poll()
            if code is not None:
                return f"Worker {replica.number} has ended with exit code {code} before it was ready."
        return ""

    def look(self, now: float) -> None:
        """Start workers of this machine again that have ended, later each time; ``now`` as of
        time.monotonic(). Call it from the thread that started them."""
        for replica in self.replicas:
            process = replica.process
            if process is None or process.poll() is None:
                continue
            if replica not in self._due:
                if now - replica.began > _LONGEST_PAUSE_S:  # it had worked
                    replica.pause_s = _FIRST_PAUSE_S
                log.error(
                    "Worker %d has ended with exit code %s; it is started again in %g s",
                    *(replica.number, process.returncode, replica.pause_s),
                )
                self._due[replica] = now + replica.pause_s
            elif now >= self._due[replica]:
                del self._due[replica]
                replica.pause_s = min(2 * replica.pause_s, _LONGEST_PAUSE_S)
                replica.start()


@contextlib.contextmanager
def replicas(settings: Settings) -> Iterator[Started]:
    """Start ``settings.replicas`` workers, each with a data folder in ``workers/`` of the server's, and keep
    them running until the block ends; with none, yield the addresses of ``settings.workers``.

    They share the host and disk budgets of the settings, listen on loopback, and have a key that is made
    anew."""
    if not settings.replicas:
        yield Started(settings, (settings.workers or "").split(","))
        return
    key = secrets.token_urlsafe(32)
    with contextlib.ExitStack() as stack:
        made = []
        for number in range(settings.replicas):
            port = port_of(stack.enter_context(hold_port()))
            folder = settings.data_dir / "workers" / str(number)
            _share_profiles(settings.data_dir, folder)
            made.append(Replica(number, port, folder, _environment(settings, number, key)))
        stack.callback(_end, made)
        for replica in made:
            replica.start()
        yield Started(
            settings.model_copy(update={"engine_api_key": SecretStr(key)}),
            [f"http://{LOOPBACK}:{replica.port}" for replica in made],
            START_S,
            made,
        )


def _environment(settings: Settings, number: int, key: str) -> dict[str, str]:
    """The environment of a worker: this process's, with the server's settings, its GPUs and its key."""
    fields = settings.model_dump(mode="json", exclude_unset=True, exclude=set(_OWN))
    for name in _SHARED:
        fields[name] = getattr(settings, name) // settings.replicas
    values = {f"RAGSERVE_{name.upper()}": _text(value) for name, value in fields.items() if value is not None}
    inherited = {name: value for name, value in os.environ.items() if name not in _VARIABLES}
    own = {"RAGSERVE_API_KEY": key, "RAGSERVE_REPLICAS": "0"}  # which ragserve.toml may name
    return inherited | values | own | _devices(settings, number, os.environ)


_VARIABLES = frozenset(f"RAGSERVE_{name.upper()}" for name in _OWN)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _devices(settings: Settings, number: int, environ: Mapping[str, str]) -> dict[str, str]:
    """The GPUs of a worker: as many as share a model, after those of the workers before. Without one, an
    equal share of the cores."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(each) for each in range(_gpus())]
    if not names or visible == "":
        cores = max(1, len(os.sched_getaffinity(0)) // settings.replicas)
        return {"OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS", str(cores))}
    own = names[number * settings.tp_size : (number + 1) * settings.tp_size]
    if len(own) < settings.tp_size:
        raise InvalidRequest(
            f"{settings.replicas} replicas of tp_size {settings.tp_size} need "
            f"{settings.replicas * settings.tp_size} GPUs; there are {len(names)}.",
            hint="Lower --replicas or --tp-size.",
            param="replicas",
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(own)}


def _gpus() -> int:
    """The NVIDIA GPUs of this machine, asked of the driver: CUDA must not be initialised here."""
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def _share_profiles(data_dir: Path, folder: Path) -> None:
    """Let a worker read the profiles that were measured for the server's data folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (SAMKV_FILE, DECODE_FILE, PREFILL_FILE, SPARSE_FILE):
        link = folder / name
        if not link.is_symlink() and not link.exists():
            link.symlink_to(Path(os.path.relpath(data_dir / name, folder)))


def _end(made: list[Replica]) -> None:
    """Ask all workers to end, so that they write what waits for their disk, then kill what is left."""
    running = [replica.process for replica in made if replica.process is not None]
    for process in running:
        process.send_signal(signal.SIGTERM)  # nothing happens to one that has ended
    until = time.monotonic() + _STOP_S
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until - time.monotonic()))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
