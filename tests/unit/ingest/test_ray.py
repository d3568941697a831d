"""`ragserve ingest --ray`: the same documents as without, on a cluster of one machine.

Ray may be in a folder of its own (requirements/ray.txt): only processes that these tests start see that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from ragserve.config import Settings
from ragserve.errors import Unavailable
from ragserve.ingest.ingestor import Ingestor, PathOptions
from ragserve.retrieval.embedder import Embedder
from ragserve_index import IndexStore
from tests.conftest import EXHAUSTIVE, REPO
from tests.unit.commands.test_ingest import contents as indexed
from tests.unit.commands.test_ingest import many, wait_for_documents

RAY = REPO / ".venv" / "ray"


_TWO_NODES = """
from ray.cluster_utils import Cluster

node = {"num_cpus": 1, "object_store_memory": 100 << 20, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args=node)
cluster.add_node(**node)
print(cluster.address, flush=True)
input()
cluster.shutdown()
"""


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(RAY)]), "HOME": str(home)}


def ingest(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ragserve.cli", "ingest", *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        env=environment(home),
    )


@contextmanager
def cluster(nodes: int, home: Path) -> Iterator[str]:
    """The address of a cluster. Two nodes have a core each: one is parsed on, the other is embedded on."""
    if nodes == 1:
        yield "local"
        return
    with subprocess.Popen(
        [sys.executable, "-c", _TWO_NODES],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment(home),
    ) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.communicate("\n", timeout=240)


def contents(store: IndexStore) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for document in store.documents("default"):
        chunks = store.document_chunks("default", document.doc_id)
        ids = [chunk.chunk_id for chunk in chunks]
        found[document.source] = (
            document.title,
            document.content_hash,
            dict(document.metadata),
            [(chunk.text, chunk.start, chunk.end, chunk.page) for chunk in chunks],
            [store.sentence_vectors("default", ids)[i].starts.tolist() for i in ids],
        )
    return found


needs_ray = pytest.mark.skipif(
    not RAY.is_dir() and find_spec("ray") is None, reason="needs Ray, which `scripts/install --ray` installs"
)


@needs_ray
@pytest.mark.parametrize("nodes", [1, 2] if EXHAUSTIVE else [1])
def test_a_cluster_makes_the_same_documents(
    nodes: int,
    tmp_path: Path,
    settings: Settings,
    ingestor: Ingestor,
    store: IndexStore,
    embedder: Embedder,
) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    for i in range(5):
        (folder / f"{i}.md").write_text(
            f"# Light {i}\n\n" + f"The lamp of light {i} was lit in 18{i}4. " * 40
        )
    (folder / "broken.pdf").write_bytes(b"%PDF-1.7 and nothing else")
    data = tmp_path / "ray"
    with IndexStore(data) as made:
        before = Ingestor(settings.model_copy(update={"data_dir": data}), made, embedder)
        before.run(before.submit_paths("default", [str(folder / "0.md")]).job_id)
    with cluster(nodes, tmp_path) as address:
        done = ingest(tmp_path, str(folder), "--ray", address, "--data-dir", str(data), "--json")
    assert done.returncode == 3, done.stderr
    report = json.loads(done.stdout)
    assert report["state"] == "done"
    assert (report["files"]["indexed"], report["files"]["unchanged"], report["files"]["failed"]) == (4, 1, 1)
    (failure,) = report["failures"]
    assert failure["source"].endswith("broken.pdf")
    ingestor.run(ingestor.submit_paths("default", [str(folder)]).job_id)
    with IndexStore(data) as made:
        assert contents(made) == contents(store)
        query = np.ones((1, made.namespace("default").dim), dtype=np.float32) / 384**0.5
        ours, theirs = (each.search("default", query, 10).hits[0] for each in (made, store))
        assert [hit.chunk.text for hit in ours] == [hit.chunk.text for hit in theirs]
        assert [hit.score for hit in ours] == pytest.approx([hit.score for hit in theirs], abs=1e-4)
        assert made.check()[0].ok


@needs_ray
def test_a_killed_run_loses_and_doubles_nothing(tmp_path: Path) -> None:
    notes, folder, data = 150, tmp_path / "files", tmp_path / "data"
    folder.mkdir()
    many(folder, notes)
    (folder / "broken.pdf").write_bytes(b"%PDF-1.7 and nothing else")
    arguments = (str(folder), "--ray", "local", "--data-dir", str(data), "--json")
    command = [sys.executable, "-m", "ragserve.cli", "ingest", *arguments]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=environment(tmp_path), **silent) as process:
        wait_for_documents(data, 1, process)
        cluster_of_it = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    assert 0 < len(whole(data)) < notes
    _, left = psutil.wait_procs(cluster_of_it, timeout=150)  # agents take a minute and more
    assert not left, "Ray's processes end with the command that started them"
    done = ingest(tmp_path, *arguments)
    assert done.returncode == 3, done.stderr
    files = json.loads(done.stdout)["files"]
    assert (files["indexed"] + files["unchanged"], files["failed"]) == (notes, 1)
    assert files["unchanged"] > 0
    assert len(whole(data)) == notes


def whole(data: Path) -> list[str]:
    """The sources of all documents, each of which is there with its whole text."""
    found = indexed(data)
    for source, chunks in found.items():
        assert "".join(text for text, _, _ in chunks) == Path(source).read_text()
    return list(found)


def test_without_ray(
    settings: Settings, store: IndexStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # where it is installed, too
    (tmp_path / "a.md").write_text("A lamp.")
    ingestor = Ingestor(settings, store, lambda: pytest.fail("the cluster embeds"), ray="local")
    job = ingestor.submit_paths("n", [str(tmp_path / "a.md")], PathOptions())
    with pytest.raises(Unavailable) as caught:
        ingestor.run(job.job_id)
    assert caught.value.code == "no_ray"
    assert "pip install 'ragserve[ray]'" in str(caught.value)


@pytest.mark.parametrize(
    "inputs", [["https://example.org/a"], ["-", "--name", "a"], [".", "--follow-changes"]]
)
def test_what_nodes_cannot_read_is_refused(tmp_path: Path, inputs: list[str]) -> None:
    from typer.testing import CliRunner

    from ragserve.cli import _register, app

    _register()
    done = CliRunner().invoke(app, ["ingest", *inputs, "--ray", "local", "--data-dir", str(tmp_path)])
    assert done.exit_code != 0
    assert "--ray takes files" in str(done.exception) + done.output
