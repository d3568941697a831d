"""`ragserve ingest --follow-changes`, which runs for weeks, beside processes that drop its namespace."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ragserve.ingest import watch
from ragserve_index import IndexStore
from ragserve_index.index.namespace_index import NamespaceIndex
from tests.unit.commands.test_ingest import Cli
from tests.unit.ingest.test_s3 import OneVector


@pytest.fixture
def ragserve(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Cli:
    monkeypatch.setattr("ragserve.retrieval.embedder.Embedder.of", lambda *_args, **_options: OneVector())
    monkeypatch.setattr("ragserve.ingest.ingestor.embedder_name", lambda _settings: OneVector.name)
    return Cli(monkeypatch, capfd, tmp_path)


def indexes() -> int:
    gc.collect()
    return sum(isinstance(each, NamespaceIndex) for each in gc.get_objects())


def test_an_index_of_a_namespace_that_was_dropped_is_let_go_without_a_change(
    ragserve: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, data, held = tmp_path / "notes", tmp_path / "ragserve-data", list[int]()
    folder.mkdir()
    (folder / "one.md").write_text("# One\n\nA note.\n")

    class Steps(watch.Watch):
        def __iter__(self) -> Iterator[tuple[list[str], bool]]:
            for step, found in enumerate(super().__iter__()):
                assert found == ([], False)
                held.append(indexes() - before)
                if step == 0:
                    with IndexStore(data) as other:
                        other.drop_namespace("default")
                if held[-1] == 0:
                    self._stop.set()
                yield found

    monkeypatch.setattr(watch, "Watch", Steps)
    before = indexes()
    late = threading.Timer(240, os.kill, (os.getpid(), signal.SIGINT))
    late.start()
    try:
        ragserve("ingest", "notes", "--follow-changes", "--data-dir", str(data))
    finally:
        late.cancel()
    assert (held[0], held[-1]) == (1, 0)
    with IndexStore(data) as store:
        assert not store.namespaces(), "nothing makes it again"
