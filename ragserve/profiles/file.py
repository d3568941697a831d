"""Profile files: JSON with a format version and an entry per model, by its fingerprint."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from ragserve.errors import InvalidRequest
from ragserve.files import write_json

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
        """Write a model's entry, atomically, beside others. Raises InvalidRequest for a foreign file."""
        models = self.models(place) | {fingerprint: dict(entry)}
        write_json(place, {"version": self.version, "models": models})

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
