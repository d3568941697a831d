"""SIGKILL at any moment: what was committed is there, nothing is half there or twice there, and the index
agrees.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.conftest import EXHAUSTIVE
from tests.integration.forked_starts import start_module
from tests.unit.index.index_samples import (
    TYPES,
    all_chunks,
    assert_clean,
    on_registries,
    on_sqlite,
    open_store,
    texts,
    vectors_of,
)
from tests.unit.index.killed_child import child_killed_at, make_old, old_or_new

pytestmark = on_registries


def run_and_kill(
    data_dir: Path, index_type: str, mode: str, start: int, after_s: float, *, said: int = 0
) -> int:
    """Start the writer, kill it ``after_s`` seconds after it is ready and has said ``said`` editions; the
    last edition it said was committed, or -1.
    """
    arguments = (str(data_dir), index_type, mode, str(start))
    readable, writable = os.pipe()
    with open(readable, encoding="utf-8") as lines:
        with open(writable, "wb") as said_by_it:
            module = "tests.unit.index.killed_writer"
            process = start_module(module, arguments, {}, said_by_it, said_by_it)
        assert lines.readline() == "ready\n"
        committed = [int(lines.readline()) for _ in range(said)]
        time.sleep(after_s)
        process.send_signal(signal.SIGKILL)
        committed += [int(line) for line in lines.read().split()]
    assert process.wait(240) == -signal.SIGKILL, "it ended on its own"
    return committed[-1] if committed else -1


@pytest.mark.parametrize(
    ("registry", "index_type", "mode"),
    [
        *[("sqlite", t, "save") for t in TYPES],
        ("sqlite", "flat", "replace"),
        ("sqlite", "hnsw", "remove"),
        ("postgres", "flat", "remove"),
    ],
    indirect=["registry"],
)
def test_killed(tmp_path: Path, index_type: str, mode: str) -> None:
    moments = random.Random(f"{index_type}{mode}")
    committed, edition = -1, 0
    for turn in range(20 if EXHAUSTIVE else 2):
        after_s = moments.uniform(0.005, 0.15)
        committed = max(committed, run_and_kill(tmp_path, index_type, mode, edition, after_s, said=turn % 2))
        with open_store(tmp_path) as store:
            assert_clean(store)
            documents = store.documents("n")
            editions = {int(document.content_hash.removeprefix("hash")) for document in documents}
            if documents:
                # a batch is there as a whole, and it is the last one committed, or one more whose word did
                # not get out
                (edition,) = editions
                assert committed <= edition <= committed + 1
                committed = edition
                assert len(documents) == 8 or (mode == "remove" and len(documents) == 7)
            else:
                assert committed == -1
            known = all_chunks(store)
            assert len(known) == 25 * len(documents)
            found = store.search("n", vectors_of("q"), 1000).hits[0]
            assert sorted(hit.chunk.chunk_id for hit in found) == sorted(known)
            assert len({hit.chunk.text for hit in found}) == len(known)
            by_words = {hit.chunk.chunk_id for hit in store.search_text("n", "title", 1000).hits[0]}
            assert by_words == set(known)
            if known and index_type != "sq8":
                vector = known[min(known)]
                assert texts(store, vector, 1) == [
                    next(h.chunk.text for h in found if h.chunk.chunk_id == min(known))
                ]
        edition = committed + 1


@on_sqlite
@pytest.mark.parametrize("index_type", ["flat", "hnsw"] if EXHAUSTIVE else ["hnsw"])
def test_killed_line_by_line(tmp_path: Path, index_type: str) -> None:
    """Kill at every line that a write and a save run through, or at every 29th in the short form."""
    make_old(tmp_path / "base", index_type)
    seen: set[int] = set()
    step = killed = 0
    while True:
        step += 1 if EXHAUSTIVE else 29
        data_dir = tmp_path / str(step)
        shutil.copytree(tmp_path / "base", data_dir)
        alive = not child_killed_at(step, data_dir)
        version = old_or_new(data_dir)
        seen.add(version)
        shutil.rmtree(data_dir)
        if alive:
            break
        killed += 1
    assert killed > (50 if EXHAUSTIVE else 6)
    assert seen == {1, 2}


@pytest.mark.parametrize("registry", ["sqlite", "postgres"], indirect=True)
def test_a_change_of_a_chunk_is_whole_or_not_there(tmp_path: Path, registry: str) -> None:
    chance = random.Random(5)
    data_dir = tmp_path / registry
    last = run_and_kill(data_dir, "flat", "correct", 0, chance.uniform(0.2, 0.4), said=2)
    with open_store(data_dir) as store:
        assert_clean(store)
        (document,) = store.documents("n")
        states = store.chunk_changes.states("n", document.doc_id)
        assert [state.chunk.ordinal for state in states] == list(range(25))
        for turn in range(max(0, last - 20), last):
            state = states[turn % 25]
            assert (state.chunk.text, state.disabled) == (f"edit {turn}", turn % 3 == 0)
