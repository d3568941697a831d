"""A process that is killed at a line of its own while it replaces documents, and what it must leave."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from ragserve_index import IndexStore
from tests.unit.index.index_samples import assert_clean, item, make, texts, vectors_of

OLD = {"a": 3, "b": 2, "c": 4}
NEW = {"a": 2, "b": 2, "c": 4, "d": 3}


def child_killed_at(step: int, data_dir: Path) -> bool:
    """Fork, replace two documents, add one, save and close, killed by itself at the step-th line of ours.
    Whether it got that far.
    """
    child = os.fork()
    if child == 0:
        lines = 0

        def count(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal lines
            if "/ragserve_index/" not in frame.f_code.co_filename:
                return None
            lines += event == "line"
            if lines == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return count

        store = IndexStore(data_dir)
        texts(store, vectors_of("q"), 1)
        sys.settrace(count)
        store.replace_documents(
            "n", [item(name, n, edition=int(name in "ad")) for name, n in NEW.items() if name != "c"]
        )
        store.save()
        sys.settrace(None)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL)
    return status != 0


def make_old(data_dir: Path, index_type: str) -> None:
    """A store with the documents that the child replaces."""
    with make(data_dir, index_type) as store:
        store.replace_documents("n", [item(name, n) for name, n in OLD.items()])


def old_or_new(data_dir: Path) -> int:
    """The version that a killed child has left: 1 with all old documents, or 2 with all new ones. Asserts
    that the next start has the whole of one of them."""
    with IndexStore(data_dir) as store:
        version = store.namespace("n").version
        expected = OLD if version == 1 else NEW
        assert {d.source: d.n_chunks for d in store.documents("n")} == expected
        assert len(set(texts(store, vectors_of("q"), 100))) == sum(expected.values())
        by_words = {hit.chunk.text for hit in store.search_text("n", "title", 100).hits[0]}
        assert by_words == set(texts(store, vectors_of("q"), 100))
        assert_clean(store)
    assert not list((data_dir / "indexes").glob("*.tmp"))
    with IndexStore(data_dir) as store:
        assert store.check()[0].file == "current"
    return version
