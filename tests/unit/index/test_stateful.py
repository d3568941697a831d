"""Random sequences of what users and processes do, against a dict: two stores on one directory, all four
types.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from ragserve.errors import NotFound
from ragserve_index import Eq
from ragserve_index.structures.flat import Sq8
from ragserve_index.structures.ivf import Ivf
from tests.conftest import EXHAUSTIVE
from tests.unit.index.index_samples import (
    REGISTRY,
    TYPES,
    item,
    make,
    on_registries,
    open_store,
    vectors_of,
)
from tests.unit.index.postgres_server import PostgresServer

documents = st.tuples(st.integers(0, 40), st.sampled_from(["en", "de"]))
pytestmark = on_registries
SOURCES = [f"s{i}" for i in range(6)]
# sq8 learns its ranges from the vectors that there are: later ones may lie outside
TOLERANCE = {"flat": 1e-5, "sq8": 0.1, "ivf": 1e-5, "hnsw": 1e-5}


class Machine(RuleBasedStateMachine):
    index_type = "flat"
    server: PostgresServer | None = None

    @initialize()
    def start(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="ragserve-index-"))
        if self.server is not None:
            os.environ[REGISTRY] = self.server.database()
        self.stores = [make(self.directory, self.index_type), open_store(self.directory)]
        self.model: dict[str, tuple[int, int, str]] = {}  # source -> edition, chunks, language
        self.version = 0
        self.edition = 0
        self.old_file: bytes | None = None

    def teardown(self) -> None:
        for store in self.stores:
            store.close()
        shutil.rmtree(self.directory)
        if self.server is not None:
            self.server.give_back(os.environ[REGISTRY])

    @property
    def file(self) -> Path:
        return self.directory / "indexes" / "ns-000001.faiss"

    @rule(
        who=st.integers(0, 1),
        batch=st.dictionaries(
            st.sampled_from(SOURCES),
            st.tuples(st.integers(0, 40), st.sampled_from(["en", "de"])),
            min_size=1,
            max_size=4,
        ),
    )
    def replace(self, who: int, batch: dict[str, tuple[int, str]]) -> None:
        self.edition += 1
        items = [item(s, n, edition=self.edition, metadata={"lang": lang}) for s, (n, lang) in batch.items()]
        self.stores[who].replace_documents("n", items)
        self.model |= {source: (self.edition, n, lang) for source, (n, lang) in batch.items()}
        self.version += 1

    @rule(who=st.integers(0, 1), source=st.sampled_from(SOURCES))
    def remove(self, who: int, source: str) -> None:
        found = self.stores[who].find_source("n", source)
        assert (found is not None) == (source in self.model)
        if found is not None:
            self.stores[who].remove_document("n", found.doc_id)
            del self.model[source]
            self.version += 1

    @rule(
        who=st.integers(0, 1),
        seed=st.integers(0, 9),
        k=st.sampled_from([1, 3, 10, 500]),
        lang=st.sampled_from([None, "en", "de"]),
    )
    def search(self, who: int, seed: int, k: int, lang: str | None) -> None:
        expected: dict[str, np.ndarray] = {}
        for source, (edition, n, language) in self.model.items():
            if lang in (None, language):
                expected |= {
                    f"{source}#{edition}.{i}": v for i, v in enumerate(vectors_of(source, edition, n=n))
                }
        query = vectors_of("query", seed)
        node = None if lang is None else Eq(field="lang", value=lang)
        result = self.stores[who].search("n", query, k, filter=node)
        (hits,) = result.hits
        assert result.version == self.version
        assert len(hits) == len({hit.chunk.chunk_id for hit in hits}) == min(k, len(expected))
        tolerance = TOLERANCE[self.index_type]
        for hit in hits:
            assert hit.score == pytest.approx(float(expected[hit.chunk.text] @ query[0]), abs=tolerance)
        assert [h.score for h in hits] == sorted((h.score for h in hits), reverse=True)
        if self.index_type == "flat" and hits:
            best = sorted((float(v @ query[0]) for v in expected.values()), reverse=True)[:k]
            assert [hit.score for hit in hits] == pytest.approx(best, abs=tolerance)

    @rule(
        who=st.integers(0, 1),
        source=st.sampled_from(SOURCES),
        k=st.sampled_from([1, 3, 500]),
        lang=st.sampled_from([None, "en", "de"]),
        hybrid=st.booleans(),
    )
    def search_text(self, who: int, source: str, k: int, lang: str | None, hybrid: bool) -> None:
        sizes = {
            s: (edition, n) for s, (edition, n, language) in self.model.items() if lang in (None, language)
        }
        edition, n = sizes.get(source, (0, 0))
        named = {f"{source}#{edition}.{i}" for i in range(n)}
        vector = vectors_of("query", 1)[0] if hybrid else None
        node = None if lang is None else Eq(field="lang", value=lang)
        result = self.stores[who].search_text("n", source, k, vector=vector, filter=node)
        (hits,) = result.hits
        assert result.version == self.version
        by_words = {hit.chunk.text for hit in hits if hit.bm25 is not None}
        if hybrid:
            assert (
                len({hit.chunk.text for hit in hits})
                == len(hits)
                == min(k, sum(n for _, n in sizes.values()))
            )
            assert by_words <= named
            assert k < 500 or by_words == named
        else:
            assert len(by_words) == len(hits) == min(k, n)
            assert by_words <= named

    @rule(who=st.integers(0, 1))
    def save(self, who: int) -> None:
        self.stores[who].save()
        assert self.stores[who].check()[0].file in ("current", "missing")

    @rule(who=st.integers(0, 1))
    def reopen(self, who: int) -> None:
        self.stores[who].close()
        self.stores[who] = open_store(self.directory)

    @rule(who=st.integers(0, 1))
    def die(self, who: int) -> None:
        """As after SIGKILL: connections gone, nothing saved."""
        self.stores[who].database.close()
        self.stores[who] = open_store(self.directory)

    @rule()
    def keep_the_file(self) -> None:
        if self.file.exists():
            self.old_file = self.file.read_bytes()

    @rule()  # no precondition: when files are saved in the background is not for hypothesis to depend on
    def put_an_old_file_back(self) -> None:
        if self.old_file is not None:
            self.file.write_bytes(self.old_file)
            self.die(0)
            self.die(1)

    @rule(at=st.floats(0, 1, exclude_max=True))
    def damage_the_file(self, at: float) -> None:
        if self.file.exists():
            content = bytearray(self.file.read_bytes())
            content[int(len(content) * at)] ^= 255
            self.file.write_bytes(content)
            self.die(0)
            self.die(1)

    @rule(who=st.integers(0, 1))
    def rebuild(self, who: int) -> None:
        self.stores[who].rebuild("n")

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "stores"):
            return
        for store in self.stores:
            info = store.namespace("n")
            assert (info.version, info.n_documents) == (self.version, len(self.model))
            assert info.n_chunks == sum(n for _, n, _ in self.model.values())

    @rule(who=st.integers(0, 1))
    def check(self, who: int) -> None:
        (report,) = self.stores[who].check()
        replaced = "it is not used and will be replaced at the next save"
        problems = [problem for problem in report.problems if replaced not in problem]
        assert not problems
        assert report.n_indexed == sum(n for _, n, _ in self.model.values())

    @rule(who=st.integers(0, 1))
    def documents_agree(self, who: int) -> None:
        listed = {d.source: (d.n_chunks, d.metadata["lang"]) for d in self.stores[who].documents("n")}
        assert listed == {source: (n, lang) for source, (_, n, lang) in self.model.items()}
        with pytest.raises(NotFound):
            self.stores[who].document("n", "doc_x")


@pytest.mark.parametrize(
    ("registry", "index_type"),
    [*(("sqlite", t) for t in TYPES), ("postgres", "flat")],
    indirect=["registry"],
)
def test_stores_follow_the_model(
    request: pytest.FixtureRequest, registry: str, index_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thresholds so low that structures train, grow, shrink and are rebuilt within a sequence."""
    monkeypatch.setattr(Sq8, "TRAIN_FROM", 60)
    monkeypatch.setattr(Ivf, "TRAIN_FROM", 60)
    own: dict[str, Any] = {"index_type": index_type}
    if registry == "postgres":
        own["server"] = request.getfixturevalue("postgres")
    machine: Any = type(f"Machine_{index_type}", (Machine,), own)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=100 if EXHAUSTIVE else 12 if registry == "sqlite" else 4,
            stateful_step_count=50 if EXHAUSTIVE else 25,
            suppress_health_check=list(HealthCheck),
        ),
    )
