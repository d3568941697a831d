"""Run by the kill tests in a process of its own: writes until it is killed, and says what was committed
before it goes on.

Usage: killed_writer.py DATA_DIR INDEX_TYPE MODE START. Modes: ``replace`` writes rounds of the same
documents; ``save`` also saves after each; ``remove`` removes and writes anew."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.unit.index.index_samples import item, open_store, texts, vectors_of

DOCUMENTS, CHUNKS = 8, 25


def main() -> None:
    data_dir, index_type, mode, start = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    store = open_store(data_dir)
    store.ensure_namespace("n", embedder="e", dim=16, index_type=index_type)
    print("ready", flush=True)
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
