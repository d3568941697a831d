"""Deletions that a store has not confirmed, in a file that outlives the process."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

_MOST = 10_000  # documents; for more, their namespaces are dropped whole


@dataclass(frozen=True, slots=True)
class Deletion:
    """A document; without a ``key`` a namespace; without either everything of this rank and model."""

    namespace: str | None = None
    key: str | None = None


class Deletions:
    """What still has to be deleted. Until it is, nothing of it is read or stored. Requires the store's lock,
    but for ``write``."""

    def __init__(self, path: Path | None) -> None:
        """``path``: the journal; None keeps it in memory. Raises ValueError for a file that is not ours."""
        self._path = path
        self._left: dict[Deletion, int] = {}  # by number of the deletion, in order
        self._last = 0
        self._version = self._saved = 0  # of what is left, and of the journal
        if path is None or not path.exists():
            return
        try:
            for namespace, key in json.loads(path.read_text(encoding="utf-8"))["unconfirmed"]:
                self.add(Deletion(namespace, key))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} cannot be read ({error!r}). It says which removed documents the shared store may "
                "still have: restore it, or delete it and empty the store"
            ) from error
        self._saved = self._version

    @property
    def changed(self) -> bool:
        """True until the journal says what is left."""
        return self._saved != self._version

    def __len__(self) -> int:
        return len(self._left)

    def add(self, deletion: Deletion) -> None:
        """Note a deletion."""
        if deletion.key is not None and Deletion(deletion.namespace) in self._left:
            return
        self._last += 1
        self._version += 1
        self._left[deletion] = self._last
        if len(self._left) > _MOST:
            spaces = {each.namespace for each in self._left}
            self._left = {Deletion(space): self._last for space in spaces}

    def covers(self, key: str, namespace: str) -> bool:
        """True for a document that still has to be deleted."""
        return bool(self._left) and self.covering([key], namespace) > 0

    def covering(self, keys: Sequence[str] | None, namespace: str | None) -> int:
        """How many of these documents still have to be deleted; without keys 1 where their whole namespace
        has to be, and without a namespace where everything has."""
        if Deletion() in self._left or (namespace is not None and Deletion(namespace) in self._left):
            return 1 if keys is None else len(keys)
        return sum(Deletion(namespace, key) in self._left for key in keys or ())

    def left(self) -> dict[Deletion, int]:
        """What has to be deleted, oldest first, with its number."""
        return dict(self._left)

    def confirm(self, deletion: Deletion, number: int) -> None:
        """Strike out what the store has deleted, unless it was to be deleted once more since."""
        if self._left.get(deletion) == number:
            del self._left[deletion]
            self._version += 1

    def writer(self) -> Callable[[], None]:
        """A function that makes the present state last, to be called without the lock. Raises OSError."""
        path, version = self._path, self._version
        text = json.dumps({"unconfirmed": [[each.namespace, each.key] for each in self._left]})

        def write() -> None:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                temporary = path.with_suffix(".new")
                with temporary.open("w", encoding="utf-8") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(path)
            self._saved = version

        return write
