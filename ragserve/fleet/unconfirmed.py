"""Deletions that a worker has not confirmed, in a file of the data folder."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection
from itertools import chain
from pathlib import Path
from typing import Any

from ragserve.errors import Unavailable
from ragserve.files import write_json
from sglang_ext.wire.protocol import session_namespace

FILE_NAME = "ragserve-workers.json"
MOST = 10_000
"""Documents and sessions that are remembered for a worker; for more, it has to drop all of their
namespaces."""

Deletion = dict[str, Any]
"""Arguments of a control operation, with its name as ``op``."""


class Unconfirmed:
    """Deletions by worker, in order. Every worker that has ever been seen is remembered: one that comes back
    after months must not bring removed documents with it. Belongs to one event loop."""

    def __init__(self, data_dir: Path) -> None:
        """Raises Unavailable for a file that cannot be read: it may hold deletions."""
        self._path = data_dir / FILE_NAME
        self._lock = asyncio.Lock()
        self._changed = False
        self._workers: dict[str, list[Deletion]] = {}
        try:
            self._workers = _checked(json.loads(self._path.read_text(encoding="utf-8"))["unconfirmed"])
        except FileNotFoundError:
            pass
        except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
            raise Unavailable(
                f"{self._path} cannot be read: {error!r}.",
                hint="It says which removed documents workers may still have. Restore it; or delete it, and "
                "empty the document cache of every worker (kv/ of its data folder).",
            ) from error

    @property
    def workers(self) -> list[str]:
        """All workers that have ever been seen."""
        return list(self._workers)

    def know(self, worker: str) -> None:
        """Remember a worker."""
        if worker not in self._workers:
            self._workers[worker] = []
            self._changed = True

    def of(self, worker: str) -> list[Deletion]:
        """The deletions that a worker has not confirmed, oldest first."""
        return list(self._workers.get(worker, ()))

    def add(self, workers: Collection[str], deletion: Deletion) -> None:
        """Note a deletion for ``workers``; `save` makes it last."""
        for worker in workers:
            self.know(worker)
            noted = self._workers[worker]
            namespace = _part_of(deletion)
            if namespace is not None and _dropped(namespace) in noted:
                continue
            noted.append(deletion)
            if sum(len(each["keys"]) if "keys" in each else 1 for each in noted) > MOST:
                self._workers[worker] = _shortened(noted)
            self._changed = True

    def confirm(self, worker: str, deletion: Deletion) -> None:
        """Strike out a deletion that the worker has carried out."""
        if deletion in self._workers.get(worker, ()):
            self._workers[worker].remove(deletion)
            self._changed = True

    async def save(self) -> None:
        """Write what has changed. Raises Unavailable."""
        async with self._lock:
            if not self._changed:
                return
            self._changed = False
            text = {"unconfirmed": {name: list(noted) for name, noted in self._workers.items()}}
            try:
                await asyncio.to_thread(write_json, self._path, text, durable=True)
            except BaseException as error:
                self._changed = True
                if isinstance(error, OSError):
                    raise Unavailable(
                        f"{self._path} cannot be written: {error}.", hint="Free space on its disk."
                    ) from error
                raise


def _checked(found: Any) -> dict[str, list[Deletion]]:
    """Raises TypeError, LookupError and AttributeError for what are no deletions by worker."""
    if not isinstance(found, dict) or not all(isinstance(noted, list) for noted in found.values()):
        raise TypeError("no lists of deletions by worker")
    for each in chain.from_iterable(found.values()):
        if not isinstance(each, dict) or not isinstance(each["op"], str):
            raise TypeError(f"{each!r} is no deletion")
        _part_of(each)
    return found


def _dropped(namespace: str) -> Deletion:
    return {"op": "remove_namespace", "namespace": namespace}


def _part_of(deletion: Deletion) -> str | None:
    """The namespace of a deletion that drops a part of one; None for others."""
    if deletion["op"] == "remove":
        return str(deletion["namespace"])
    return session_namespace(deletion["key"]) if deletion["op"] == "remove_session" else None


def _shortened(noted: list[Deletion]) -> list[Deletion]:
    """Drop whole namespaces in place of parts of them: their other documents are computed again."""
    parts = dict.fromkeys(name for each in noted if (name := _part_of(each)) is not None)
    dropped = [_dropped(name) for name in parts]
    return [*dropped, *(each for each in noted if _part_of(each) is None and each not in dropped)]
