"""Profile files: JSON with a format version and an entry per model, by its fingerprint."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter

from ragserve.errors import InvalidRequest, RagserveError, Unavailable
from ragserve.files import locked, write_json

log = logging.getLogger(__name__)
_LOCK_WAIT_S = 10.0
T = TypeVar("T")


def changed_at(place: Path) -> int:
    """When a file was last written, in nanoseconds; 0 if it cannot be read."""
    try:
        return place.stat().st_mtime_ns
    except OSError:
        return 0


class ProfileFile(Generic[T]):
    """A kind of profile file, whose entries are profiles of type ``kind``, checked by pydantic."""

    def __init__(
        self, version: int, what: str, command: str, kind: Any, *, reads: tuple[int, ...] = ()
    ) -> None:
        """``what`` it is and the ``command`` that writes it appear in error messages; ``reads``: earlier
        versions whose entries are entries of this one, too."""
        self.version, self.what, self.command = version, what, command
        self._reads = (version, *reads)
        self._entry: TypeAdapter[T] = TypeAdapter(kind)

    def load(self, place: Path, fingerprint: str) -> T | None:
        """Load a model's profile, None if there is none. Raises InvalidRequest for a file that is no such
        profile file."""
        entry = self.models(place).get(fingerprint)
        with self._checked(place):
            return None if entry is None else self._entry.validate_python(entry)

    def save(self, place: Path, fingerprint: str, profile: T) -> None:
        """Write a model's profile; see :meth:`update`."""
        self.update(place, fingerprint, lambda _: self.dump(profile))

    def revise(self, place: Path, fingerprint: str, change: Callable[[T | None], T]) -> None:
        """Replace a model's profile, None if there is none, by ``change(profile)``; see :meth:`update`."""

        def changed(entry: dict[str, Any]) -> dict[str, Any]:
            with self._checked(place):
                known = self._entry.validate_python(entry) if entry else None
            return dict(self.dump(change(known)))

        self.update(place, fingerprint, changed)

    def dump(self, profile: T) -> Any:
        """Return a profile as JSON. Raises RagserveError for a figure that is not finite."""
        found = self._entry.dump_python(profile, mode="json")
        try:
            json.dumps(found, allow_nan=False)
        except ValueError as error:
            raise RagserveError(
                f"A figure of the {self.what} is not finite, so nothing is written.",
                hint="Look at the model's weights, or at what else uses the machine, and run "
                f"{self.command} again.",
            ) from error
        return found

    def dump_or_log(self, profile: T, what: str) -> dict[str, Any]:
        """As `dump`; empty, with a warning that ``what`` is not recorded, where a figure is not finite."""
        try:
            return dict(self.dump(profile))
        except RagserveError as error:
            log.warning("%s is not recorded: %s", what, error)
            return {}

    def update(
        self, place: Path, fingerprint: str, change: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> None:
        """Replace a model's entry by ``change(entry)``, durably and atomically, beside others; of several
        writers each sees what the one before wrote. Raises InvalidRequest for a foreign file, Unavailable
        where another writer does not end."""
        place = Path(os.path.realpath(place))  # one lock for all links to a file
        place.parent.mkdir(parents=True, exist_ok=True)
        with locked(place.with_name(f"{place.name}.lock"), wait_s=_LOCK_WAIT_S) as alone:
            if not alone:
                raise Unavailable(f"Another process is writing {place}.", hint="Try again when it has ended.")
            models = self.models(place)
            models[fingerprint] = change(dict(models.get(fingerprint, {})))
            write_json(place, {"version": self.version, "models": models}, durable=True)

    def models(self, place: Path) -> dict[str, Any]:
        """Entries by fingerprint; empty if there is no file. Raises InvalidRequest for a foreign file."""
        if not place.exists():
            return {}
        with self._checked(place):
            raw = json.loads(place.read_text(encoding="utf-8"))
            if raw["version"] not in self._reads:
                raise ValueError(f"version {raw['version']}, not {self.version}")
            return dict(raw["models"])

    @contextmanager
    def _checked(self, place: Path) -> Iterator[None]:
        try:
            yield
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidRequest(
                f"{place} is not a {self.what}: {error!r}.", hint=f"Move it away and run {self.command}."
            ) from error
