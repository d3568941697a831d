"""A document folder without a server: figures, verification, removal. No torch, no SGLang, no model.

While a server owns the folder, ``stat`` and ``verify`` are safe; removing is left to the server, whose memory
would still have the documents (``FolderInUse``)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_ext.documents.page_files import DocumentFiles, ranks, verify_document
from sglang_ext.documents.page_format import PageError, token_array, valid_key, valid_namespace


class FolderInUse(RuntimeError):
    """A server owns the folder: ask it to remove."""


@dataclass(frozen=True)
class Bad:
    """A document that a server would treat as a miss, and why."""

    rank: str
    namespace: str
    key: str
    reason: str


@dataclass
class FolderReport:
    """What ``verify`` read."""

    documents: int = 0
    pages: int = 0
    bytes_: int = 0
    bad: list[Bad] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.bad


def stat(root: Path) -> dict[str, Any]:
    """Documents and file bytes, in all and by namespace, summed over tensor-parallel ranks; and whether a
    server owns the folder.
    """
    spaces: defaultdict[str, Counter[str]] = defaultdict(Counter)
    folders = ranks(root)
    for folder in folders:
        for found in folder.scan():
            spaces[found.namespace].update({"files": 1, "bytes": found.size})
    return {
        "path": str(root),
        "ranks": [folder.folder.name for folder in folders],
        "in_use": any(_in_use(folder) for folder in folders),
        "files": sum(space["files"] for space in spaces.values()),
        "bytes": sum(space["bytes"] for space in spaces.values()),
        "namespaces": {name: dict(figures) for name, figures in sorted(spaces.items())},
    }


def verify(root: Path) -> FolderReport:
    """Read every page of every document and check its CRC. A document that is removed meanwhile is left out."""
    report = FolderReport()
    for folder in ranks(root):
        for found in folder.scan():
            try:
                record = verify_document(folder, found, None)
            except FileNotFoundError:
                continue
            except (PageError, OSError) as error:
                reason = error.reason if isinstance(error, PageError) else "io"
                report.bad.append(Bad(folder.folder.name, found.namespace, found.key, f"{reason}: {error}"))
                continue
            report.documents += 1
            report.pages += record.n_pages
            report.bytes_ += found.size
    return report


def remove(root: Path, key: str, *, namespace: str | None = None) -> bool:
    """Remove a document, in one namespace or wherever it is; whether there was one. Raises FolderInUse,
    ValueError for a malformed name.
    """
    _check(namespace, key)
    folders = _owned(root)
    try:
        pairs = [
            (folder, name)
            for folder in folders
            for name in ([namespace] if namespace is not None else folder.namespaces())
        ]
        return any([folder.remove(name, key) for folder, name in pairs])  # noqa: C419 - from every rank, not from the first only
    finally:
        _release(folders)


def remove_texts(root: Path, token_ids: Collection[Sequence[int]], *, namespace: str) -> int:
    """Remove the documents of a namespace that are these token ids, computed by whatever model; how many
    files.

    Reads the records, a few KiB each, of all documents of the namespace. Raises FolderInUse, ValueError for a
    malformed name."""
    _check(namespace)
    wanted = {token_array(ids).tobytes() for ids in token_ids}
    folders = _owned(root)
    try:
        removed = 0
        for folder in folders:
            for found in folder.scan(namespace):
                try:
                    record = folder.read_record(namespace, found.key, None)
                except (PageError, OSError):  # not readable for any server either
                    continue
                if record.token_ids.tobytes() in wanted:
                    removed += folder.remove(namespace, found.key)
        return removed
    finally:
        _release(folders)


def clear(root: Path, *, namespace: str | None = None) -> int:
    """Remove all documents (of a namespace); how many files. Raises FolderInUse, ValueError for a malformed
    name.
    """
    _check(namespace)
    folders = _owned(root)
    try:
        removed = 0
        for folder in folders:
            for name in [namespace] if namespace is not None else folder.namespaces():
                removed += len(folder.remove_namespace(name))
            folder.sweep()
        return removed
    finally:
        _release(folders)


def _check(namespace: str | None, key: str = "any") -> None:
    """Names become paths."""
    if not valid_key(key) or not (namespace is None or valid_namespace(namespace)):
        raise ValueError(f"not a namespace or document key: {namespace!r}, {key!r}")


def _in_use(folder: DocumentFiles) -> bool:
    free = folder.acquire(0)
    folder.release()
    return not free


def _owned(root: Path) -> list[DocumentFiles]:
    folders = ranks(root)
    for folder in folders:
        if not folder.acquire(0):
            _release(folders)
            raise FolderInUse(f"a server is using {root}: remove through it, or stop it first")
    return folders


def _release(folders: list[DocumentFiles]) -> None:
    for folder in folders:
        folder.release()
