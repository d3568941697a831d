"""S3 folders and git repositories by POST /rag/ingest: only what the operator allows, into the namespace that
it is allowed for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.unit.api.scripted_server import Tenants, eventually, serving
from tests.unit.ingest.git_server import Repository


@dataclass
class Site:
    tenants: Tenants
    acme: httpx.Client
    beta: httpx.Client
    repository: Repository

    @property
    def allowed(self) -> str:
        return f"{self.repository.address}#main:docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("client-sources")
    repository = Repository(folder / "handbook")
    repository.write_all({"docs/pay.md": "# Pay\n\nOn the last day.\n", "secret.md": "# Secret\n\nWords.\n"})
    sources = {"acme*": [f"{repository.address}#main:docs", "s3://acme-docs/handbook"]}
    with serving(folder / "data", model_path, client_sources=sources) as live:
        tenants = Tenants(live)
        with (
            tenants.client("acme", "read ingest", "acme*") as acme,
            tenants.client("beta", "read ingest delete", "beta") as beta,
        ):
            yield Site(tenants, acme, beta, repository)


def ingest(client: httpx.Client, namespace: str, *urls: str, **options: Any) -> httpx.Response:
    return client.post("/rag/ingest", json={"namespace": namespace, "urls": urls, **options})


def finished(client: httpx.Client, answer: httpx.Response) -> dict[str, Any]:
    """The job of an accepted ingestion, at its end."""
    assert answer.status_code == 202, answer.text
    job: dict[str, Any] = {}

    def over() -> bool:
        job.update(client.get(answer.headers["Location"]).json())
        return job["state"] not in ("queued", "running")

    eventually(over, "the end of a job")
    return job


def test_an_allowed_folder_is_ingested_and_synced(site: Site) -> None:
    job = finished(site.acme, ingest(site.acme, "acme", site.allowed))
    assert (job["state"], job["counts"]["indexed"], job["counts"]["failed"]) == ("done", 1, 0)
    rows = site.acme.get("/rag/documents", params={"namespace": "acme"}).json()["documents"]
    assert [row["source"] for row in rows] == [f"{site.allowed}/pay.md"]
    site.repository.git("mv", "docs/pay.md", "docs/wages.md")
    site.repository.commit()
    refused = ingest(site.acme, "acme", site.allowed, prune=True)
    assert refused.status_code == 403, "the key may not delete"
    with site.tenants.client("keeper", "read ingest delete", "acme*") as keeper:
        job = finished(keeper, ingest(keeper, "acme", site.allowed, prune=True))
    assert (job["counts"]["indexed"], job["counts"]["removed"]) == (1, 1)


@pytest.mark.parametrize(
    "asked",
    [
        "git+file://{path}#main",
        "git+file://{path}#main:",
        "git+file://{path}",
        "git+file://{path}#main:docsecret",
        "git+file://{path}/../handbook#main:docs",
        "git+ssh://{path}#main:docs",
        "git+file:///etc",
        "s3://acme-docs",
        "s3://acme-docs/handbook-old",
        "s3://office@acme-docs/handbook",
        "s3://other/handbook",
    ],
)
def test_what_is_not_allowed_is_refused_alike(site: Site, asked: str) -> None:
    answer = ingest(site.acme, "acme", asked.format(path=site.repository.path))
    assert answer.status_code in (400, 403), answer.text
    error = answer.json()["error"]
    assert error["code"] in ("source_not_allowed", "invalid_request")
    assert str(site.repository.path) not in error["message"]


def test_what_one_namespace_may_have_is_none_of_anothers(site: Site) -> None:
    answer = ingest(site.beta, "beta", site.allowed)
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "source_not_allowed"
    answer = ingest(site.beta, "acme", site.allowed)
    assert answer.json()["error"]["code"] == "namespace_not_allowed"


@pytest.mark.parametrize("asked", ["git+https://u:hunter2@example.com/x", "ext::sh -c true", "s3://a/../b"])
def test_a_wrong_address_is_a_bad_request(site: Site, asked: str) -> None:
    answer = ingest(site.acme, "acme", asked)
    assert answer.status_code == 400
    assert "hunter2" not in answer.text
