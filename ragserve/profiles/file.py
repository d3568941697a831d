"""Profile files: JSON with a format version and an entry per model, by its fingerprint."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from ragserve.errors import InvalidRequest, Unavailable
from ragserve.files import locked, write_json

_LOCK_WAIT_S = 10.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ProfileFile(Generic[T]):
    """A kind of profile file. ``what`` it is and the ``command`` that writes it appear in error messages.
    ``read`` makes a profile from an entry's fields; it may raise KeyError, TypeError, ValueError or
    AttributeError."""

    version: int
    what: str
    command: str
    read: Callable[[dict[str, Any]], T]

    def load(self, place: Path, fingerprint: str) -> T | None:
        """Load a model's profile, None if there is none. Raises InvalidRequest for a file that is no such
        profile file."""
        entry = self.models(place).get(fingerprint)
        with self._checked(place):
            return None if entry is None else self.read(dict(entry))

    def save(self, place: Path, fingerprint: str, profile: T) -> None:
        """Write a model's profile, a dataclass; see :meth:`write`."""
        self.write(place, fingerprint, asdict(profile))  # type: ignore[call-overload]

    def write(self, place: Path, fingerprint: str, entry: Mapping[str, Any]) -> None:
        """Write a model's entry; see :meth:`update`."""
        self.update(place, fingerprint, lambda _: dict(entry))

    def update(
        self, place: Path, fingerprint: str, change: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> None:
        """Replace a model's entry by ``change(entry)``, durably and atomically, beside others; of several
        writers each sees what the one before wrote. Raises InvalidRequest for a foreign file, Unavailable
        where another writer does not end."""
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
            if raw["version"] != self.version:
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
