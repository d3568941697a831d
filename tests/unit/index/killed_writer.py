"""Run by the kill tests in a process of its own: writes until it is killed, and says what was committed
before it goes on.

Usage: python -m tests.unit.index.killed_writer DATA_DIR INDEX_TYPE MODE START. Modes: ``replace`` writes
rounds of the same documents; ``save`` also saves after each; ``remove`` removes and writes anew; ``correct``
edits and disables chunks."""

from __future__ import annotations

import sys
from pathlib import Path

from ragserve_index import IndexStore
from ragserve_index.chunk_changes import NewText
from tests.unit.index.index_samples import item, open_store, texts, vectors_of

DOCUMENTS, CHUNKS = 8, 25


def correct(store: IndexStore) -> None:
    """Edit, disable and enable chunks of one document without end."""
    (document,) = store.replace_documents("n", [item("d0", CHUNKS)])
    for turn in range(1_000_000):
        ordinal = turn % CHUNKS
        seen = store.chunk_changes.state("n", document.doc_id, ordinal)
        new = NewText(f"edit {turn}", 2, vectors_of("edit", turn)[0])
        store.chunk_changes.change(
            "n", document.doc_id, ordinal, seen.version, text=new, disabled=turn % 3 == 0
        )
        print(turn, flush=True)


def main() -> None:
    data_dir, index_type, mode, start = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    store = open_store(data_dir)
    store.ensure_namespace("n", embedder="e", dim=16, index_type=index_type)
    print("ready", flush=True)
    if mode == "correct":
        correct(store)
    for edition in range(start, start + 1_000_000):
        store.replace_documents("n", [item(f"d{i}", CHUNKS, edition=edition) for i in range(DOCUMENTS)])
        print(edition, flush=True)
        if mode == "save":
            store.save()
        elif mode == "remove":
            texts(store, vectors_of("q"), 5)
            found = store.find_source("n", f"d{edition % DOCUMENTS}")
            if found is not None:
                store.remove_document("n", found.doc_id)


main()
