"""Several servers on one registry in Postgres: what concerns a server's own folder stays with it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ragserve.cache.evictions import SHARED_KEPT_S, clean_files
from ragserve.config import load
from ragserve.errors import Conflict
from ragserve.ingest.ingestor import Ingestor, SubmittedText
from ragserve.ingest.jobs.runner import JobRunner
from ragserve.retrieval.document_store import open_store
from ragserve.retrieval.embedder import Embedder
from ragserve_index import EvictionLog
from tests.campaigns.troubles import clock
from tests.unit.index.postgres_server import PASSWORD, PostgresServer


def test_uploads_are_read_by_the_server_that_has_them(
    tmp_path: Path, postgres: PostgresServer, embedder: Embedder
) -> None:
    url = postgres.database()
    one, two = (load(data_dir=tmp_path / name, registry_url=url) for name in ("one", "two"))
    assert PASSWORD not in f"{one!r} {one.model_dump()}"
    with open_store(one) as here, open_store(two) as there:
        mine, other = Ingestor(one, here, embedder), Ingestor(two, there, embedder)
        job = mine.submit_texts("n", [SubmittedText("lamp", "The lamp of Skerryvore was lit in 1844.")])
        with pytest.raises(Conflict) as caught:
            other.run(job.job_id)
        assert caught.value.code == "job_elsewhere"
        runner = JobRunner(other)
        runner.start()
        later = other.submit_texts("n", [SubmittedText("oil", "It burned oil.")])
        runner.wake()
        deadline = time.monotonic() + 240
        while other.jobs.get(later.job_id).state != "done":
            assert time.monotonic() < deadline
            time.sleep(0.02)
        runner.stop()
        assert mine.jobs.get(job.job_id).state == "queued", "the other server's runner passed it over"
        assert mine.run(job.job_id).state == "done"
        assert [hit.chunk.source for hit in there.search_text("n", "Skerryvore", 3).hits[0]] == ["lamp"]


def test_a_command_leaves_the_log_of_removals_to_the_servers(
    tmp_path: Path, postgres: PostgresServer, embedder: Embedder
) -> None:
    settings = load(data_dir=tmp_path, registry_url=postgres.database())
    with open_store(settings) as store:
        ingestor = Ingestor(settings, store, embedder)
        ingestor.run(ingestor.submit_texts("n", [SubmittedText("lamp", "A lamp.")]).job_id)
        store.remove_document("n", store.documents("n")[0].doc_id)
        assert not clean_files(settings, store)
        assert len(EvictionLog(store.database)) == 1
        with clock(SHARED_KEPT_S + 60):
            assert not clean_files(settings, store)
        assert len(EvictionLog(store.database)) == 0, "no server that is there can need it"
