"""Forget what was measured in a namespace that was dropped: one that is made again has other texts."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Collection
from pathlib import Path

from ragserve.errors import InvalidRequest, RagserveError
from ragserve.profiles import gate, in_use
from ragserve.verification import rows
from ragserve.verification.verdicts import FOLDER
from ragserve_index import IndexStore

log = logging.getLogger(__name__)
_DIGEST = re.compile("[0-9a-f]{12}")  # ends the name of a folder of rows (`state_name`)


def forget(data_dir: Path, namespace: str) -> None:
    """Remove a namespace's verdicts, what use has shown, rows and map. Raises OSError, Unavailable where
    another process does not stop writing, InvalidRequest for a foreign file."""
    gate.forget(data_dir / gate.FILE_NAME, namespace)
    in_use.forget(data_dir / in_use.FILE_NAME, namespace)
    folder = data_dir / FOLDER
    for path in folder.iterdir() if folder.is_dir() else ():
        name, _, digest = path.name.rpartition("-")
        if name == namespace and _DIGEST.fullmatch(digest) and path.is_dir():
            shutil.rmtree(path)
    for suffix in ("json", "html"):
        (folder / f"tune-{namespace}.{suffix}").unlink(missing_ok=True)


def forget_or_log(data_dir: Path, namespace: str) -> None:
    """As `forget`, where what cannot be removed must not fail what is done already."""
    try:
        forget(data_dir, namespace)
    except (OSError, RagserveError) as error:
        log.warning("What was measured in %s, which was dropped, is left on disk: %s", namespace, error)


def forget_outdated(data_dir: Path, store: IndexStore, dropped: Collection[str] = ()) -> None:
    """Forget what was measured in namespaces that were made again, whoever dropped them, and in ``dropped``
    ones, by the registry's log, that are gone; and the texts in rows of earlier versions. What else is not in
    the registry is kept: this may be the wrong one, or an older copy of it. Records of earlier versions do
    not say when their namespace was made, and stay. What cannot be read or removed is logged.

    Raises the errors of a registry that cannot be read."""
    for folder in sorted((data_dir / FOLDER).glob("*")):
        try:
            rows.strip(folder)
        except OSError as error:
            log.warning("Texts in rows of earlier versions may be left on disk: %s", error)
    measured: dict[str, set[float]] = {name: set() for name in dropped}
    for file in (gate, in_use):
        try:
            for namespace, of_records in file.made_at(data_dir / file.FILE_NAME).items():
                measured.setdefault(namespace, set()).update(of_records)
        except (OSError, InvalidRequest) as error:
            log.warning("What was measured in namespaces that were dropped may be left on disk: %s", error)
    now = store.made_at() if measured else {}
    for namespace, of_records in measured.items():
        if of_records - {0.0, now[namespace]} if namespace in now else namespace in dropped:
            forget_or_log(data_dir, namespace)
