"""Documents' KV over the product's life on the real engine: removed with its text, whoever removes it."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

from tests.conftest import MODEL

TEXT = "The observatory of {} was founded in 1902 by Ada Brandt. It has a telescope of 40 inches. "


def ingest(server: Any, namespace: str, texts: dict[str, str], **fields: Any) -> dict[str, Any]:
    body = {"namespace": namespace, "texts": [{"name": name, "text": text} for name, text in texts.items()], **fields}
    return finished(server, server.client.post("/rag/ingest", json=body))


def finished(server: Any, response: Any) -> dict[str, Any]:
    assert response.status_code == 202, response.text
    deadline = time.monotonic() + 60
    while (job := server.client.get(response.headers["location"]).json())["state"] not in ("done", "failed", "cancelled"):
        assert time.monotonic() < deadline, job
        time.sleep(0.05)
    return dict(job)


def held(server: Any, namespace: str) -> tuple[int, int]:
    """Documents of a namespace on host and on disk; the system text is one of them."""
    stat = server.client.get("/rag/cache").json()
    spaces = [stat[tier]["namespaces"].get(namespace, {"documents": 0}) for tier in ("host", "disk")]
    assert stat["disk"]["waiting_documents"] == 0
    return spaces[0]["documents"], spaces[1]["documents"]


def ask(server: Any, namespace: str, k: int = 5) -> dict[str, Any]:
    body = {"query": "Who founded the observatory?", "namespace": namespace, "strategy": "concat", "k": k, "max_new_tokens": 4}
    return dict(server.client.post("/rag/query", json=body).json())


def eventually(server: Any, namespace: str, want: tuple[int, int]) -> None:
    deadline = time.monotonic() + 20
    while (found := held(server, namespace)) != want:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def test_replaced_and_removed_documents_leave_every_tier_whoever_does_it(server: Any) -> None:
    space = "observatories"
    ingest(server, space, {name: TEXT.format(name) for name in ("quillmark", "norhaven", "osterby")})
    assert ask(server, space)["context"]["tokens_recomputed"] == 0
    eventually(server, space, (4, 4))
    ingest(server, space, {"quillmark": TEXT.format("Quillmark") + "It was closed in 1950."})
    assert held(server, space) == (3, 3), "gone when the job is done"
    found = server.client.get("/rag/documents", params={"namespace": space, "source_prefix": "norhaven"}).json()["documents"]
    assert server.client.delete(f"/rag/documents/{found[0]['doc_id']}", params={"namespace": space}).status_code == 200
    assert held(server, space) == (2, 2)
    command = [sys.executable, "-m", "ragserve.cli", "docs"]
    command[4:] = ["rm", "osterby", "--namespace", space, "--data-dir", str(server.data_dir), "--model", str(MODEL)]
    subprocess.run(command, check=True, capture_output=True)
    eventually(server, space, (1, 1))
    assert ask(server, space)["context"]["tokens_kept"] > 0
    eventually(server, space, (2, 2))
    command[4:] = ["drop", space, "--data-dir", str(server.data_dir)]
    subprocess.run(command, check=True, capture_output=True)
    eventually(server, space, (0, 0))
