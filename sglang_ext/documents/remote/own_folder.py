"""The folder of a shared store is its own, for eviction deletes files there: a marker file says so, and a
folder that holds anything else is refused. Imports neither torch nor SGLang."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from sglang_ext.documents.disk.page_files import ranks
from sglang_ext.documents.pages.page_format import valid_key, valid_namespace

MARKER = ".ragserve-kv"
_ROOT = re.compile(r"v\d+-[0-9a-f]{32}")  # of one page format and model
_UNFINISHED = re.compile(r"[\w-]{1,128}\.\w+\.\d+")
_TEXT = "ragserve keeps documents' KV here, and deletes its least recently used files over a limit.\n"


class ForeignFolder(ValueError):
    """A folder holds what no store has put there."""


def claim(folder: Path) -> None:
    """Make sure that a folder is a store's own, and mark it where it is empty or of an earlier version.

    Raises ForeignFolder, and OSError where it cannot be read or written, such as one that is away."""
    marker = folder / MARKER
    if marker.is_file():
        return
    names = sorted(path.name for path in folder.iterdir())
    if foreign := [name for name in names if not _ROOT.fullmatch(name)]:
        raise ForeignFolder(
            f"the folder {folder} holds other files, such as {foreign[0]!r}, and a shared store deletes "
            "files in its folder: give it one of its own"
        )
    marker.write_text(_TEXT, encoding="utf-8")


def own_files(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the files of all models and ranks in a store's folder, and whether each is finished. What has
    other names than a store gives is left out."""
    roots = [path for path in folder.iterdir() if _ROOT.fullmatch(path.name) and path.is_dir()]
    for files in (each for root in roots for each in ranks(root)):
        with suppress(OSError):  # another engine removes what it lists
            for found in files.scan():
                if valid_namespace(found.namespace) and valid_key(found.key):
                    yield files.path(found.namespace, found.key), True
        with suppress(OSError):
            for path in (files.folder / ".tmp").iterdir():
                if _UNFINISHED.fullmatch(path.name):
                    yield path, False
