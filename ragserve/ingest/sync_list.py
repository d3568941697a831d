"""The sources that `ragserve sync run` brings up to date: ``data_dir/sync.json``, by namespace."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ragserve.errors import Conflict, RagserveError
from ragserve.files import locked, write_json
from ragserve.ingest.submissions import PathOptions

MOST = 10_000
"""Sources of a data folder."""

_FILE, _LOCK, _RUN_LOCK = "sync.json", "sync.lock", "sync-run.lock"
_WAIT_S = 10.0
_OPTIONS = {field.name for field in fields(PathOptions)}


@dataclass(frozen=True, slots=True)
class SyncSource:
    """A path, URL or address, normalised, whose documents a namespace has."""

    namespace: str
    source: str
    options: PathOptions

    def as_json(self) -> dict[str, Any]:
        """The source as plain data."""
        given = {name: value for name, value in asdict(self.options).items() if value or value == ()}
        return {"namespace": self.namespace, "source": self.source, **given}


class SyncList:
    """The sources of a data folder. Safe for several processes; the file is written as a whole."""

    def __init__(self, data_dir: Path) -> None:
        self._folder = data_dir
        self._path = data_dir / _FILE

    def all(self) -> list[SyncSource]:
        """All sources, by namespace and source. Raises ``RagserveError`` for a damaged file."""
        try:
            stored = json.loads(self._path.read_text(encoding="utf-8"))
            return sorted(map(_source, stored), key=lambda each: (each.namespace, each.source))
        except FileNotFoundError:
            return []
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            hint = "Mend it, or remove it and add the sources again: ragserve sync add."
            raise RagserveError(f"{self._path} cannot be read ({error}).", hint=hint) from error

    def change(self, change: Callable[[list[SyncSource]], list[SyncSource]]) -> None:
        """Replace the sources by what ``change`` makes of them."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with locked(self._folder / _LOCK, wait_s=_WAIT_S) as alone:
            if not alone:
                raise Conflict(f"Another process changes {self._path}.", hint="Try again.")
            write_json(self._path, [each.as_json() for each in change(self.all())], durable=True)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let no other process bring this folder's sources up to date while the block lasts. Raises
        ``Conflict``."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with locked(self._folder / _RUN_LOCK) as alone:
            if not alone:
                hint = "Wait for its end, or leave it to the one with --every."
                raise Conflict("Another `ragserve sync run` works on this data folder.", hint=hint)
            yield


def _source(stored: Mapping[str, Any]) -> SyncSource:
    given = {name: value for name, value in stored.items() if name in _OPTIONS}
    given["globs"] = tuple(map(str, given.get("globs", ())))
    if "labels" in given:
        given["labels"] = tuple(map(str, given["labels"]))
    return SyncSource(str(stored["namespace"]), str(stored["source"]), PathOptions(**given))
