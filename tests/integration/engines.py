"""The engines that tests share, one for each configuration. Starting one costs about 15 seconds of two cores.

A test that needs an engine of its own (because it measures the start, or kills the engine) says so."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

from ragserve.engine.running_server import RunningServer
from sglang_ext.attention.pools.streaming_heads import save_pattern
from tests.conftest import EXHAUSTIVE
from tests.integration.forked_starts import DTYPE, fork_parent, forked_server
from tests.integration.models import LLAMA3, random_llama, with_tools

RANKS = 2
PARALLEL_PAGE, PARALLEL_LOGICAL = 16, 4
GATES = torch.rand(
    2, 4, generator=torch.Generator().manual_seed(5)
)  # [layers, KV heads] of the parallel engine
STRESS_CHUNK = 128
SESSION_REFRESH = 3  # turns after which the stress engine's sessions are computed anew
STREAMING_GATES = torch.tensor([[0.9, 0.3], [0.1, 0.2]])  # of the streaming engine; its second layer streams
STORAGE = {
    "backend_name": "slow",
    "module_path": "tests.integration.slow_storage",
    "class_name": "SlowStorage",
}
SPARSE: dict[str, Any] = {"sparse_attention": "on", "decode_mode": "dense", "decode_dense_below": 0}
_DUMPER = {"DUMPER_SERVER_PORT": "reuse"}  # the control operations, over HTTP
_FAULTS = {**_DUMPER, "RAGSERVE_FAULTS": "1"}  # a test may make a stage of the scheduler fail


@dataclass
class Server:
    """A running server and its client. ``model``: the model's folder; ``storage``: the folder of its slow
    disk, or of the store that it shares."""

    running: RunningServer
    client: httpx.Client
    model: Path | None = None
    storage: Path | None = None

    @property
    def url(self) -> str:
        return self.running.url

    @property
    def data_dir(self) -> Path:
        return self.running.data_dir

    def finished(self, response: httpx.Response) -> dict[str, Any]:
        """Wait for the job that a 202 response names."""
        assert response.status_code == httpx.codes.ACCEPTED, response.text
        deadline = time.monotonic() + 240
        while True:
            job = dict(self.client.get(response.headers["location"]).json())
            if job["state"] in ("done", "failed", "cancelled"):
                return job
            assert time.monotonic() < deadline, job
            time.sleep(0.05)

    def is_answering(self) -> bool:
        """Whether a query is being answered, or its client has left and that is not noticed yet."""
        lines = self.client.get("/metrics").text.splitlines()
        found = [float(line.split()[-1]) for line in lines if line.startswith("ragserve_queries_in_flight")]
        assert found, "it is among the metrics"
        return sum(found) > 0

    def analysed(self) -> None:
        """Wait for what an idle server computes: the analyses of documents that questions did without. Until
        then figures grow, and rule `sentences` chooses other tokens from one moment to the next."""
        deadline = time.monotonic() + 240
        while waiting := self.client.get("/rag/cache").json()["analyses"]["waiting"]:
            assert time.monotonic() < deadline, f"{waiting} documents wait for their analysis"
            time.sleep(0.1)


@contextlib.contextmanager
def default(folder: Path) -> Iterator[Server]:
    """The defaults and the embedded model, with control routes, by which commands that start an engine of
    their own are given this one (`served_engine`)."""
    with started(folder / "data", control_routes=True, env=_DUMPER) as server:
        yield server


@contextlib.contextmanager
def control(folder: Path) -> Iterator[Server]:
    """The same with the small model."""
    model = random_model(folder)
    with started(folder / "data", model=model, control_routes=True, env=_DUMPER) as server:
        yield server


@contextlib.contextmanager
def started(data_dir: Path, *, storage: Path | None = None, **flags: Any) -> Iterator[Server]:
    """Start a server that caches only what a test asks for, and computes as `forked_server` does. It
    and the engine's processes are forked; users' are spawned, as those of `test_wheel` and
    `warmed_elsewhere`."""
    with (
        forked_server(data_dir=data_dir, warm_ingested=False, **flags) as running,
        running.client() as client,
    ):
        yield Server(running, client, flags.get("model"), storage)


@contextlib.contextmanager
def quick(folder: Path) -> Iterator[Server]:
    """The defaults, with a small model of random weights whose chat template has tools."""
    with started(folder / "data", model=with_tools(random_model(folder))) as server:
        yield server


@dataclass(frozen=True)
class WarmedElsewhere:
    """Documents that an engine of its own has warmed, which has ended. ``shared``: the folder of the store
    that it has given them to."""

    namespace: str
    texts: dict[str, str]
    """By file name."""
    data: Path
    shared: Path
    report: dict[str, Any]


def warmed_elsewhere(folder: Path, model: Path | None) -> WarmedElsewhere:
    """Run `ragserve ingest --warm` with a shared store that takes everything. In the exhaustive form, and
    outside `scripts/test`, its engine's processes are spawned, as users' are."""
    data, shared, namespace = folder / "data", folder / "shared", "elsewhere"
    shared.mkdir()
    text = "The observatory of {0} was founded in 1902 by Ada {0}. It has a telescope of 40 inches. "
    texts = {f"{name}.txt": text.format(name.title()) for name in ("marrow", "tolsta")}
    inputs = [str(folder / name) for name in texts]
    for path, text in zip(inputs, texts.values(), strict=True):
        Path(path).write_text(text)
    options = ["--namespace", namespace, "--data-dir", str(data), "--model", str(model), "--warm", "--json"]
    store = shared_folder(shared, value=0)
    env = {f"RAGSERVE_{name.upper()}": str(value) for name, value in {"dtype": DTYPE, **store}.items()}
    with (folder / "report.json").open("wb") as report, (folder / "said.txt").open("wb") as said:
        # it embeds before it forks, and a fork lacks OpenMP's threads
        spawned = EXHAUSTIVE or torch.get_num_threads() > 1
        module = "ragserve.cli" if spawned else "tests.integration.forked_main"
        command = fork_parent().start(module, ["ingest", *inputs, *options], env, report, said)
        assert command.wait(600) == 0, (folder / "said.txt").read_text()[-2000:]
    return WarmedElsewhere(namespace, texts, data, shared, json.loads((folder / "report.json").read_text()))


def shared_folder(folder: Path, *, value: float) -> dict[str, Any]:
    """Settings of a store in a folder, which gets documents that are worth ``value``."""
    return {
        "kv_storage": "shared",
        "kv_storage_args": json.dumps({"folder": str(folder)}),
        "kv_shared_value": value,
    }


def random_model(folder: Path) -> Path:
    """Write the model of engines whose answers need not be right; the same one each time."""
    return random_llama(folder / "model", kv_heads=2, head_dim=64, positions=8192)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[Server]:
    """The API key "secret", a context of 2,048 tokens, a KV pool of 8 bits in pages of 64, prefill chunks of
    256 tokens."""
    chunks = json.dumps({"chunked_prefill_size": 256})
    flags = {**SPARSE, "decode_page_size": 64, "kv_bits": 8, "context_length": 2048, "engine_args": chunks}
    flags["model"] = random_llama(folder / "model", kv_heads=2, head_dim=64, layers=4)
    with started(folder / "data", api_key="secret", **flags) as server:
        yield server


@contextlib.contextmanager
def parallel(folder: Path) -> Iterator[Server]:
    """Two tensor-parallel processes of two KV heads each, multi-head attention and llama3-scaled rotary
    positions. Half of the KV heads stream. Pages of 16; prefill chunks of 256 that carry decode rows along. A
    shared folder, which gets what a test puts there. Below the device documents' pages have 8 bits.
    """
    model = random_llama(folder / "llama3-mha", head_dim=64, rope=LLAMA3)  # sparse decoding needs 64
    heads = folder / "heads.json"
    save_pattern(heads, GATES, share=0.5, model="llama3-mha")
    storage = folder / "shared"
    storage.mkdir()
    flags = SPARSE | {
        "decode_page_size": PARALLEL_PAGE,
        "decode_logical_page": PARALLEL_LOGICAL,
        "decode_budget": 128,
        "decode_max_budget": 256,
        "decode_heads": heads,
        "tp_size": RANKS,
        "control_routes": True,  # for /dumper
        "kv_offload_bytes": 2**25,
        "max_total_tokens": 8192,  # twelve requests at once, or a composed context and its documents
        "engine_args": json.dumps({"chunked_prefill_size": 256, "enable_mixed_chunk": True}),
        "kv_page_bits": 8,
        "session_refresh_turns": 2,
        **shared_folder(storage, value=1e9),
    }
    env = {
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0"] * RANKS),  # SGLang wants a NUMA node for each otherwise
        "TORCHDYNAMO_DISABLE": "1",  # each rank would compile SGLang's lookup of embeddings at its start
        **_FAULTS,
    }
    with started(folder / "data", storage=storage, model=model, env=env, **flags) as server:
        yield server


@contextlib.contextmanager
def stress(folder: Path) -> Iterator[Server]:
    """The small model, forced retraction, strict memory checks, prefill chunks of 128, a small pool in pages
    of 16, and a disk that a test may hold. Sparse decoding is on for requests that ask for it, so each
    check of the pages covers their statistics, too."""
    storage = folder / "storage"
    storage.mkdir()
    flags = SPARSE | {
        "decode_page_size": 16,
        "decode_logical_page": 4,
        "kv_offload_bytes": 2**25,
        "engine_args": json.dumps(
            {"chunked_prefill_size": STRESS_CHUNK, "enable_return_hidden_states": True}
        ),
        "max_total_tokens": 6144,
        "control_routes": True,  # for /dumper
        "grammars": "all",
        "kv_host_bytes": 2**26,
        "session_on_host": True,
        "session_refresh_turns": SESSION_REFRESH,
        "kv_storage": "dynamic",
        "kv_storage_args": json.dumps(STORAGE | {"folder": str(storage)}),
    }
    env = {
        "SGLANG_TEST_RETRACT": "1",  # every third decode step retracts all requests but one
        # the scheduler dies when a slot is lost or counted twice
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
        "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
        **_FAULTS,
    }
    with started(folder / "data", storage=storage, model=random_model(folder), env=env, **flags) as server:
        yield server


@contextlib.contextmanager
def streaming(folder: Path) -> Iterator[Server]:
    """The small model, three of whose four KV heads stream and have a pool of their own. Pages of 16,
    prefill chunks of 128 that carry decode rows along, forced retraction, strict memory checks, six requests
    at once."""
    heads = folder / "heads.json"
    save_pattern(heads, STREAMING_GATES, share=0.75, model="model")
    flags = SPARSE | {
        "decode_page_size": 16,
        "decode_heads": heads,
        "decode_heads_pool": "own",
        "max_total_tokens": 4096,
        "control_routes": True,
        "engine_args": json.dumps(
            {"chunked_prefill_size": STRESS_CHUNK, "enable_mixed_chunk": True, "max_running_requests": 6}
        ),
    }
    env = {
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
        "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
        **_FAULTS,
    }
    with started(folder / "data", model=random_model(folder), env=env, **flags) as server:
        yield server
