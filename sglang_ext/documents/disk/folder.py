"""A document folder without a server: figures, verification, removal. Imports neither torch nor SGLang.

``stat`` and ``verify`` are safe while a server owns the folder. Removing is refused then (``FolderInUse``),
because the server would still have the documents in memory."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from sglang_ext.documents.disk.page_files import DocumentFiles, ranks
from sglang_ext.documents.disk.verification import VerifyReport, read_document
from sglang_ext.documents.pages.page_format import PageError, token_array, valid_namespace


class FolderInUse(RuntimeError):
    """A server owns the folder: remove through it."""


def stat(root: Path) -> dict[str, Any]:
    """Count documents and file bytes, in all and by namespace, summed over tensor-parallel ranks. ``in_use``:
    a server owns the folder.
    """
    spaces: defaultdict[str, Counter[str]] = defaultdict(Counter)
    folders = ranks(root)
    for folder in folders:
        for found in folder.scan():
            spaces[found.namespace].update({"files": 1, "bytes": found.size})
    return {
        "path": str(root),
        "ranks": [folder.folder.name for folder in folders],
        "in_use": in_use(root),
        "files": sum(space["files"] for space in spaces.values()),
        "bytes": sum(space["bytes"] for space in spaces.values()),
        "namespaces": {name: dict(figures) for name, figures in sorted(spaces.items())},
    }


def verify(root: Path) -> VerifyReport:
    """Read every page of every document and check its CRC."""
    report = VerifyReport()
    for folder in ranks(root):
        report.add(folder.scan(), partial(read_document, folder, layout=None))
    return report


def remove_texts(root: Path, token_ids: Collection[Sequence[int]], *, namespace: str) -> int:
    """Remove a namespace's documents with these token ids, whatever model computed them, and return the
    number of files.

    Reads the records, a few KiB each, of all documents of the namespace. Raises FolderInUse, ValueError for a
    malformed name, and, when all others are removed, OSError for one that could not be read or removed."""
    _check(namespace)
    wanted = {token_array(ids).tobytes() for ids in token_ids}
    removed, failed = 0, list[OSError]()
    with _owned(root) as folders:
        for folder in folders:
            for found in folder.scan(namespace, failed.append):
                try:
                    record = folder.read_record(namespace, found.key, None)
                    if record.token_ids.tobytes() in wanted:
                        removed += folder.remove(namespace, found.key)
                except (PageError, FileNotFoundError):  # no server could read it either
                    continue
                except OSError as error:
                    failed.append(error)
            folder.sweep_trash()
    if failed:
        raise failed[0]
    return removed


def clear(root: Path, *, namespace: str | None = None) -> int:
    """Remove all documents (of a namespace) and return the number of files. Raises FolderInUse, ValueError
    for a malformed name.
    """
    if namespace is not None:
        _check(namespace)
    removed = 0
    with _owned(root) as folders:
        for folder in folders:
            for name in [namespace] if namespace is not None else folder.namespaces():
                removed += len(folder.remove_namespace(name))
            folder.sweep()
    return removed


def _check(namespace: str) -> None:
    """Names become paths."""
    if not valid_namespace(namespace):
        raise ValueError(f"not a namespace: {namespace!r}")


def in_use(root: Path) -> bool:
    """Return whether a server owns the folder."""
    try:
        with _owned(root):
            return False
    except FolderInUse:
        return True


@contextmanager
def _owned(root: Path) -> Iterator[list[DocumentFiles]]:
    """Own the folders of all ranks. Raises FolderInUse."""
    folders = ranks(root)
    try:
        for folder in folders:
            if not folder.acquire(0):
                raise FolderInUse(f"a server is using {root}: remove through it, or stop it first")
        yield folders
    finally:
        for folder in folders:
            folder.release()
