"""The files of deploy/: linted by hadolint, check-jsonschema and kubernetes-validate, and in agreement with
the product. Nothing here is run, which needs Docker, but the commands by which Kubernetes asks and drains a
worker."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from ragserve.config import Settings
from sglang_ext.documents.remote.remote_options import mooncake_options
from tests.conftest import REPO
from tests.unit.api.scripted_server import eventually
from tests.unit.fleet.fake_worker import KEY, workers

DEPLOY = REPO / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
PODS = ("StatefulSet", "Deployment")
COMPOSE = ("compose.yaml", "compose.cuda.yaml", "compose.router.yaml", "compose.mooncake.yaml")
WORKERS = "RAGSERVE_WORKERS"
COMPONENT = "app.kubernetes.io/component"
ALIVE = {"router": "/liveness", "master": "/metrics"}
LINTERS = {
    "Dockerfile": ("hadolint", "--no-color"),
    "compose": ("check-jsonschema", "--builtin-schema", "vendor.compose-spec"),
    "manifest": ("kubernetes-validate", "--strict", "--kubernetes-version", "1.34"),
}


def lint(kind: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    program, *options = LINTERS[kind]
    return subprocess.run(
        [str(Path(sys.executable).parent / program), *options, *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "NO_COLOR": "1"},
    )


@pytest.mark.parametrize(
    ("kind", "paths", "bug", "said"),
    [
        ("Dockerfile", [DEPLOY / "Dockerfile"], ("--no-cache-dir --index-url", "--index-url"), "DL3042"),
        ("compose", [DEPLOY / name for name in COMPOSE], ("depends_on", "depends_upon"), "depends_upon"),
        ("manifest", MANIFESTS, ("automountService", "automountservice"), "automountservice"),
    ],
    ids=list(LINTERS),
)
def test_linted(tmp_path: Path, kind: str, paths: list[Path], bug: tuple[str, str], said: str) -> None:
    clean = lint(kind, *paths)
    assert clean.returncode == 0, clean.stdout + clean.stderr
    planted = tmp_path / paths[0].name
    text = paths[0].read_text(encoding="utf-8")
    assert bug[0] in text
    planted.write_text(text.replace(*bug), encoding="utf-8")
    found = lint(kind, planted)
    assert found.returncode != 0
    assert said in found.stdout + found.stderr, "the linter sees a mistake"


def objects() -> Iterator[dict[str, Any]]:
    for path in MANIFESTS:
        yield from yaml.load_all(path.read_text(encoding="utf-8"), yaml.CSafeLoader)


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [each for each in objects() if each["kind"] == kind]


def compose(name: str = "compose.yaml") -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))["services"]
    return found


def running() -> list[dict[str, Any]]:
    """The objects that run pods."""
    return [each for kind in PODS for each in of_kind(kind)]


def options_of(name: str) -> dict[str, str]:
    """The environment variables of a ConfigMap."""
    (found,) = [each["data"] for each in of_kind("ConfigMap") if each["metadata"]["name"] == name]
    return dict(found)


def containers() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for each in running():
        spec = each["spec"]["template"]["spec"]
        for container in spec["containers"]:
            yield spec, container


def container_of(name: str) -> dict[str, Any]:
    (found,) = [each for each in running() if each["metadata"]["name"] == name]
    (container,) = found["spec"]["template"]["spec"]["containers"]
    return dict(container)


def test_environment_variables_are_settings() -> None:
    used = {variable["name"] for _, container in containers() for variable in container.get("env", ())}
    used |= {name for each in of_kind("ConfigMap") for name in each["data"]}
    for file in ("compose.yaml", "compose.router.yaml", "compose.mooncake.yaml"):
        used |= {name for service in compose(file).values() for name in service.get("environment", ())}
    used |= set(re.findall(r"RAGSERVE_\w+", (DEPLOY / "Dockerfile").read_text(encoding="utf-8")))
    ours = {name for name in used if name.startswith("RAGSERVE_")}
    assert "RAGSERVE_REGISTRY_URL" in ours
    assert ours <= {f"RAGSERVE_{name.upper()}" for name in Settings.model_fields}


def test_fronts_name_the_workers_that_there_are() -> None:
    services = compose()
    workers = [name for name, service in services.items() if "--worker" in service.get("command", ())]
    assert services["ragserve"]["environment"][WORKERS] == ",".join(f"http://{n}:30000" for n in workers)
    assert set(workers) < set(services["ragserve"]["depends_on"])
    routed = compose("compose.router.yaml")
    assert routed["router"]["command"][-len(workers) :] == [f"http://{name}:30000" for name in workers]
    assert routed["ragserve"]["environment"]["RAGSERVE_ROUTER_URL"] == "http://router:30000"
    (stateful,) = [each for each in of_kind("StatefulSet") if each["metadata"]["name"] == "ragserve-worker"]
    variables = [variable for _, container in containers() for variable in container.get("env", ())]
    (named,) = [variable["value"] for variable in variables if variable["name"] == WORKERS]
    service, replicas = stateful["spec"]["serviceName"], range(stateful["spec"]["replicas"])
    pods = [f"http://ragserve-worker-{i}.{service}:30000" for i in replicas]
    assert named.split(",") == pods
    assert container_of("ragserve-router")["args"][-len(pods) :] == pods
    assert options_of("ragserve-front") == {"RAGSERVE_ROUTER_URL": "http://ragserve-router:30000"}


def test_router_and_shared_store_are_those_of_the_compose_files(tmp_path: Path) -> None:
    def general(arguments: list[str]) -> list[str]:
        return [each.replace("${", "$(").replace("}", ")") for each in arguments if "://" not in each]

    router = compose("compose.router.yaml")["router"]["command"]
    assert general(container_of("ragserve-router")["args"]) == general(router)
    store = compose("compose.mooncake.yaml")
    master = container_of("ragserve-mooncake")
    assert (master["command"], master["args"]) == (
        store["mooncake"]["entrypoint"],
        store["mooncake"]["command"],
    )
    options = options_of("ragserve-worker")
    named = {name: value.replace("ragserve-mooncake:", "mooncake:") for name, value in options.items()}
    assert named == store["worker-1"]["environment"]
    arguments = json.loads(options["RAGSERVE_KV_STORAGE_ARGS"])
    settings = Settings(
        data_dir=tmp_path, kv_storage=options["RAGSERVE_KV_STORAGE"], kv_storage_args=arguments
    )
    assert settings.shared_store
    assert mooncake_options(arguments)["master_server_address"].split(":")[0] in {
        each["metadata"]["name"] for each in of_kind("Service")
    }


def test_optional_parts_reach_the_pods_that_they_are_for() -> None:
    for name, stateful in (("ragserve-front", "ragserve"), ("ragserve-worker", "ragserve-worker")):
        assert options_of(name)
        assert container_of(stateful)["envFrom"] == [{"configMapRef": {"name": name, "optional": True}}]
    admitted = {
        (
            policy["spec"]["podSelector"]["matchLabels"][COMPONENT],
            peer["podSelector"]["matchLabels"][COMPONENT],
        )
        for policy in of_kind("NetworkPolicy")
        for rule in policy["spec"]["ingress"]
        for peer in rule["from"]
    }
    assert admitted == {
        ("worker", "front"),
        ("worker", "router"),
        ("worker", "worker"),
        ("router", "front"),
        ("mooncake", "worker"),
    }


def test_selectors_select_pods_that_there_are() -> None:
    pods = [each["spec"]["template"]["metadata"]["labels"] for each in running()]
    selectors = [each["spec"]["selector"] for each in of_kind("Service")]
    for kind in (*PODS, "PodDisruptionBudget"):
        selectors += [each["spec"]["selector"]["matchLabels"] for each in of_kind(kind)]
    selectors += [each["spec"]["podSelector"]["matchLabels"] for each in of_kind("NetworkPolicy")]
    assert len(selectors) == 15
    for selector in selectors:
        assert sum(selector.items() <= labels.items() for labels in pods) == 1, selector


def test_probes_and_graceful_ends() -> None:
    assert len(list(containers())) == 4
    for spec, container in containers():
        name = container["name"]
        for probe in ("livenessProbe", "startupProbe"):
            assert container[probe]["httpGet"]["path"] == ALIVE.get(name, "/health")
        if name not in ALIVE:
            assert ":30000/ready" in container["readinessProbe"]["exec"]["command"][-1]
        if name == "master":  # nobody waits for its answers: workers go on without it
            continue
        waits = re.findall(r"seq (\d+)|^(\d+)$", container["lifecycle"]["preStop"]["exec"]["command"][-1])
        (before,) = [int(a or b) for a, b in waits]
        # uvicorn's ten seconds for running answers, and as many for saving
        assert spec["terminationGracePeriodSeconds"] >= before + 20
    for name in ("ragserve", "worker-1", "worker-2"):
        assert compose()[name]["stop_grace_period"] == "60s"


@pytest.mark.skipif(shutil.which("curl") is None, reason="the images have curl, this machine does not")
def test_a_worker_s_commands_see_whether_it_is_ready_and_drain_it(tmp_path: Path) -> None:
    container = container_of("ragserve-worker")

    def started(hook: dict[str, Any]) -> subprocess.Popen[bytes]:
        command = [each.replace("http://127.0.0.1:30000", worker.url) for each in hook["exec"]["command"]]
        environment = {**os.environ, "RAGSERVE_API_KEY": KEY}
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)

    def ready() -> bool:
        return started(container["readinessProbe"]).wait(240) == 0

    with workers(tmp_path, 1) as (worker,):
        assert ready()
        worker.ledger.before_first.clear()
        fields = {"rid": "r", "input_ids": [5, 6], "sampling_params": {}, "stream": True}
        with (
            httpx.Client(base_url=worker.url, headers={"Authorization": f"Bearer {KEY}"}) as client,
            client.stream("POST", "/generate", json=fields, timeout=240) as answer,
        ):
            stopping = started(container["lifecycle"]["preStop"])
            eventually(lambda: client.get("/worker").json()["draining"], "the drain")
            assert not ready()
            assert stopping.poll() is None, "a request is running"
            worker.ledger.before_first.set()
            assert answer.read().endswith(b"data: [DONE]\n\n")
        assert stopping.wait(240) == 0
        assert not ready()


def test_versions_are_those_that_are_pinned() -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    pins = dict(re.findall(r"([\w-]+)==([\w.]+)", dockerfile))
    install = (REPO / "scripts" / "install").read_text(encoding="utf-8")
    assert f"torch=={pins.pop('torch')}" in install
    pinned = (REPO / "requirements" / "dev.txt").read_text(encoding="utf-8").split()
    assert pins
    assert {f"{name}=={version}" for name, version in pins.items()} <= set(pinned)
    product = (REPO / "requirements" / "product.txt").read_text(encoding="utf-8").split()
    (image,) = re.findall(r"SGLANG_IMAGE=lmsysorg/sglang:v([\w.]+)", dockerfile)
    assert f"sglang=={image}" in product


def test_the_image_gets_all_that_the_wheel_is_built_of() -> None:
    lines = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").split("\n")
    kept = {line.removeprefix("!") for line in lines if line.startswith("!")}
    folders = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-dir"
    ].values()
    assert all(any(folder == path or folder.startswith(f"{path}/") for path in kept) for folder in folders)
    assert {"pyproject.toml", "README.md", "requirements"} <= kept
    assert all((REPO / path).exists() for path in kept)
